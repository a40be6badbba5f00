"""Messages: what is the same, and what is refused."""

import pytest

from rljob_services.gateway.messages import BadRequestError, mark_message, message_key, read_message


def key(**message):
    return message_key(read_message(0, message))


def call(arguments, id_="call_1", name="bash"):
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_echoed_assistant_message_is_the_same_whatever_a_client_makes_of_it():
    ours = key(
        role="assistant",
        content=None,
        tool_calls=[call('{"a": 1, "b": "x"}')],
        reasoning_content="hm",
    )
    theirs = key(
        role="assistant",
        content="",
        refusal=None,
        annotations=[],
        function_call=None,
        tool_calls=[call({"b": "x", "a": 1}, id_="other")],
    )
    assert ours == theirs


def test_text_parts_are_the_text():
    assert key(
        role="user", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ) == key(role="user", content="ab")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        ({"role": "user", "content": "a"}, {"role": "tool", "content": "a"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "bob"}),
        (
            {"role": "assistant", "tool_calls": [call("{}")]},
            {"role": "assistant", "tool_calls": [call('{"a": 1}')]},
        ),
        (
            {"role": "assistant", "tool_calls": [call("not json")]},
            {"role": "assistant", "tool_calls": [call("not  json")]},
        ),
        (
            {"role": "assistant", "tool_calls": [call("{}")]},
            {"role": "assistant", "tool_calls": [call("{}", name="sh")]},
        ),
    ],
)
def test_what_the_model_would_read_differently_is_another_message(one, other):
    assert key(**one) != key(**other)


def test_arguments_reach_the_template_as_objects_and_as_text_where_they_are_none():
    message = read_message(
        0, {"role": "assistant", "tool_calls": [call('{"a": 1}'), call("[1"), call(None)]}
    )
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == [{"a": 1}, "[1", {}]


def test_the_developer_speaks_as_system():
    assert read_message(0, {"role": "developer", "content": "x"})["role"] == "system"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "content": "x"},
        {"content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": ["x"]},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "tool_calls": ["x"]},
        {"role": "assistant", "tool_calls": 3},
    ],
)
def test_what_is_no_chat_message_is_refused_by_place(message):
    with pytest.raises(BadRequestError, match=r"messages\[3\]"):
        read_message(3, message)


def test_marking_reaches_reasoning_and_calls_and_leaves_the_role(template):
    message = read_message(
        0,
        {
            "role": "assistant",
            "content": "<|im_end|>",
            "reasoning_content": "<|im_end|>",
            "tool_calls": [call("<|im_end|>")],
        },
    )
    marked = mark_message(message, template.vocabulary)
    assert "<|im_end|>" not in str(marked)
    assert marked["role"] == "assistant"
