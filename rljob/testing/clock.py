"""Clocks for tests: one that runs faster, one that stands still until it is told."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time


class ScaledClock:
    """The machine's clock, `factor` times as fast: a minute's deadline passes in a moment.

    Args:
        factor: Seconds of this clock per second of the machine's.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._began = time.monotonic()

    def now(self) -> float:
        """See `rljob.clock.Clock.now`."""
        return 1_700_000_000.0 + self.monotonic()

    def monotonic(self) -> float:
        """See `rljob.clock.Clock.monotonic`."""
        return (time.monotonic() - self._began) * self.factor

    async def sleep(self, seconds: float) -> None:
        """See `rljob.clock.Clock.sleep`."""
        await asyncio.sleep(seconds / self.factor)


class ManualClock:
    """Stands still until `advance`; sleepers wake in order."""

    def __init__(self) -> None:
        self._time = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """See `rljob.clock.Clock.now`."""
        return 1_700_000_000.0 + self._time

    def monotonic(self) -> float:
        """See `rljob.clock.Clock.monotonic`."""
        return self._time

    async def sleep(self, seconds: float) -> None:
        """See `rljob.clock.Clock.sleep`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._time + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Let time pass; whoever wakes on the way gets to run before it passes on."""
        end = self._time + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._time, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            await _settle()
        self._time = end
        await _settle()


async def _settle() -> None:
    """Let the other tasks run until they wait again (a handful of turns of the loop is enough for ours)."""
    for _ in range(20):
        await asyncio.sleep(0)
