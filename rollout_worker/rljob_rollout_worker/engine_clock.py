"""A clock that runs only while an engine is ready.

Turn and run deadlines are about the policy, not about its machine: while weights load or an engine
restarts they stand still. (The turn's share of this is kept by the gateway, which sees each
request.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rljob.clock import Clock
from rljob.errors import RLJobError

T = TypeVar("T")

TICK_SECONDS = 0.2
"""How often readiness is looked at: the error of a pause's length, small beside any run deadline."""


class OutOfTimeError(RLJobError):
    """Work did not end within its engine seconds; not the `TimeoutError` that the work itself may raise."""


class EngineClock:
    """Seconds during which `is_ready` held.

    Args:
        clock: The machine's clock.
        is_ready: Whether an engine answers right now.
    """

    def __init__(self, clock: Clock, is_ready: Callable[[], bool]) -> None:
        self._clock, self._is_ready = clock, is_ready
        self._seconds, self._last = 0.0, clock.monotonic()
        self._was_ready = is_ready()
        self._away_since = None if self._was_ready else self._last

    def seconds(self) -> float:
        """Engine seconds since the start; only differences mean anything."""
        self._advance()
        return self._seconds

    def away_seconds(self) -> float:
        """How long no engine has been ready; 0 while one is."""
        self._advance()
        return 0.0 if self._away_since is None else self._last - self._away_since

    def _advance(self) -> None:
        now, ready = self._clock.monotonic(), self._is_ready()
        if ready and self._was_ready:
            self._seconds += now - self._last
        if ready:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = now
        self._last, self._was_ready = now, ready

    async def tick_loop(self) -> None:
        """Look again and again, so that a pause between two readings of `seconds` is not missed. Never ends."""
        while True:
            self._advance()
            await self._clock.sleep(TICK_SECONDS)

    async def within(self, seconds: float, work: Awaitable[T]) -> T:
        """Await `work` for so many engine seconds.

        Raises:
            OutOfTimeError: it did not end; it has been cancelled and has ended by now.
        """
        end = self.seconds() + seconds
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                left = end - self.seconds()
                if left <= 0:
                    raise OutOfTimeError(f"not done after {seconds:g} s of a ready engine")
                await self._wait(task, max(left, TICK_SECONDS / 4))
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _wait(self, task: asyncio.Future[T], seconds: float) -> None:
        sleeper = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({task, sleeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeper.cancel()
