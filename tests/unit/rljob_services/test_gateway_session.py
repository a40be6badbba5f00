"""Sessions: turns, continuation, retries, limits, closing."""

import asyncio

import msgspec
import pytest

from rljob.codec import unpack_chains
from rljob.errors import EngineError
from rljob.gateway import SessionSampling, SessionSpec
from rljob_services.gateway import session as session_module
from rljob_services.gateway import sessions as sessions_module
from rljob_services.gateway.adapters.openai import read_request
from rljob_services.gateway.messages import BadRequestError
from rljob_services.gateway.session import MAX_REMEMBERED, SessionClosedError
from rljob_services.gateway.sessions import (
    GatewayFullError,
    SessionMissingError,
    SessionTakenError,
    TokenError,
)
from rljob_services.gateway.turn import EngineGoneError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
ASK = [{"role": "system", "content": "Work."}, {"role": "user", "content": "go"}]


def request(messages, tools=TOOLS, **more):
    return read_request(msgspec.json.encode({"messages": messages, "tools": tools, **more}))


async def say(session, messages, *, key="", agent="main", body=b"", **more):
    return await session.answer(
        request(messages, **more), agent_id=agent, repeat_key=key, body=body
    )


async def chains(session):
    return unpack_chains(await session.close())


@pytest.fixture
def session(sessions):
    return sessions.open(SessionSpec(session_id="e1", max_context_tokens=400))


async def test_an_episode_is_one_chain_of_exactly_what_the_engine_saw_and_sampled(
    session, engine, template
):
    first, second = engine.will_say(CALL, n=1), engine.will_say("Done", n=2)
    one = await say(session, ASK)
    messages = [*ASK, one.message, {"role": "tool", "tool_call_id": "x", "content": "a.txt\n"}]
    two = await say(session, messages)
    (chain,) = await chains(session)
    assert one.finish_reason == "tool_calls"
    assert two.message["content"] == "Done"
    assert chain.tokens == [*engine.requests[1].prompt_ids, *second.token_ids]
    assert list(engine.requests[1].prompt_ids)[: chain.prompt_length] == list(
        engine.requests[0].prompt_ids
    )
    sampled = [
        token for token, is_action in zip(chain.tokens, chain.action_mask, strict=True) if is_action
    ]
    assert sampled == [*first.token_ids, *second.token_ids]
    assert chain.logprobs == pytest.approx([*first.logprobs, *second.logprobs])
    assert [span.n for span in chain.version_spans] == [1, 2]
    text = template.render(
        [{**m, "content": m.get("content") or ""} for m in messages], TOOLS, is_prompt=True
    )
    assert template.vocabulary.decode(engine.requests[1].prompt_ids) == text
    assert session.turns == 2


async def test_what_was_sampled_is_kept_even_where_the_template_would_write_it_otherwise(
    session, engine
):
    odd = engine.will_say('<tool_call>{"arguments":{"command":"ls"},   "name":"bash"}</tool_call>')
    engine.will_say("Done")
    one = await say(session, ASK)
    assert one.message["tool_calls"][0]["function"]["name"] == "bash"
    await say(session, [*ASK, one.message, {"role": "tool", "content": "x"}])
    prompt = list(engine.requests[1].prompt_ids)
    start = len(engine.requests[0].prompt_ids)
    assert prompt[start : start + len(odd.token_ids)] == odd.token_ids
    assert len(await chains(session)) == 1


async def test_an_edited_history_opens_a_new_chain(session, engine):
    for text in ("One", "Two", "Three"):
        engine.will_say(text)
    one = await say(session, ASK)
    await say(
        session,
        [
            *ASK,
            {"role": "assistant", "content": "I never said so"},
            {"role": "user", "content": "?"},
        ],
    )
    await say(session, [*ASK, one.message, {"role": "user", "content": "?"}])
    first, second = await chains(session)
    assert [len(first.version_spans), len(second.version_spans)] == [2, 1]


async def test_other_tools_open_a_new_chain(session, engine):
    engine.will_say("One")
    engine.will_say("Two")
    one = await say(session, ASK)
    await say(session, [*ASK, one.message, {"role": "user", "content": "?"}], tools=[])
    assert len(await chains(session)) == 2


async def test_malformed_tool_calls_come_back_as_text(session, engine):
    engine.will_say('<tool_call>\n{"name": bash}\n</tool_call>')
    answer = await say(session, ASK)
    assert answer.finish_reason == "stop"
    assert answer.message == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": bash}\n</tool_call>',
    }


async def test_a_parser_that_stumbles_over_a_turn_leaves_it_as_text(session, engine):
    engine.will_say(CALL)
    engine.parse_error = EngineError("500")
    assert (await say(session, ASK)).message["content"] == CALL


async def test_a_parser_that_cannot_be_reached_fails_the_turn(session, engine):
    engine.will_say(CALL)
    engine.parse_error = EngineGoneError("gone")
    with pytest.raises(EngineGoneError):
        await say(session, ASK)
    assert await chains(session) == []


async def test_reasoning_is_answered_and_not_asked_back(session, engine):
    engine.will_say("<think>because</think>Yes")
    engine.will_say("Done")
    one = await say(session, ASK)
    assert (one.message["reasoning_content"], one.message["content"]) == ("because", "Yes")
    await say(
        session, [*ASK, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "?"}]
    )
    assert len(await chains(session)) == 1


async def test_tool_choice_none_looks_for_no_calls(session, engine):
    engine.will_say(CALL)
    assert "tool_calls" not in (await say(session, ASK, tool_choice="none")).message


async def test_a_full_context_answers_without_asking_the_engine(sessions, engine):
    session = sessions.open(SessionSpec(session_id="e2", max_context_tokens=70))
    await say(session, [{"role": "user", "content": "word " * 100}])
    answer = await say(session, [{"role": "user", "content": "word " * 100}])
    assert (answer.finish_reason, answer.context_full, answer.message["content"]) == (
        "length",
        True,
        "",
    )
    assert engine.requests == []
    assert await chains(session) == []


@pytest.mark.parametrize("room", [0, 1])
async def test_a_context_is_full_when_no_token_is_left(sessions, engine, template, room):
    messages = [{"role": "user", "content": "go"}]
    limit = len(template.encode(messages, [])) + room
    session = sessions.open(SessionSpec(session_id="e2", max_context_tokens=limit))
    engine.will_say("1", reason="length")
    await say(session, messages, tools=[])
    assert len(engine.requests) == room


async def test_tokens_of_a_turn_are_limited_by_session_request_and_context(sessions, engine):
    session = sessions.open(
        SessionSpec(
            session_id="e3", max_context_tokens=60, sampling=SessionSampling(max_tokens_per_turn=20)
        )
    )
    for limits, expected in (
        ({}, 20),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 6, "max_tokens": 9}, 6),
        ({"max_tokens": 50}, 20),
    ):
        engine.will_say("x")
        await say(session, [{"role": "user", "content": "go"}], tools=[], **limits)
        assert engine.requests[-1].max_tokens == expected
    engine.will_say("x")
    await say(session, [{"role": "user", "content": "1" * 35}], tools=[])
    assert engine.requests[-1].max_tokens == 60 - len(engine.requests[-1].prompt_ids) < 20


async def test_a_turn_that_fills_the_context_says_so(sessions, engine, template):
    messages = [{"role": "user", "content": "go"}]
    session = sessions.open(
        SessionSpec(session_id="e4", max_context_tokens=len(template.encode(messages, [])) + 4)
    )
    engine.will_say("1234", reason="length")
    answer = await say(session, messages, tools=[])
    assert (answer.finish_reason, answer.context_full, answer.message["content"]) == (
        "length",
        True,
        "1234",
    )
    (chain,) = await chains(session)
    assert chain.finish_reason == "length"


async def test_a_turn_cut_by_its_own_limit_is_closed_and_continued(session, engine, template):
    engine.will_say("Look here", reason="length", num_tokens=3)
    engine.will_say("Done")
    one = await say(session, ASK)
    assert (one.finish_reason, one.context_full) == ("length", False)
    await say(session, [*ASK, one.message, {"role": "user", "content": "?"}])
    (chain,) = await chains(session)
    after = chain.version_spans[0].start + 3
    assert chain.tokens[after] == template.stop_token_ids[0]
    assert not chain.action_mask[after]


async def test_a_failed_turn_leaves_its_chain_as_it_was(session, engine):
    engine.will_say("One")
    one = await say(session, ASK)
    more = [*ASK, one.message, {"role": "user", "content": "?"}]
    engine.steps = [EngineError("refused")]
    with pytest.raises(EngineError):
        await say(session, more)
    engine.will_say("Two")
    await say(session, more)
    (chain,) = await chains(session)
    assert len(chain.version_spans) == 2


async def test_requests_at_once_get_chains_of_their_own(session, engine):
    engine.will_say("One")
    one = await say(session, ASK)
    gate = asyncio.Event()

    def held(text):
        async def step(_):
            await gate.wait()
            return engine.says(text)

        return step

    engine.steps = [held("Two"), held("Three"), held("Four")]
    more = [*ASK, one.message, {"role": "user", "content": "?"}]
    asking = [asyncio.create_task(say(session, messages)) for messages in (more, more, ASK)]
    await asyncio.sleep(0.01)
    gate.set()
    assert [answer.message["content"] for answer in await asyncio.gather(*asking)] == [
        "Two",
        "Three",
        "Four",
    ]
    assert [len(chain.version_spans) for chain in await chains(session)] == [2, 1, 1]


async def test_a_repeated_request_gets_the_answer_of_the_first(session, engine):
    engine.will_say("One")
    first, second = await asyncio.gather(
        say(session, ASK, key="k", body=b"x"), say(session, ASK, key="k", body=b"x")
    )
    third = await say(session, ASK, key="k", body=b"x")
    assert first == second == third
    assert len(engine.requests) == 1


async def test_a_caller_that_goes_away_and_asks_again_finds_its_answer(session, engine):
    gate = asyncio.Event()

    async def held(_):
        await gate.wait()
        return engine.says("One")

    engine.steps = [held]
    lost = asyncio.create_task(say(session, ASK, key="k"))
    await asyncio.sleep(0.01)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    gate.set()
    assert (await say(session, ASK, key="k")).message["content"] == "One"
    assert len(engine.requests) == 1


async def test_a_request_that_failed_may_be_tried_again_under_its_key(session, engine):
    engine.steps = [EngineError("refused")]
    with pytest.raises(EngineError):
        await say(session, ASK, key="k")
    engine.will_say("One")
    assert (await say(session, ASK, key="k")).message["content"] == "One"


async def test_a_key_is_for_one_request(session, engine):
    engine.will_say("One")
    await say(session, ASK, key="k", body=b"x")
    with pytest.raises(BadRequestError, match="another request"):
        await say(session, ASK, key="k", body=b"y")


async def test_closing_is_repeatable_and_final(session, engine):
    engine.will_say("One")
    await say(session, ASK)
    assert await session.close() == await session.close()
    with pytest.raises(SessionClosedError):
        await say(session, ASK)


async def test_closing_drops_the_turn_in_flight(session, engine):
    engine.will_say("One")
    await say(session, ASK)

    async def never(_):
        await asyncio.Event().wait()

    engine.steps = [never]
    asking = asyncio.create_task(say(session, ASK))
    await asyncio.sleep(0.01)
    assert len(await chains(session)) == 1
    with pytest.raises(SessionClosedError, match="closed while a turn ran"):
        await asking


async def test_an_agent_cannot_open_chains_without_end(session, engine, monkeypatch):
    monkeypatch.setattr(session_module, "MAX_CHAINS", 1)
    engine.will_say("One")
    await say(session, ASK)
    with pytest.raises(BadRequestError, match="conversations already"):
        await say(session, [{"role": "user", "content": "other"}])


async def test_answers_are_not_remembered_without_end(session, engine):
    for number in range(MAX_REMEMBERED + 5):
        engine.will_say("One")
        await say(session, [{"role": "user", "content": str(number)}], key=str(number))
    assert len(session._answers) == MAX_REMEMBERED


async def test_agents_of_an_episode_are_told_apart(session, engine):
    engine.will_say("One")
    engine.will_say("Two")
    await say(session, ASK)
    await say(session, [{"role": "user", "content": "help"}], agent="helper")
    assert [chain.agent_id for chain in await chains(session)] == ["main", "helper"]


async def test_a_turn_without_a_token_is_no_chain(session, engine):
    engine.will_say("", reason="length")
    await say(session, ASK)
    assert await chains(session) == []


# ── the registry ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_opening_again_gives_the_same_session_and_another_spec_is_refused(sessions, session):
    assert sessions.open(session.spec) is session
    with pytest.raises(SessionTakenError):
        sessions.open(SessionSpec(session_id="e1", max_context_tokens=7))


async def test_a_closed_session_is_not_opened_again(sessions, session):
    await session.close()
    with pytest.raises(SessionTakenError):
        sessions.open(session.spec)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 201, "é"])
def test_a_session_id_fits_into_a_path(sessions, name):
    with pytest.raises(BadRequestError):
        sessions.open(SessionSpec(session_id=name))


def test_a_session_is_for_who_holds_its_token(sessions, session):
    assert sessions.authorised("e1", session.token) is session
    other = sessions.open(SessionSpec(session_id="e2"))
    for token in ("", other.token, "é"):
        with pytest.raises(TokenError):
            sessions.authorised("e1", token)


async def test_an_aborted_session_is_forgotten(sessions, session):
    await sessions.abort("e1")
    await sessions.abort("e1")
    with pytest.raises(SessionMissingError):
        sessions.get("e1")


async def test_sessions_that_nobody_uses_are_forgotten(sessions, session, clock, engine):
    sessions.open(SessionSpec(session_id="short", ttl_seconds=10))
    clock.time += 11
    await sessions.sweep()
    assert len(sessions) == 1
    clock.time += session.spec.ttl_seconds - 11
    engine.will_say("One")
    await say(session, ASK)
    clock.time += session.spec.ttl_seconds
    await sessions.sweep()
    assert sessions.get("e1") is session


async def test_a_gateway_full_of_sessions_or_tokens_opens_no_more(
    sessions, session, engine, monkeypatch
):
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 1)
    with pytest.raises(GatewayFullError):
        sessions.open(SessionSpec(session_id="e2"))
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 9)
    monkeypatch.setattr(sessions_module, "MAX_BYTES", 100)
    sessions.open(SessionSpec(session_id="e2"))
    engine.will_say("One")
    await say(session, ASK)
    with pytest.raises(GatewayFullError):
        sessions.open(SessionSpec(session_id="e3"))


async def test_closed_sessions_make_room_the_oldest_first(sessions, clock, monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 3)
    for name in ("a", "b", "c"):
        clock.time += 1
        await sessions.open(SessionSpec(session_id=name)).close()
    await sessions.get("a").close()  # asked for again: now the newest
    clock.time += 1
    sessions.open(SessionSpec(session_id="d"))
    assert sessions.get("c").is_closed
    assert sessions.get("a").is_closed
    with pytest.raises(SessionMissingError):
        sessions.get("b")


async def test_a_closed_session_is_forgotten_sooner_than_an_open_one(sessions, session, clock):
    sessions.open(SessionSpec(session_id="open"))
    await session.close()
    clock.time += sessions_module.CLOSED_SECONDS
    await sessions.sweep()
    assert sessions.get("e1") is session
    clock.time += 1
    await sessions.sweep()
    assert len(sessions) == 1


async def test_the_memory_of_a_session_is_counted_and_given_back(session, engine):
    engine.will_say("One")
    answer = await say(session, ASK)
    before = session.num_bytes
    engine.will_say("Two")
    await say(session, [*ASK, answer.message, {"role": "user", "content": "x" * 100}])
    assert session.num_bytes > before + 100
    assert session.num_bytes == sum(chain.num_bytes for chain in session._chains)
    packed = await session.close()
    assert session.num_bytes == len(packed)
