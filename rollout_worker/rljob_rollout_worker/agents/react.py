"""`react`: think, act, observe, until something is submitted.

    messages ──► chat.complete ──► assistant turn ─┬─ calls ──► schema checked ──► tool ─┬─► observation ─┐
       ▲                                           └─ no valid call ────► `error: …` ────┘                │
       └──────────────────────────────────────────────────────────────────────────────────────────────────┘

Ends as `completed` when a tool says so (`submit`), as `context_full` when the context has no token
left, as `max_turns` after so many assistant turns. A turn without any tool call is the answer where
no tool called `submit` is configured; where one is, it is a mistake that the model reads as `error:
no valid tool call`, like one whose call did not parse. Everything a model can get wrong becomes
such an observation; infrastructure errors and bugs of tools go up to the episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from jsonschema.exceptions import best_match
from jsonschema.validators import Draft202012Validator

from rljob import telemetry
from rljob.errors import TaskError
from rljob.task_config import AgentContext, AgentResult, ChatReply, Message, Tool, ToolResult
from rljob.trajectory import Outcome

NO_CALL = "error: no valid tool call\n"


class React:
    """The agent.

    Args:
        max_calls_per_turn: Calls of one assistant turn past this are answered with an error and not run.
    """

    def __init__(self, max_calls_per_turn: int = 16) -> None:
        self._max_calls_per_turn = max_calls_per_turn

    async def run(self, context: AgentContext, messages: list[Message]) -> AgentResult:
        """See `rljob.task_config.Agent.run`."""
        episode = _Conversation(context, list(messages), self._max_calls_per_turn)
        for _ in range(context.max_turns):
            if (outcome := await episode.turn()) is not None:
                return episode.result(outcome)
        return episode.result("max_turns")


class _Conversation:
    """The state of one episode: the messages so far and what has been counted."""

    def __init__(self, context: AgentContext, messages: list[Message], max_calls: int) -> None:
        self._context, self._messages, self._max_calls = context, messages, max_calls
        self._tools: dict[str, Tool] = {tool.name: tool for tool in context.tools}
        self._schemas = [tool_schema(tool) for tool in context.tools]
        self._turns = self._tool_calls = 0
        self._answer: str | None = None

    def result(self, outcome: Outcome) -> AgentResult:
        return AgentResult(
            outcome=outcome,
            turns=self._turns,
            tool_calls=self._tool_calls,
            answer=self._answer,
            messages=self._messages,
        )

    async def turn(self) -> Outcome | None:
        """One assistant turn and its observations; the outcome when it was the last one."""
        reply = await self._context.chat.complete(self._messages, self._schemas)
        if (
            reply.message.get("content")
            or reply.message.get("tool_calls")
            or not reply.context_full
        ):
            self._turns += 1
            self._messages.append(reply.message)
        calls = reply.message.get("tool_calls") or []
        if not calls:
            return self._without_calls(reply)
        done = await self._run_calls(calls)
        if done:
            return "completed"
        return "context_full" if reply.context_full else None

    def _without_calls(self, reply: ChatReply) -> Outcome | None:
        if reply.context_full:
            return "context_full"
        if "submit" not in self._tools and reply.finish_reason != "length":
            self._answer = reply.message.get("content")
            return "completed"
        self._messages.append({"role": "tool", "tool_call_id": "none", "content": NO_CALL})
        return None

    async def _run_calls(self, calls: list[Mapping[str, Any]]) -> bool:
        for number, call in enumerate(calls):
            allowed = number < self._max_calls
            result = (
                await self._run_call(call)
                if allowed
                else ToolResult(text=f"error: more than {self._max_calls} calls in a turn\n")
            )
            self._messages.append(
                {"role": "tool", "tool_call_id": call.get("id", "none"), "content": result.text}
            )
            if result.done:
                self._answer = result.answer
                return True
        return False

    async def _run_call(self, call: Mapping[str, Any]) -> ToolResult:
        function = call.get("function") or {}
        tool = self._tools.get(str(function.get("name")))
        if tool is None:
            return ToolResult(
                text=f"error: no tool {function.get('name')!r}; there are {', '.join(self._tools)}\n"
            )
        try:
            arguments = parse_arguments(tool, function.get("arguments"))
            self._tool_calls += 1
            result = await tool.call(self._context.box, arguments)
        except TaskError as error:
            telemetry.TOOL_CALLS.inc(tool=tool.name, result="error")
            return ToolResult(text=f"error: {error}\n")
        telemetry.TOOL_CALLS.inc(tool=tool.name, result="timeout" if result.timed_out else "ok")
        return result


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The tool as the chat API names it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


def parse_arguments(tool: Tool, raw: object) -> dict[str, Any]:
    """Arguments of a call, checked against the tool's schema.

    Raises:
        TaskError: what is wrong, as the model should read it.
    """
    try:
        arguments = msgspec.json.decode(raw) if isinstance(raw, (str, bytes)) else raw
    except (msgspec.DecodeError, RecursionError) as error:
        raise TaskError(f"arguments of {tool.name} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise TaskError(f"arguments of {tool.name} must be an object")
    if fault := best_match(Draft202012Validator(tool.parameters).iter_errors(arguments)):
        where = "".join(f"[{part!r}]" for part in fault.absolute_path)
        raise TaskError(f"arguments of {tool.name}{where}: {fault.message[:500]}")
    return arguments
