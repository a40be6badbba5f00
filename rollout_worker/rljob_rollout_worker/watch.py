"""Thin wrappers around what an agent gets, so that the episode knows what happened even if the agent does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljob.errors import SandboxError
from rljob.sandbox import ExecResult, Sandbox
from rljob.task_config import AgentResult, Chat, ChatReply, Message
from rljob.trajectory import Outcome


class WatchedChat:
    """Counts turns and keeps the latest conversation: an agent that is cut off tells neither."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.turns = self.tool_calls = 0
        self._messages: Sequence[Message] = []
        self._reply: Message | None = None

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ChatReply:
        """See `rljob.task_config.Chat.complete`."""
        reply = await self._chat.complete(messages, tools)
        self.turns += 1
        self.tool_calls += len(reply.message.get("tool_calls") or ())
        self._messages, self._reply = messages, reply.message
        return reply

    def cut_off(self, outcome: Outcome) -> AgentResult:
        """The result of an agent that did not get to give one."""
        messages = [*self._messages, *([self._reply] if self._reply else [])]
        return AgentResult(
            outcome=outcome, turns=self.turns, tool_calls=self.tool_calls, messages=messages
        )


class WatchedSandbox:
    """Remembers that the sandbox died under the agent, even where the agent swallows the error."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self.id = box.id
        self.lost: SandboxError | None = None

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_output_bytes: int = 1_000_000,
    ) -> ExecResult:
        """See `rljob.sandbox.Sandbox.exec`."""
        with self:
            return await self._box.exec(
                command,
                cwd=cwd,
                env=env,
                stdin=stdin,
                timeout=timeout,
                max_output_bytes=max_output_bytes,
            )

    async def read_file(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """See `rljob.sandbox.Sandbox.read_file`."""
        with self:
            return await self._box.read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `rljob.sandbox.Sandbox.write_file`."""
        with self:
            await self._box.write_file(path, data, mode=mode)

    async def write_files(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """See `rljob.sandbox.Sandbox.write_files`."""
        with self:
            await self._box.write_files(files, mode=mode)

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, SandboxError):
            self.lost = error
