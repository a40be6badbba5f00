"""One session: the chains of an episode and the turns that extend them.

    request ─► find_chain ─► encode what is new ─► Turn.sample ─► Turn.parse ─► chain.append ─► answer
                                │ no room                │ fails: the chain stays as it was
                                └─► context full, no engine call

A session's life: open (chains grow) → closed (packed chains, handed out as often as asked for) →
forgotten (its time to live). Everything between two awaits is one step of the event loop, so
requests of one session need no lock: a chain that is being extended is busy, and a request that
would continue it opens a chain of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from rljob import telemetry
from rljob.clock import Clock
from rljob.codec import pack_chains
from rljob.engine import ParsedTurn
from rljob.errors import EngineError, GatewayError
from rljob.gateway import SessionSpec
from rljob.ids import new_token
from rljob_services.gateway.adapters.openai import Answer, ChatRequest, Usage, to_message, to_prompt
from rljob_services.gateway.chains import OpenChain, Prompt, Sampled, find_chain
from rljob_services.gateway.messages import (
    BadRequestError,
    MessageKey,
    mark_message,
    message_key,
    read_message,
)
from rljob_services.gateway.template import ChatTemplate
from rljob_services.gateway.turn import Engine, EngineGoneError, ReadyGate, Turn

MAX_CHAINS = 1024
"""Per session; an agent inside a sandbox must not be able to fill the gateway."""
MAX_REMEMBERED = 32
"""Answers per session that a repeated request gets again."""

log = telemetry.get_logger()


class SessionClosedError(GatewayError):
    """The session was closed; it takes no further turns."""


class Service(msgspec.Struct, frozen=True):
    """What all sessions share."""

    template: ChatTemplate
    engine: Engine
    gate: ReadyGate
    clock: Clock


class Opening(msgspec.Struct, frozen=True):
    """A chain that a request extends, and by what."""

    chain: OpenChain
    keys: list[MessageKey]
    messages: list[dict[str, Any]]
    """The whole conversation as the template took it."""
    context: list[int]
    """Tokens that the request adds."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.chain.tokens) + len(self.context)


class GatewaySession:
    """One episode's session.

    Args:
        spec: What the worker asked for.
        service: What all sessions share.
    """

    def __init__(self, spec: SessionSpec, service: Service) -> None:
        self.spec, self.token = spec, new_token()
        self.turns, self.engine_wait_seconds = 0, 0.0
        self.num_bytes = 0
        self.last_used = service.clock.monotonic()
        self._service = service
        self._sampling = spec.sampling
        self._chains: list[OpenChain] = []
        self._packed: bytes | None = None
        self._running: set[asyncio.Task[Answer]] = set()
        self._answers: dict[str, tuple[bytes, asyncio.Task[Answer]]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no turn is running."""
        return not self._running

    @property
    def is_closed(self) -> bool:
        """Whether its chains are final."""
        return self._packed is not None

    async def answer(
        self, request: ChatRequest, *, agent_id: str, repeat_key: str = "", body: bytes = b""
    ) -> Answer:
        """One assistant turn. The turn goes on if the caller goes away, so that a repeated request finds its answer.

        Args:
            request: What the client asks.
            agent_id: Which agent of the episode asks.
            repeat_key: Requests of one key get one answer; empty: every request is its own.
            body: The request's bytes: the same key with another body is refused.

        Raises:
            SessionClosedError: the session is closed, or was while the turn ran.
            InfraError: of the engine.
            TaskError: the request is malformed.
        """
        if self.is_closed:
            raise SessionClosedError(f"session {self.spec.session_id} is closed")
        self.last_used = self._service.clock.monotonic()
        task = self._task(request, agent_id, repeat_key, hashlib.sha256(body).digest())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise SessionClosedError(
                    f"session {self.spec.session_id} was closed while a turn ran"
                ) from None
            raise

    async def close(self) -> bytes:
        """End the session; a turn in flight is dropped. The packed chains, the same each time."""
        self.last_used = self._service.clock.monotonic()
        if self._packed is None:
            chains = [chain.record() for chain in self._chains if chain.has_actions]
            self._packed = pack_chains(chains)
            self.num_bytes = len(self._packed)
            self._chains.clear()
            self._answers.clear()
            await self._cancel_turns()
        return self._packed

    async def abort(self) -> None:
        """Drop everything."""
        self._packed = b""
        self._chains.clear()
        await self._cancel_turns()

    async def _cancel_turns(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _task(
        self, request: ChatRequest, agent_id: str, key: str, digest: bytes
    ) -> asyncio.Task[Answer]:
        if key and (found := self._answers.get(key)):
            if found[0] != digest:
                raise BadRequestError(f"the key {key!r} was used for another request")
            return found[1]
        task = asyncio.create_task(self._turn(request, agent_id))
        self._running.add(task)
        if key:
            while len(self._answers) >= MAX_REMEMBERED:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = (digest, task)
        task.add_done_callback(lambda done: self._finish(done, key))
        return task

    def _finish(self, task: asyncio.Task[Answer], key: str) -> None:
        self._running.discard(task)
        # A failed turn left no trace, so asking again may try again.
        if task.cancelled() or task.exception():
            self._answers.pop(key, None)

    async def _turn(self, request: ChatRequest, agent_id: str) -> Answer:
        began = self._service.clock.monotonic()
        opening = self._open(to_prompt(request), agent_id)
        limit = min(
            self.spec.max_context_tokens - opening.num_tokens, self._sampling.max_tokens_per_turn
        )
        if limit < 1:
            return self._answer(request, ParsedTurn(content=""), "length", opening.num_tokens, 0)
        turn = Turn(
            self._service.engine, self._service.gate, self.spec.turn_seconds, self._service.clock
        )
        opening.chain.is_busy = True
        try:
            sampled = await turn.sample(
                [*opening.chain.tokens, *opening.context],
                min(limit, request.token_limit or limit),
                self._sampling,
                self._service.template.stop_token_ids,
            )
            parsed = await self._parse(turn, request, sampled.token_ids)
        finally:
            opening.chain.is_busy = False
            self.engine_wait_seconds += turn.engine_wait_seconds
        if parsed.tool_calls:
            sampled.finish_reason = "tool_calls"
        answer = self._answer(
            request, parsed, sampled.finish_reason, opening.num_tokens, len(sampled.token_ids)
        )
        self._commit(opening, sampled, answer.message)
        telemetry.GATEWAY_TURN_SECONDS.observe(self._service.clock.monotonic() - began)
        return answer

    def _open(self, prompt: Prompt, agent_id: str) -> Opening:
        """The chain that the request continues, or a new one."""
        template = self._service.template
        if chain := find_chain(self._chains, prompt):
            known = len(chain.messages)
            messages = [
                *chain.messages,
                *(mark_message(m, template.vocabulary) for m in prompt.messages[known:]),
            ]
            context = template.encode_continuation(messages, chain.tools, known, chain.tokens[-1])
            if context is not None:
                return Opening(chain, prompt.keys, messages, context)
        if len(self._chains) >= MAX_CHAINS:
            raise BadRequestError(f"the session has {MAX_CHAINS} conversations already")
        messages = [mark_message(m, template.vocabulary) for m in prompt.messages]
        tools = template.vocabulary.mark(prompt.tools)
        chain = OpenChain(tools, prompt.tools_key, agent_id)
        return Opening(chain, prompt.keys, messages, template.encode(messages, tools))

    async def _parse(
        self, turn: Turn, request: ChatRequest, token_ids: Sequence[int]
    ) -> ParsedTurn:
        stops = self._service.template.stop_token_ids
        said = token_ids[:-1] if token_ids and token_ids[-1] in stops else token_ids
        text = self._service.template.vocabulary.decode(said)
        tools = request.tools if request.tools and not request.is_free_text else []
        try:
            return await turn.parse(tools, text)
        except EngineGoneError:
            raise
        except EngineError as error:
            # What a model can write must not become an infrastructure failure, or it could dodge rewards by it.
            log.warning("turn_not_parsed", session=self.spec.session_id, error=str(error))
            return ParsedTurn(content=text)

    def _answer(
        self,
        request: ChatRequest,
        turn: ParsedTurn,
        reason: Literal["stop", "length", "tool_calls", "abort"],
        num_prompt: int,
        num_sampled: int,
    ) -> Answer:
        is_full = reason == "length" and num_prompt + num_sampled >= self.spec.max_context_tokens
        return Answer(
            id=f"chatcmpl-{secrets.token_hex(8)}",
            created=int(self._service.clock.now()),
            model=request.model or self.spec.model,
            message=to_message(turn),
            finish_reason="length" if reason == "abort" else reason,
            usage=Usage(num_prompt, num_sampled),
            context_full=is_full,
        )

    def _commit(self, opening: Opening, sampled: Sampled, said: dict[str, Any]) -> None:
        chain = opening.chain
        if not chain.keys:
            self._chains.append(chain)
        before = chain.num_bytes
        message = read_message(len(opening.messages), said)
        chain.append(opening.context, sampled)
        chain.keys = [*opening.keys, message_key(message)]
        chain.messages = [
            *opening.messages,
            mark_message(message, self._service.template.vocabulary),
        ]
        self.num_bytes += chain.num_bytes - before
        self.turns += 1
