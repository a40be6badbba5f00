"""Sandboxes that wait for a claim, and claims that wait for a sandbox: first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def _any(item: object) -> bool:
    return True


class ReadyQueue(Generic[T]):
    """Never holds both, where they fit: a sandbox that becomes ready goes to the claim that has waited longest.

    The sandbox used last is taken first: its memory is warm, and the others get old enough to be ended.
    """

    def __init__(self) -> None:
        self._ready: deque[T] = deque()
        self._waiting: deque[tuple[asyncio.Future[T], Callable[[T], bool]]] = deque()

    @property
    def num_ready(self) -> int:
        """Sandboxes that wait."""
        return len(self._ready)

    @property
    def num_waiting(self) -> int:
        """Claims that wait."""
        return sum(not future.done() for future, _ in self._waiting)

    def put(self, item: T) -> None:
        """A sandbox is ready."""
        self._waiting = deque(entry for entry in self._waiting if not entry[0].done())
        for entry in self._waiting:
            if entry[1](item):
                self._waiting.remove(entry)
                entry[0].set_result(item)
                return
        self._ready.append(item)

    async def get(
        self, seconds: float, on_wait: Callable[[], None], fits: Callable[[T], bool] = _any
    ) -> T | None:
        """A sandbox that fits, at once or within `seconds`; None where none came. `on_wait` is called before it waits.

        Cancelled, it puts a sandbox that had just come back.
        """
        if (found := next(filter(fits, reversed(self._ready)), None)) is not None:
            self._ready.remove(found)
            return found
        if seconds <= 0:
            return None
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, fits))
        on_wait()
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return _result(future)
        except asyncio.CancelledError:
            if (item := _result(future)) is not None:
                self.put(item)
            raise

    def remove(self, item: T) -> None:
        """A sandbox that waited is no more."""
        if item in self._ready:
            self._ready.remove(item)

    def oldest(self, count: int) -> list[T]:
        """Up to `count` sandboxes that have waited longest; they stay."""
        return list(self._ready)[:count]


def _result(future: asyncio.Future[T]) -> T | None:
    return future.result() if future.done() and not future.cancelled() else None
