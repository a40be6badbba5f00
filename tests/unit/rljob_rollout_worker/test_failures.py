"""Failures of the parts: infrastructure is retried, the agent's own are data, and nothing stays behind."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from rljob.codec import unpack
from rljob.errors import (
    DataError,
    DeadlineError,
    EngineError,
    FencedError,
    GatewayError,
    SandboxError,
    StoreError,
)
from rljob.ids import EpisodeId
from rljob.task_config import Reward
from rljob.testing.chat import FakeGateway, call
from rljob.testing.ledger import FakeLedger
from rljob.testing.sandbox import FakeBroker
from rljob_rollout_worker.tasks.shell_files import ShellFiles

Make = Callable[..., Any]


class Faults:
    """Raises at random, by operation."""

    def __init__(self, seed: int, rates: dict[str, tuple[float, type[Exception]]]) -> None:
        self._rng, self._rates = random.Random(seed), rates
        self.hits: Counter[str] = Counter()

    async def __call__(self, operation: str) -> None:
        await asyncio.sleep(self._rng.random() * 0.002)
        rate, kind = self._rates.get(operation, (0.0, Exception))
        if self._rng.random() < rate:
            self.hits[operation] += 1
            raise kind(f"injected into {operation}")


def outcomes(home: Any) -> Counter[str]:
    return Counter(info.outcome for _, info in home.ledger.completed.values())


def the_record(home: Any) -> Any:
    ((payload, _),) = home.ledger.completed.values()
    return unpack(payload)


def once(number: int, error: Exception) -> Callable[[], None]:
    """Raises at the `number`-th call only."""
    calls = iter(range(1, 1_000_000))

    def check() -> None:
        if next(calls) == number:
            raise error

    return check


async def test_hundreds_of_episodes_survive_faults_everywhere(house: Make) -> None:
    rates = {
        "acquire": (0.05, SandboxError),
        "exec": (0.03, SandboxError),
        "write_files": (0.05, SandboxError),
        "open": (0.03, GatewayError),
        "turn": (0.03, EngineError),
        "close": (0.03, GatewayError),
        "abort": (0.3, GatewayError),
    }
    faults = Faults(1, rates)
    ledger = FakeLedger(50, group_size=8, max_attempts=50)
    spec = {"rollout": {"maxConcurrentEpisodes": 48}}
    home = house(ledger=ledger, broker=FakeBroker(20, fault=faults), rows=50, spec=spec)
    home.gateway._fault = faults
    await home.run()
    assert set(faults.hits) == set(rates)
    assert len(ledger.completed) == 400
    assert ledger.dead == set()
    assert ledger.leased == {}
    assert set(outcomes(home)) <= {"completed", "agent_error"}
    assert outcomes(home)["completed"] > 390
    assert home.broker.most_claimed == 20


async def test_infrastructure_failures_name_their_stage(house: Make) -> None:
    for operation, kind, stage in (
        ("acquire", SandboxError, "acquire"),
        ("write_files", SandboxError, "setup"),
        ("open", GatewayError, "run"),
        ("turn", EngineError, "run"),
        ("close", GatewayError, "run"),
    ):
        faults = Faults(1, {operation: (1.0, kind)})
        ledger = FakeLedger(1, max_attempts=2)
        home = house(ledger=ledger, broker=FakeBroker(fault=faults))
        home.gateway._fault = faults
        await home.run()
        assert [reason.split(":")[:2] for _, _, reason in ledger.failures] == [
            [stage, f" {kind.__name__}"]
        ] * 2
        assert len(ledger.dead) == 1


async def test_a_reward_that_loses_its_sandbox_is_retried(house: Make) -> None:
    strike = once(1, SandboxError("gone"))

    async def fault(operation: str) -> None:
        if operation == "read_file":
            strike()

    row = {"metadata": {"files": {"a": "k=v\n"}, "answer": "", "expect": {"a": "k=v\n"}}}
    home = house(ledger=FakeLedger(1), broker=FakeBroker(fault=fault), row=row)
    await home.run()
    assert [reason.split(":")[0] for _, _, reason in home.ledger.failures] == ["reward"]
    assert the_record(home).attempt == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (float("nan"), "the reward is nan, not a finite number"),
        (Reward(value=float("inf")), "the reward is inf, not a finite number"),
        (Reward(value=1.0, parts={"style": float("nan")}), "style is nan, not a finite number"),
        (None, "the reward is None, not a finite number"),
        ("0.5", "the reward is '0.5', not a finite number"),
    ],
)
async def test_a_reward_that_is_no_finite_number_is_a_reward_error(
    house: Make, monkeypatch: pytest.MonkeyPatch, given: Any, said: str
) -> None:
    async def reward(*_: Any) -> Any:
        return given

    monkeypatch.setattr(ShellFiles, "reward", reward)
    home = house(ledger=FakeLedger(1))
    with capture_logs() as logs:
        await home.run()
    record = the_record(home)
    assert (record.outcome, record.reward) == ("agent_error", 0.0)
    assert said in record.metadata["error"]
    (line,) = [line for line in logs if line["event"] == "reward_error"]
    assert (said in line["error"], line["so_far"]) == (True, 1)
    assert home.worker.presence.report().facts["reward_errors"] == 1


async def test_a_sandbox_that_dies_twice_under_its_agent_is_the_agents_fault(house: Make) -> None:
    faults = Faults(1, {"exec": (1.0, SandboxError)})
    home = house(ledger=FakeLedger(1), broker=FakeBroker(fault=faults))
    await home.run()
    assert len(home.ledger.failures) == 1
    record = the_record(home)
    assert (record.attempt, record.outcome, record.reward) == (2, "agent_error", 0.0)
    assert "injected" in record.metadata["error"]


async def test_a_gateway_that_restarted_is_an_infrastructure_failure(house: Make) -> None:
    home = house(ledger=FakeLedger(1))
    strike = once(2, Exception())

    async def fault(operation: str) -> None:
        if operation == "turn":
            try:
                strike()
            except Exception:
                home.gateway.restart()

    home.gateway._fault = fault
    await home.run()
    assert [reason.split(":")[1] for _, _, reason in home.ledger.failures] == [" GatewayError"]
    assert the_record(home).outcome == "completed"


async def test_the_run_deadline_ends_the_episode_as_timeout_and_trains(house: Make) -> None:
    async def fault(operation: str) -> None:
        if operation == "exec":
            await asyncio.sleep(30)

    deadlines = {"rollout": {"deadlines": {"runSeconds": 0.4}}}
    ledger = FakeLedger(1, max_attempts=100)  # a machine too slow for the first turn tries again
    home = house(ledger=ledger, broker=FakeBroker(fault=fault), spec=deadlines)
    await home.run()
    record = the_record(home)
    assert (record.outcome, record.turns, record.tool_calls, record.reward) == ("timeout", 1, 1, 0)
    assert record.num_action_tokens > 0


async def test_the_run_clock_stands_still_while_no_engine_is_ready(house: Make) -> None:
    deadlines = {"rollout": {"deadlines": {"runSeconds": 3.0}}}
    home = house(ledger=FakeLedger(1), spec=deadlines)

    pauses = iter([4.0])

    async def fault(operation: str) -> None:
        if operation == "turn" and (pause := next(pauses, 0)):
            home.engine.current, version = None, home.engine.current
            await asyncio.sleep(pause)
            home.engine.current = version

    home.gateway._fault = fault
    await home.run()
    assert the_record(home).outcome == "completed"


async def test_setup_past_its_deadline_is_retried(house: Make) -> None:
    delays = iter([30.0])

    async def fault(operation: str) -> None:
        if operation == "write_files":
            await asyncio.sleep(next(delays, 0.0))

    deadlines = {"rollout": {"deadlines": {"setupSeconds": 0.1}}}
    ledger = FakeLedger(1, max_attempts=100)
    home = house(ledger=ledger, broker=FakeBroker(fault=fault), spec=deadlines)
    await home.run()
    reasons = {reason for _, _, reason in ledger.failures}
    assert reasons == {"setup: DeadlineError: setup was not done within 0.1 s"}
    assert the_record(home).outcome == "completed"


async def test_no_sandbox_in_time_is_retried(house: Make) -> None:
    deadlines = {"rollout": {"deadlines": {"acquireSeconds": 0.1}}}
    ledger = FakeLedger(1, max_attempts=2)
    home = house(ledger=ledger, broker=FakeBroker(size=0), spec=deadlines)
    await home.run()
    assert {reason.split(":")[0] for _, _, reason in ledger.failures} == {"acquire"}
    assert {reason.split(":")[1] for _, _, reason in ledger.failures} == {
        f" {DeadlineError.__name__}"
    }


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"task": "other"}, "train.jsonl:1: task: 'other' is not configured; add it to spec.tasks"),
        ({"metadata": {"answer": 3}}, "train.jsonl:1: metadata: not a shell_files row: Expected"),
        ({"overrides": {"reward": 1}}, "train.jsonl:1: overrides: Object contains unknown field"),
        ({"overrides": {"maxTurns": 0}}, "train.jsonl:1: overrides.maxTurns: 0 is out of range"),
        ({"overrides": {"maxTurns": "many"}}, "train.jsonl:1: overrides: Expected `int | null`"),
    ],
)
async def test_a_row_that_cannot_run_is_refused_at_the_start(
    house: Make, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError) as caught:
        house(row=row)
    assert problem in str(caught.value)


async def test_nothing_sampled_is_nothing_to_train(house: Make) -> None:
    def broken(_messages: Any) -> Any:
        raise ValueError("the agent's own bug")

    home = house(ledger=FakeLedger(1, max_attempts=1), gateway=FakeGateway(broken))
    await home.run()
    ((_, _, reason),) = home.ledger.failures
    assert reason == "run: TaskError: nothing was sampled: ValueError: the agent's own bug"
    (evidence,) = home.ledger.evidence.values()
    assert "Traceback" in evidence


async def test_a_dropped_episode_ends_and_gives_everything_back(house: Make) -> None:
    async def fault(operation: str) -> None:
        if operation == "exec":
            await asyncio.sleep(30)

    home = house(ledger=FakeLedger(2, group_size=1), broker=FakeBroker(fault=fault))
    running = asyncio.create_task(home.run())
    await until(lambda: sum(a.stage == "run" for a in home.worker.pipeline.attempts) == 2)
    first, second = [attempt.key for attempt in home.worker.pipeline.attempts]
    home.ledger.verdicts = {first: "hopeless", second: "already_done"}
    await home.worker.presence.heartbeat()
    await until(lambda: home.worker.pipeline.attempts == [])
    assert home.broker.claimed == {}
    assert home.gateway.open == {}
    home.worker.stop()
    await running
    assert home.ledger.failures == []
    assert home.ledger.released == []


async def test_a_heartbeat_does_not_end_what_is_being_delivered(house: Make) -> None:
    home, answered = house(ledger=FakeLedger(1)), asyncio.Event()
    complete = home.ledger.complete

    async def slow(*arguments: Any) -> Any:
        answer = await complete(*arguments)
        answered.set()
        await asyncio.sleep(0.2)
        return answer

    home.ledger.complete = slow
    running = asyncio.create_task(home.run())
    await answered.wait()
    home.ledger.verdicts = {
        attempt.key: "already_done" for attempt in home.worker.pipeline.attempts
    }
    await home.worker.presence.heartbeat()
    await running
    assert [line["answer"] for line in home.completions()] == ["sent", "accepted"]


async def test_a_completion_outlives_an_outage_of_the_store(house: Make) -> None:
    home = house(ledger=FakeLedger(1))

    async def fault(operation: str) -> None:
        home.ledger.is_away = home.ledger.is_away or operation == "close"

    home.gateway._fault = fault
    running = asyncio.create_task(home.run())
    await until(lambda: home.ledger.calls["complete"] >= 2)
    assert [line["answer"] for line in home.completions()] == ["sent"]
    home.ledger.is_away = False
    await running
    assert [line["answer"] for line in home.completions()] == ["sent", "accepted"]
    assert len(home.ledger.completed) == 1


async def test_an_outage_past_the_bound_ends_the_worker(house: Make) -> None:
    home = house(ledger=FakeLedger(1), outage_seconds=0.3)
    home.ledger.is_away = True
    with pytest.raises(StoreError):
        await home.run()


async def test_a_fenced_worker_ends_at_once_and_holds_nothing(house: Make) -> None:
    home = house(ledger=FakeLedger(4))

    async def complete(*_: Any) -> Any:
        raise FencedError("another boot runs under this name")

    home.ledger.complete = complete
    with pytest.raises(FencedError):
        await home.run()
    assert home.broker.claimed == {}


async def test_a_loop_that_ends_ends_the_worker(house: Make) -> None:
    home = house(ledger=FakeLedger(1), broker=FakeBroker(size=0))

    async def ends() -> None:
        return None

    home.engine.run = ends
    with pytest.raises(RuntimeError, match="engine_agent ended"):
        await home.run()


async def test_stopping_finishes_what_fits_and_hands_back_the_rest(house: Make) -> None:
    hung: list[str] = []

    async def fault(operation: str) -> None:
        if operation == "exec" and len(home.ledger.completed) >= 2:
            hung.append(operation)
            await asyncio.sleep(30)

    spec = {
        "rollout": {"maxConcurrentEpisodes": 2, "deadlines": {"drainSeconds": 0.3}},
    }
    home = house(ledger=FakeLedger(6), broker=FakeBroker(fault=fault), spec=spec)
    running = asyncio.create_task(home.run())
    await until(lambda: len(hung) == 2)
    home.worker.stop()
    await running
    assert len(home.ledger.released) == 2
    assert all(isinstance(episode, EpisodeId) for episode, _ in home.ledger.released)
    assert home.ledger.leased == {}


async def test_stopping_twice_hands_back_at_once(house: Make) -> None:
    async def fault(operation: str) -> None:
        if operation == "exec":
            await asyncio.sleep(30)

    home = house(ledger=FakeLedger(2), broker=FakeBroker(fault=fault))
    running = asyncio.create_task(home.run())
    await until(lambda: len(home.worker.pipeline.attempts) == 2)
    home.worker.stop()
    home.worker.stop()
    await running
    assert len(home.ledger.released) == 2


async def test_an_agent_that_breaks_after_a_turn_is_trained_with_reward_zero(house: Make) -> None:
    def turn(messages: Any) -> Any:
        if messages[-1]["role"] != "user":
            raise ValueError("confused")
        return call("bash", command="ls")

    home = house(ledger=FakeLedger(1), gateway=FakeGateway(turn))
    await home.run()
    record = the_record(home)
    assert (record.outcome, record.reward, record.turns) == ("agent_error", 0.0, 1)
    assert "confused" in record.metadata["error"]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
