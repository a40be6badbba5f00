"""One turn against an engine that is switched, restarted or gone."""

import asyncio

import httpx
import pytest

from rljob.engine import Generation
from rljob.errors import DeadlineError, EngineError, EngineNotReadyError
from rljob.gateway import ENGINE_WAIT_LIMIT_SECONDS, SessionSampling
from rljob.ids import PolicyVersion
from rljob_services.gateway.turn import MAX_SUBMISSIONS, EngineGoneError, ReadyGate, Turn

SAMPLING = SessionSampling(temperature=0.7, top_p=0.9)
STOP = 2


def unreachable() -> EngineError:
    error = EngineError("engine is unreachable")
    error.__cause__ = httpx.ConnectError("refused")
    return error


def tokens(*ids: int, reason: str = "stop", n: int = 0) -> Generation:
    return Generation(
        token_ids=list(ids),
        logprobs=[-0.1 * i for i in ids],
        finish_reason=reason,
        version=PolicyVersion(1, n),
        boot_id="b",
    )


@pytest.fixture
def turn(engine, clock) -> Turn:
    return Turn(engine, ReadyGate(engine, clock), 60.0, clock)


async def sample(turn: Turn, max_tokens: int = 10):
    return await turn.sample([100, 101], max_tokens, SAMPLING, [STOP])


async def test_a_turn_asks_for_what_its_session_says(turn, engine):
    engine.steps = [tokens(5, STOP)]
    sampled = await sample(turn)
    (request,) = engine.requests
    assert (list(request.prompt_ids), request.max_tokens, request.temperature, request.top_p) == (
        [100, 101],
        10,
        0.7,
        0.9,
    )
    assert sampled.token_ids == [5, STOP]
    assert sampled.versions == [(2, (1, 0))]
    assert sampled.finish_reason == "stop"


async def test_a_switch_in_mid_turn_keeps_the_tokens_and_asks_for_the_rest(turn, engine):
    engine.steps = [tokens(5, 6, reason="abort"), tokens(reason="abort", n=1), tokens(7, STOP, n=2)]
    sampled = await sample(turn)
    assert [list(r.prompt_ids) for r in engine.requests] == [
        [100, 101],
        [100, 101, 5, 6],
        [100, 101, 5, 6],
    ]
    assert [r.max_tokens for r in engine.requests] == [10, 8, 8]
    assert sampled.token_ids == [5, 6, 7, STOP]
    assert sampled.versions == [(2, (1, 0)), (0, (1, 1)), (2, (1, 2))]
    assert sampled.logprobs == pytest.approx([-0.5, -0.6, -0.7, -0.2])


async def test_a_switch_exactly_at_the_end_asks_for_nothing_more(turn, engine):
    engine.steps = [tokens(5, STOP, reason="abort")]
    assert (await sample(turn)).finish_reason == "stop"
    engine.steps = [tokens(5, 6, reason="abort")]
    assert (await sample(turn, max_tokens=2)).finish_reason == "length"


async def test_an_engine_that_aborts_for_ever_is_an_error(turn, engine):
    engine.steps = [tokens(reason="abort") for _ in range(MAX_SUBMISSIONS)]
    with pytest.raises(EngineError, match="aborted the turn"):
        await sample(turn)


async def test_the_clock_stands_still_while_the_engine_is_not_ready(turn, engine):
    engine.steps = [EngineNotReadyError("switching"), tokens(STOP)]
    engine.states = ["switching"] * 1000 + ["ready"]
    assert (await sample(turn)).token_ids == [STOP]
    assert turn.engine_wait_seconds > 200
    assert turn.remaining_seconds == pytest.approx(60)


async def test_an_engine_that_never_gets_ready_is_a_deadline(turn, engine, clock):
    engine.steps = [EngineNotReadyError("empty")] * 3
    engine.states = ["empty"] * 100_000

    async def late(_):
        turn.engine_wait_seconds = ENGINE_WAIT_LIMIT_SECONDS
        raise EngineNotReadyError("empty")

    engine.steps = [late]
    with pytest.raises(DeadlineError, match="not ready for 1800 s"):
        await sample(turn)
    await turn._gate.aclose()


async def test_an_engine_that_restarts_is_asked_again_within_the_deadline(turn, engine, clock):
    engine.steps = [
        tokens(5, reason="abort"),
        *[unreachable() for _ in range(20)],
        EngineNotReadyError("starting"),
        tokens(STOP, n=3),
    ]
    sampled = await sample(turn)
    assert sampled.token_ids == [5, STOP]
    assert clock.time - 1000 > 20 * 0.25


async def test_an_engine_that_stays_unreachable_is_named_at_the_deadline(turn, engine, clock):
    engine.steps = [unreachable() for _ in range(1000)]
    with pytest.raises(EngineGoneError, match="unreachable; the turn's deadline of 60 s passed"):
        await sample(turn)
    assert clock.time - 1000 == pytest.approx(60, abs=1)


async def test_a_turn_that_takes_too_long_is_a_deadline(turn, engine, clock):
    async def slow(_):
        await clock.sleep(61)
        return tokens(5, reason="abort")

    engine.steps = [slow]
    with pytest.raises(DeadlineError, match="did not end within 60 s"):
        await sample(turn)


async def test_a_refusal_of_an_engine_that_serves_is_not_asked_again(turn, engine):
    engine.steps = [EngineError("engine refused: 400")]
    with pytest.raises(EngineError, match="400"):
        await sample(turn)


@pytest.mark.parametrize(
    "state", ["failed", "starting", EngineError("gone"), DeadlineError("silent")]
)
async def test_a_refusal_of_an_engine_that_is_about_to_restart_is_asked_again(turn, engine, state):
    engine.steps, engine.states = [EngineError("engine refused: 500"), tokens(STOP)], [state]
    assert (await sample(turn)).token_ids == [STOP]


@pytest.mark.parametrize(
    "wrong",
    [
        Generation(
            token_ids=[1, 2],
            logprobs=[-1.0],
            finish_reason="stop",
            version=PolicyVersion(1, 0),
            boot_id="b",
        ),
        tokens(*range(11)),
    ],
)
async def test_tokens_that_do_not_add_up_are_refused_and_never_padded(turn, engine, wrong):
    engine.steps = [wrong]
    with pytest.raises(EngineError, match="engine answered"):
        await sample(turn)


async def test_turns_that_wait_share_one_poller(engine, clock):
    gate = ReadyGate(engine, clock)
    asked = 0
    status = engine.status

    async def counted(**kwargs):
        nonlocal asked
        asked += 1
        return await status(**kwargs)

    engine.status, engine.states = counted, ["switching", "ready"]
    await asyncio.gather(*(gate.wait(10) for _ in range(50)))
    assert asked == 2


async def test_waiting_ends_when_the_engine_is_gone_so_that_a_submission_tells(engine, clock):
    engine.states = ["switching", EngineError("gone")]
    await ReadyGate(engine, clock).wait(10)
    assert not engine.states
