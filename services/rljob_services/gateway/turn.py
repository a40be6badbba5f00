"""One assistant turn against an engine that may be switched, restarted or gone.

    submit ──► stop, length ─────────────────────────────► done
       ▲  ├──► abort (a switch began): keep the tokens ──┐
       │  ├──► not ready (empty, switching, starting) ───┤ wait for the engine; the turn's clock stands still
       └──┼──────────────────────────────────────────────┘
          ├──► unreachable (restarting) ── a pause; the clock runs ──► submit again
          ├──► refused, nonsense, and it still serves ───► EngineError
          └──► the clock has run out ────────────────────► DeadlineError, or EngineGoneError where it was unreachable

Consumes prompt ids; produces `Sampled`: every token with its log probability and the version that
the engine named for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import httpx

from rljob import telemetry
from rljob.clock import Clock
from rljob.engine import EngineStatus, GenerateRequest, Generation, ParsedTurn
from rljob.errors import DeadlineError, EngineError, EngineNotReadyError
from rljob.gateway import ENGINE_WAIT_LIMIT_SECONDS, SessionSampling
from rljob_services.gateway.chains import Sampled

MAX_SUBMISSIONS = 256
"""Per turn; each abort costs one. A turn that was aborted so often is not getting anywhere."""
FIRST_POLL_SECONDS = 0.02
LONGEST_POLL_SECONDS = 0.25
"""How often an engine that is not ready is asked, by all turns together; a small model switches in 0.1 s."""
RECONNECT_SECONDS = 0.25
"""Pause before an engine that cannot be reached is tried again."""

_T = TypeVar("_T")


class EngineGoneError(EngineError):
    """The engine could not be reached until the turn's deadline."""


class Engine(Protocol):
    """What a turn needs of `rljob.engine.EngineClient`."""

    async def generate(
        self, request: GenerateRequest, *, timeout_seconds: float = 300.0
    ) -> Generation:
        """See `EngineClient.generate`."""
        ...

    async def parse(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        text: str | None = None,
        timeout_seconds: float = 30.0,
    ) -> ParsedTurn:
        """See `EngineClient.parse`."""
        ...

    async def status(self, *, timeout_seconds: float = 10.0) -> EngineStatus:
        """See `EngineClient.status`."""
        ...


class ReadyGate:
    """Waits for the engine to serve a version; one poller for all turns that wait.

    Args:
        engine: The engine.
        clock: Time.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._poller: asyncio.Task[None] | None = None

    async def wait(self, timeout_seconds: float) -> None:
        """Return once the engine is ready, or cannot be reached (a submission will tell). Raises TimeoutError."""
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        async with asyncio.timeout(timeout_seconds):
            await asyncio.shield(self._poller)

    async def aclose(self) -> None:
        """Stop polling."""
        if self._poller:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)

    async def _poll(self) -> None:
        pause = FIRST_POLL_SECONDS
        while True:
            await self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
            try:
                if (await self._engine.status()).state == "ready":
                    return
            except (EngineError, DeadlineError):
                return


class Turn:
    """One turn's deadline, and the engine calls that are made under it.

    Args:
        engine: The engine.
        gate: Shared by all turns of the gateway.
        seconds: Deadline; time in which the engine is not ready does not count.
        clock: Time.
    """

    def __init__(self, engine: Engine, gate: ReadyGate, seconds: float, clock: Clock) -> None:
        self._engine, self._gate, self._seconds, self._clock = engine, gate, seconds, clock
        self._began = clock.monotonic()
        self.engine_wait_seconds = 0.0
        """How long the turn has waited for an engine that was not ready."""

    @property
    def remaining_seconds(self) -> float:
        """What is left of the deadline."""
        return self._seconds - (self._clock.monotonic() - self._began - self.engine_wait_seconds)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        sampling: SessionSampling,
        stop_token_ids: Sequence[int],
    ) -> Sampled:
        """Sample until a stop token or `max_tokens`.

        Raises:
            EngineError: the engine refused, answered nonsense, or (EngineGoneError) stayed unreachable.
            DeadlineError: the turn's deadline passed.
        """
        sampled = Sampled()
        for _ in range(MAX_SUBMISSIONS):
            request = GenerateRequest(
                prompt_ids=[*prompt_ids, *sampled.token_ids],
                max_tokens=max_tokens - len(sampled.token_ids),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop_token_ids=stop_token_ids,
            )
            generation = await self._call(
                lambda s, request=request: self._engine.generate(request, timeout_seconds=s)
            )
            _add(sampled, generation, request.max_tokens)
            if generation.finish_reason != "abort":
                return sampled
            # A switch may cut a turn exactly at its end.
            if sampled.token_ids and sampled.token_ids[-1] in stop_token_ids:
                sampled.finish_reason = "stop"
                return sampled
            if len(sampled.token_ids) >= max_tokens:
                sampled.finish_reason = "length"
                return sampled
            telemetry.GATEWAY_RESUBMISSIONS.inc()
            await self._wait_ready()
        raise EngineError(f"the engine aborted the turn {MAX_SUBMISSIONS} times")

    async def parse(self, tools: Sequence[Mapping[str, Any]], text: str) -> ParsedTurn:
        """Take the turn's text apart. Raises as `sample` does."""
        return await self._call(lambda s: self._engine.parse(tools, text=text, timeout_seconds=s))

    async def _call(self, call: Callable[[float], Awaitable[_T]]) -> _T:
        """Make one engine call, again and again while the engine is not ready or restarting."""
        problem = ""
        while (remaining := self.remaining_seconds) > 0:
            try:
                return await call(remaining)
            except EngineNotReadyError:
                await self._wait_ready()
            except EngineError as error:
                problem = str(error)
                await self._clock.sleep(min(RECONNECT_SECONDS, remaining))
                # An engine that is about to go answers nonsense for a moment; one that still serves means it.
                if not is_unreachable(error) and await self._still_serves():
                    raise
        if problem:
            raise EngineGoneError(f"{problem}; the turn's deadline of {self._seconds:.0f} s passed")
        raise DeadlineError(f"the turn did not end within {self._seconds:.0f} s")

    async def _still_serves(self) -> bool:
        try:
            return (await self._engine.status()).state == "ready"
        except (EngineError, DeadlineError):
            return False

    async def _wait_ready(self) -> None:
        began = self._clock.monotonic()
        try:
            await self._gate.wait(ENGINE_WAIT_LIMIT_SECONDS - self.engine_wait_seconds)
        except TimeoutError:
            raise DeadlineError(
                f"the engine was not ready for {ENGINE_WAIT_LIMIT_SECONDS:.0f} s"
            ) from None
        finally:
            self.engine_wait_seconds += self._clock.monotonic() - began


def is_unreachable(error: EngineError) -> bool:
    """Whether the engine could not be reached, so that the same call may well succeed once it has restarted."""
    return isinstance(error.__cause__, (httpx.TransportError, OSError))


def _add(sampled: Sampled, generation: Generation, max_tokens: int) -> None:
    num_tokens = len(generation.token_ids)
    if num_tokens != len(generation.logprobs):
        raise EngineError(
            f"engine answered {num_tokens} tokens but {len(generation.logprobs)} logprobs"
        )
    if num_tokens > max_tokens:
        raise EngineError(
            f"engine answered {num_tokens} tokens where at most {max_tokens} were asked for"
        )
    sampled.token_ids += generation.token_ids
    sampled.logprobs += generation.logprobs
    sampled.versions.append((num_tokens, generation.version))
    sampled.finish_reason = generation.finish_reason
