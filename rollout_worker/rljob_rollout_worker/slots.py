"""A counted room with a queue: at most `limit` inside, the most urgent waiter next."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

Priority = tuple[int, int]
"""Smaller goes first; equal ones in the order in which they came."""


class Slots:
    """The slots of one stage."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a stage needs at least one slot, not {limit}")
        self.limit = limit
        self.in_use = 0
        self._queue: list[tuple[Priority, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return sum(not future.done() for _, _, future in self._queue)

    async def enter(self, priority: Priority) -> None:
        """Wait for a slot. The caller must `leave` it."""
        if self.in_use < self.limit:
            self.in_use += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._order), future))
        try:
            await future
        except asyncio.CancelledError:
            if (
                future.done() and not future.cancelled()
            ):  # granted in the very moment of the cancellation
                self.leave()
            raise

    def leave(self) -> None:
        """Give the slot back: the most urgent waiter has it at once."""
        while self._queue:
            _, _, future = heapq.heappop(self._queue)
            if not future.done():
                future.set_result(None)
                return
        self.in_use -= 1

    @asynccontextmanager
    async def slot(self, priority: Priority) -> AsyncIterator[None]:
        """A slot for the length of a block."""
        await self.enter(priority)
        try:
            yield
        finally:
            self.leave()
