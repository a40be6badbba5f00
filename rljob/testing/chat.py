"""A model and a gateway in memory: turns come from a function, sessions record made-up tokens.

gateway = FakeGateway(script(call("bash", command="ls"), call("submit", answer="42")))
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rljob.errors import GatewayError
from rljob.gateway import ClosedSession, Session, SessionSpec
from rljob.ids import PolicyVersion
from rljob.task_config import ChatReply, Message
from rljob.testing.sandbox import Fault, no_fault
from rljob.trajectory import Chain, VersionSpan

Turn = Callable[[Sequence[Message]], Message]
"""The assistant's next message, given the conversation."""


def say(text: str) -> Message:
    """An assistant message without a tool call."""
    return {"role": "assistant", "content": text}


def call(name: str, **arguments: Any) -> Message:
    """An assistant message with one tool call."""
    return call_raw(name, json.dumps(arguments))


def call_raw(name: str, arguments: str) -> Message:
    """An assistant message with one tool call whose arguments are any text."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
    }


def script(*turns: Message) -> Turn:
    """Says these in order, and the last one again and again."""

    def turn(messages: Sequence[Message]) -> Message:
        said = sum(message["role"] == "assistant" for message in messages)
        return turns[min(said, len(turns) - 1)]

    return turn


class FakeChat:
    """A model without a gateway.

    Args:
        turn: What it says.
        context_turns: After so many turns the context is full.
        finish_reason: Replaces `stop` or `tool_calls`.
        fault: Called before each turn.
    """

    def __init__(
        self,
        turn: Turn,
        *,
        context_turns: int | None = None,
        finish_reason: str = "",
        fault: Fault = no_fault,
    ) -> None:
        self._turn, self._context_turns, self._fault = turn, context_turns, fault
        self._finish_reason = finish_reason
        self.requests: list[list[Message]] = []
        self.tools: list[Mapping[str, Any]] = []

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ChatReply:
        """See `rljob.task_config.Chat.complete`."""
        await self._fault("turn")
        self.requests.append(list(messages))
        self.tools = list(tools)
        message = self._turn(messages)
        reason = self._finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
        full = self._context_turns is not None and len(self.requests) >= self._context_turns
        return ChatReply(message=message, finish_reason=reason, context_full=full)


class _Record:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.mask: list[bool] = []
        self.spans: list[VersionSpan] = []
        self.prompt_length = self.turns = self.num_messages = 0

    def turn(self, messages: Sequence[Message], reply: Message, version: PolicyVersion) -> None:
        for message in messages[self.num_messages :]:
            self._append(message, is_action=False)
        if not self.turns:
            self.prompt_length = len(self.tokens)
        start = len(self.tokens)
        self._append(reply, is_action=True)
        self.spans.append(
            VersionSpan(start, len(self.tokens) - start, version.incarnation, version.n)
        )
        self.turns, self.num_messages = self.turns + 1, len(messages) + 1

    def _append(self, message: Message, *, is_action: bool) -> None:
        words = json.dumps(message, sort_keys=True).split()
        self.tokens += [zlib.crc32(word.encode()) % 1000 for word in words]
        self.mask += [is_action] * len(words)

    def chains(self) -> list[Chain]:
        if not self.turns:
            return []
        chain = Chain(
            tokens=self.tokens,
            prompt_length=self.prompt_length,
            action_mask=self.mask,
            logprobs=[-0.5] * sum(self.mask),
            version_spans=self.spans,
            finish_reason="stop",
        )
        return [chain]


class FakeGateway:
    """Sessions in memory; the interface of `rljob.gateway.GatewayClient`, and `chat` in place of `SessionChat`.

    Args:
        turn: What the model says in every session.
        version: The policy version that samples, asked at each turn.
        fault: Called before each operation: `open`, `turn`, `close`, `abort`.
    """

    def __init__(
        self,
        turn: Turn,
        version: Callable[[], PolicyVersion] = lambda: PolicyVersion(1, 0),
        fault: Fault = no_fault,
    ) -> None:
        self._turn, self._version, self._fault = turn, version, fault
        self.boot_id = "gateway-boot-1"
        self.open: dict[str, _Record] = {}
        """Sessions that are open now."""
        self.specs: list[SessionSpec] = []
        self._numbers = itertools.count()

    async def open_session(self, spec: SessionSpec) -> Session:
        """See `rljob.gateway.GatewayClient.open_session`."""
        await self._fault("open")
        if spec.session_id in self.open:
            raise GatewayError(f"session {spec.session_id} is open")
        self.specs.append(spec)
        self.open[spec.session_id] = _Record()
        return Session(id=spec.session_id, token="t", boot_id=self.boot_id)

    async def close_session(self, session_id: str) -> ClosedSession:
        """See `rljob.gateway.GatewayClient.close_session`."""
        await self._fault("close")
        if session_id not in self.open:
            raise GatewayError(f"session {session_id} is unknown")
        record = self.open.pop(session_id)
        return ClosedSession(
            chains=record.chains(),
            turns=record.turns,
            boot_id=self.boot_id,
            engine_wait_seconds=0.0,
        )

    async def abort_session(self, session_id: str) -> None:
        """See `rljob.gateway.GatewayClient.abort_session`."""
        self.open.pop(session_id, None)
        await self._fault("abort")

    def restart(self) -> None:
        """Forget everything, as a gateway that was killed."""
        self.open.clear()
        self.boot_id = f"gateway-boot-{next(self._numbers) + 2}"

    def chat(self, session: Session) -> _SessionChat:
        """The model behind a session."""
        return _SessionChat(self, session)

    async def say(self, session: Session, messages: Sequence[Message]) -> ChatReply:
        """One turn of a session."""
        await self._fault("turn")
        if session.id not in self.open:
            raise GatewayError(f"session {session.id} is unknown")
        version = self._version()
        message = self._turn(messages)
        self.open[session.id].turn(messages, message, version)
        return ChatReply(
            message=message, finish_reason="tool_calls" if message.get("tool_calls") else "stop"
        )


class _SessionChat:
    def __init__(self, gateway: FakeGateway, session: Session) -> None:
        self._gateway, self._session = gateway, session

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> ChatReply:
        return await self._gateway.say(self._session, messages)
