"""OpenAI's wire form: what is refused, and how an answer is told."""

import json

import pytest

from rljob.engine import ParsedToolCall, ParsedTurn
from rljob_services.gateway.adapters.openai import (
    Answer,
    StreamOptions,
    Usage,
    read_request,
    to_message,
)
from rljob_services.gateway.messages import BadRequestError

USER = {"role": "user", "content": "go"}


def body(**more) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **more}).encode()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"messages": []}, "messages"),
        ({"n": 2}, "n must be 1"),
        ({"stop": ["x"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format 'json_object'"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"logprobs": True}, "logprobs"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_tokens"),
        ({"messages": "hello"}, "no chat completion request"),
        ({"tools": [3]}, "no chat completion request"),
    ],
)
def test_what_is_not_served_is_refused_by_name(more, named):
    with pytest.raises(BadRequestError, match=named):
        read_request(body(**more))


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b"\xff", b'{"messages": ' + b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(broken):
    with pytest.raises(BadRequestError):
        read_request(broken)


def test_what_clients_send_by_habit_is_taken():
    request = read_request(
        body(
            n=1,
            stop=None,
            response_format={"type": "text"},
            tool_choice="auto",
            temperature=0,
            seed=1,
            user="x",
            stream=False,
            parallel_tool_calls=True,
            logprobs=False,
            unknown={},
        )
    )
    assert request.messages == [USER]


CALL = ParsedToolCall("bash", '{"command": "ls"}')


def answer(turn: ParsedTurn) -> Answer:
    return Answer(
        id="chatcmpl-1",
        created=5,
        model="m",
        message=to_message(turn),
        finish_reason="tool_calls" if turn.tool_calls else "stop",
        usage=Usage(10, 3),
    )


def test_a_plain_answer_has_openai_s_form():
    told = json.loads(answer(ParsedTurn(tool_calls=[CALL])).to_json())
    (choice,) = told["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    assert call["id"].startswith("call_")
    assert told["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}


def events(turn: ParsedTurn, options: StreamOptions | None = None) -> list:
    lines = b"".join(answer(turn).to_events(options)).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_streamed_answer_tells_the_same():
    turn = ParsedTurn(content="Look", reasoning="hm", tool_calls=[CALL, CALL])
    first, last = events(turn)
    delta = first["choices"][0]["delta"]
    assert (delta["role"], delta["content"], delta["reasoning_content"]) == (
        "assistant",
        "Look",
        "hm",
    )
    assert [call["index"] for call in delta["tool_calls"]] == [0, 1]
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    assert first["object"] == "chat.completion.chunk"


def test_a_streamed_answer_tells_its_usage_where_it_is_asked_for():
    *_, usage = events(ParsedTurn(content="x"), StreamOptions(include_usage=True))
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 13)


def test_an_empty_turn_has_empty_text():
    assert to_message(ParsedTurn()) == {"role": "assistant", "content": ""}
