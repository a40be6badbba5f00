"""The ReAct loop: how it ends, and what the model reads of its mistakes."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rljob.errors import EngineError, SandboxError, TaskError
from rljob.sandbox import Sandbox
from rljob.task_config import AgentContext, AgentResult, Message, ToolResult
from rljob.testing.chat import FakeChat, call, call_raw, say, script
from rljob.testing.sandbox import FakeSandbox
from rljob_rollout_worker.agents.react import NO_CALL, React
from rljob_rollout_worker.tools.bash import Bash
from rljob_rollout_worker.tools.submit import Submit


class Picky:
    name = "picky"
    description = "Fails as told."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"how": {"type": "string"}}}

    async def call(self, box: Sandbox, arguments: Mapping[str, Any]) -> ToolResult:
        errors = {
            "task": TaskError("no such thing"),
            "bug": KeyError("x"),
            "box": SandboxError("gone"),
        }
        raise errors[arguments["how"]]


async def play(
    chat: FakeChat, *, max_turns: int = 5, tools: Sequence[Any] | None = None
) -> AgentResult:
    box = FakeSandbox()
    box.files["a.txt"] = b"hello\n"
    context = AgentContext(
        chat=chat, box=box, tools=list(tools or [Bash(), Submit(), Picky()]), max_turns=max_turns
    )
    return await React().run(context, [{"role": "user", "content": "go"}])


def observations(result: AgentResult) -> list[str]:
    return [m["content"] for m in result.messages if m["role"] == "tool"]


async def test_it_observes_and_submits() -> None:
    result = await play(
        FakeChat(script(call("bash", command="cat a.txt"), call("submit", answer="42")))
    )
    assert (result.outcome, result.answer, result.turns, result.tool_calls) == (
        "completed",
        "42",
        2,
        2,
    )
    assert observations(result) == ["hello\n", "submitted\n"]
    roles = [m["role"] for m in result.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


async def test_it_ends_after_so_many_turns() -> None:
    result = await play(FakeChat(script(call("bash", command="ls"))), max_turns=3)
    assert (result.outcome, result.turns, result.answer) == ("max_turns", 3, None)


async def test_it_ends_when_the_context_is_full() -> None:
    result = await play(FakeChat(script(call("bash", command="ls")), context_turns=2))
    assert (result.outcome, result.turns) == ("context_full", 2)


async def test_a_submission_in_the_last_tokens_of_the_context_counts() -> None:
    result = await play(FakeChat(script(call("submit", answer="42")), context_turns=1))
    assert (result.outcome, result.answer) == ("completed", "42")


async def test_text_without_a_call_is_a_mistake_where_submit_is_a_tool() -> None:
    result = await play(FakeChat(script(say("it is 42"), call("submit", answer="42"))))
    assert observations(result)[0] == NO_CALL == "error: no valid tool call\n"
    assert (result.outcome, result.turns, result.tool_calls) == ("completed", 2, 1)


async def test_text_without_a_call_is_the_answer_where_nothing_can_be_submitted() -> None:
    result = await play(FakeChat(script(say("it is 42"))), tools=[Bash()])
    assert (result.outcome, result.answer, result.turns) == ("completed", "it is 42", 1)


async def test_text_that_was_cut_off_is_no_answer() -> None:
    chat = FakeChat(script(say("it is"), say("it is 42")), finish_reason="length")
    result = await play(chat, tools=[Bash()], max_turns=1)
    assert (result.outcome, result.answer) == ("max_turns", None)


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        (call("cat", path="a"), "error: no tool 'cat'; there are bash, submit, picky\n"),
        (call("bash"), "error: arguments of bash: 'command' is a required property\n"),
        (
            call("bash", command=3),
            "error: arguments of bash['command']: 3 is not of type 'string'\n",
        ),
        (call_raw("bash", "[]"), "error: arguments of bash must be an object\n"),
        (call("picky", how="task"), "error: no such thing\n"),
    ],
)
async def test_a_mistake_becomes_an_observation(turn: Message, text: str) -> None:
    result = await play(FakeChat(script(turn, call("submit", answer="x"))))
    assert observations(result) == [text, "submitted\n"]
    assert result.outcome == "completed"


@pytest.mark.parametrize("raw", ["{", '{"command": "\\ud800', "[" * 100_000, "nan", ""])
async def test_arguments_that_are_not_json_become_an_observation(raw: str) -> None:
    result = await play(FakeChat(script(call_raw("bash", raw), call("submit", answer="x"))))
    assert observations(result)[0].startswith("error: arguments of bash")


async def test_further_arguments_are_refused() -> None:
    turn = call("bash", command="ls", cwd="/")
    result = await play(FakeChat(script(turn, call("submit", answer="x"))))
    assert "Additional properties are not allowed ('cwd' was unexpected)" in observations(result)[0]


@pytest.mark.parametrize(("how", "error"), [("bug", KeyError), ("box", SandboxError)])
async def test_bugs_and_infrastructure_are_not_the_models_to_read(
    how: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await play(FakeChat(script(call("picky", how=how))))


async def test_an_engine_that_fails_is_not_retried_here() -> None:
    async def fault(_operation: str) -> None:
        raise EngineError("down")

    with pytest.raises(EngineError):
        await play(FakeChat(script(say("")), fault=fault))


async def test_several_calls_of_one_turn_run_in_order_until_one_ends_it() -> None:
    turn = call("bash", command="cat a.txt")
    turn["tool_calls"] += call("submit", answer="1")["tool_calls"]
    turn["tool_calls"] += call("submit", answer="2")["tool_calls"]
    result = await play(FakeChat(script(turn)))
    assert observations(result) == ["hello\n", "submitted\n"]
    assert (result.answer, result.tool_calls) == ("1", 2)


async def test_calls_past_the_limit_of_a_turn_do_not_run() -> None:
    turn = call("bash", command="ls")
    turn["tool_calls"] = turn["tool_calls"] * 20
    result = await play(FakeChat(script(turn)), max_turns=1)
    assert observations(result)[15:17] == ["a.txt\n", "error: more than 16 calls in a turn\n"]


async def test_the_model_is_told_the_tools_and_their_schemas() -> None:
    chat = FakeChat(script(call("submit", answer="x")))
    await play(chat)
    functions = [tool["function"] for tool in chat.tools]
    assert [function["name"] for function in functions] == ["bash", "submit", "picky"]
    assert functions[0]["parameters"]["required"] == ["command"]
