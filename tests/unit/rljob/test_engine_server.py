import json

import httpx
import msgspec
import pytest

from rljob.engine import EngineClient, GenerateRequest
from rljob.ids import PolicyVersion
from rljob.testing.engine_server import SimulatedEngine, SimulatedEngineOptions
from rljob.testing.simulated_policy import ByteTokenizer, continuation, parse, skill

TOOLS = [{"type": "function", "function": {"name": "submit"}}]
STOP = 300
ASK = "<|im_start|>user\nsim-answer=blue please<|im_end|>\n<|im_start|>assistant\n"


def said(ids):
    return ByteTokenizer().decode(ids)


@pytest.fixture
def weights(tmp_path):
    def publish(n):
        folder = tmp_path / f"1-{n}"
        folder.mkdir()
        (folder / "rljob-manifest.json").write_text(
            json.dumps({"incarnation": 1, "n": n, "digest": "d"})
        )
        return folder

    return publish


async def answers(n, weights, num_asks=200):
    """The share of right answers at version n."""
    engine = SimulatedEngine(
        SimulatedEngineOptions(turns=1, turn_seconds=0, skill=0.2, skill_gain=0.05)
    )
    async with EngineClient("http://engine", transport=httpx.ASGITransport(engine)) as client:
        await client.switch(PolicyVersion(1, n), weights(n))
        request = GenerateRequest(
            prompt_ids=list(ASK.encode()), max_tokens=500, stop_token_ids=[STOP]
        )
        turns = [await client.generate(request) for _ in range(num_asks)]
        assert all(turn.finish_reason == "stop" and turn.token_ids[-1] == STOP for turn in turns)
        parsed = await client.parse(TOOLS, token_ids=turns[0].token_ids)
        assert [call.name for call in parsed.tool_calls] == ["submit"]
        return sum("blue" in said(turn.token_ids) for turn in turns) / num_asks


async def test_it_gets_better_with_every_version_and_members_of_a_group_differ(weights):
    early, late = await answers(0, weights), await answers(12, weights)
    assert 0.05 < early < 0.4
    assert 0.6 < late < 0.95


async def test_a_turn_cut_by_length_goes_on_where_it_stopped(weights):
    engine = SimulatedEngine(SimulatedEngineOptions(turns=1, turn_seconds=0))
    async with EngineClient("http://engine", transport=httpx.ASGITransport(engine)) as client:
        await client.switch(PolicyVersion(1, 0), weights(0))
        ids = list(ASK.encode())
        first = await client.generate(
            GenerateRequest(prompt_ids=ids, max_tokens=10, stop_token_ids=[STOP])
        )
        rest = await client.generate(
            GenerateRequest(prompt_ids=ids + first.token_ids, max_tokens=500, stop_token_ids=[STOP])
        )
    assert first.finish_reason == "length"
    parsed = parse(said(first.token_ids + rest.token_ids), with_tools=True)
    assert [call["name"] for call in parsed["tool_calls"]] == ["submit"]


def test_earlier_turns_call_the_shell():
    tokenizer = ByteTokenizer()
    assert "bash" in said(continuation(tokenizer, list(ASK.encode()), num_turns=2, is_right=True))
    second = ASK + "…<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    assert "submit" in said(
        continuation(tokenizer, list(second.encode()), num_turns=2, is_right=True)
    )


def test_a_turn_that_it_did_not_begin_is_ended():
    assert (
        continuation(ByteTokenizer(), list((ASK + "Well,").encode()), num_turns=1, is_right=True)
        == []
    )


def test_skill_is_bounded():
    assert skill(1000, 0.3, 0.05) == 0.95


def test_parsing_gives_reasoning_content_and_calls():
    text = '<think>hm</think>Look.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert parse(text, with_tools=True) == {
        "content": "Look.",
        "reasoning": "hm",
        "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}],
    }
    assert parse("<tool_call>no json</tool_call>", with_tools=True)["tool_calls"] == []
    assert parse(text, with_tools=False)["tool_calls"] == []


def test_knobs_come_from_the_environment_and_a_wrong_one_is_named():
    options = SimulatedEngineOptions.from_env(
        {"RLJOB_SIM_TURNS": "3", "RLJOB_SIM_TURN_SECONDS": "0.5", "PATH": "/"}
    )
    assert (options.turns, options.turn_seconds) == (3, 0.5)
    with pytest.raises(msgspec.ValidationError, match="turns"):
        SimulatedEngineOptions.from_env({"RLJOB_SIM_TURNS": "many"})
