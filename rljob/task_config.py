"""What a user may plug in: task families, agents, tools, rewards; and what a row looks like.

Names resolve by entry point (groups `rljob.tasks`, `rljob.agents`, `rljob.tools`, `rljob.rewards`)
or by import path
(`my_pkg.tasks:MyTask`). The dispatcher drives them in this order, each call under its stage's
deadline:

    task.setup(box, row) -> messages      agent.run(context, messages) -> AgentResult
    reward(box, row, result) -> Reward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from rljob.sandbox import Sandbox
from rljob.trajectory import Outcome

Message = dict[str, Any]
"""An OpenAI chat message: role, content, tool_calls, tool_call_id."""


class Row(msgspec.Struct, kw_only=True):
    """One dataset row. JSON lines or parquet columns of the same names.

    `prompt` is a string (one user message) or a list of messages. Everything the task's verifier
    needs is in `metadata`.
    """

    task: str
    prompt: str | list[Message]
    metadata: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    """Allowed keys of the Task Config replaced for this row: `maxTurns`, `image`, `env`."""

    def messages(self) -> list[Message]:
        """The prompt as chat messages."""
        return (
            [{"role": "user", "content": self.prompt}]
            if isinstance(self.prompt, str)
            else list(self.prompt)
        )


class Reward(msgspec.Struct, kw_only=True):
    """A score and what it is made of."""

    value: float
    parts: dict[str, float] = {}


class ToolResult(msgspec.Struct, kw_only=True):
    """What a tool answers to the model."""

    text: str
    done: bool = False
    """Ends the episode (`submit`)."""
    answer: str | None = None
    """With `done`: what was submitted."""
    timed_out: bool = False
    """For the statistics: the tool ran out of time, as its text says."""


class AgentResult(msgspec.Struct, kw_only=True):
    """How an agent's run ended."""

    outcome: Outcome
    turns: int
    tool_calls: int
    answer: str | None = None
    """What the agent submitted; None where it submitted nothing."""
    messages: list[Message] = []
    """The whole conversation as chat messages."""


@runtime_checkable
class Task(Protocol):
    """A task family. Constructed once per Task Config with its `options` as keyword arguments."""

    async def setup(self, box: Sandbox, row: Row) -> list[Message]:
        """Make the sandbox ready for the row and return the opening messages (system prompt excluded or included)."""
        ...

    async def reward(self, box: Sandbox, row: Row, result: AgentResult) -> Reward | float:
        """Score the finished episode in its sandbox (or in a fresh one, see `export`)."""
        ...


@runtime_checkable
class ExportingTask(Protocol):
    """A task whose result can be carried into a fresh sandbox (`reward.freshSandbox`)."""

    async def export(self, box: Sandbox, row: Row) -> bytes:
        """What is to be scored, out of the agent's sandbox."""
        ...

    async def load(self, box: Sandbox, row: Row, exported: bytes) -> None:
        """Put it into the fresh one, after its `setup`."""
        ...


class RewardFunction(Protocol):
    """A reward by name replaces the task's own."""

    async def __call__(self, box: Sandbox, row: Row, result: AgentResult) -> Reward | float:
        """Score the finished episode."""
        ...


@runtime_checkable
class Tool(Protocol):
    """A tool. Constructed once per episode with its `options` as keyword arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments; arguments are checked against it before `call`."""

    async def call(self, box: Sandbox, arguments: Mapping[str, Any]) -> ToolResult:
        """Run. Raise `TaskError` for what the model should read as an error."""
        ...


class ChatReply(msgspec.Struct, kw_only=True):
    """One assistant turn as the gateway answered it."""

    message: Message
    finish_reason: str
    """stop, length or tool_calls."""
    context_full: bool = False
    """No token is left in the context: the episode must end as `context_full`."""


class Chat(Protocol):
    """The model, behind one gateway session."""

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ChatReply:
        """Sample one assistant turn. Raises InfraError subclasses; the caller does not retry."""
        ...


class AgentContext(msgspec.Struct, kw_only=True):
    """What an agent gets."""

    chat: Chat
    box: Sandbox
    tools: list[Any]
    """Instances of `Tool`."""
    max_turns: int


@runtime_checkable
class Agent(Protocol):
    """An agent. Constructed once per episode with its `options` as keyword arguments."""

    async def run(self, context: AgentContext, messages: list[Message]) -> AgentResult:
        """Run the episode to its end."""
        ...
