"""Sandboxes that wait for a claim, and claims that wait for a sandbox.

    put ─► the most urgent claim that it fits, else it waits          get ─► the sandbox that fits best, else it waits

Of the claims that wait, the highest priority comes first, then whose job holds the fewest, then who came first. A job
that holds as many as it may waits until it gives one back. Never holds both a sandbox and a claim that may have it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rljob_sandbox_pool.decide import Wanted
from rljob_sandbox_pool.leases import ClaimRequest


class Box(Protocol):
    """A sandbox, as far as it matters here."""

    image: str
    job: str
    """Whose claims it has served: it serves no other's."""


T = TypeVar("T", bound=Box)


@dataclass(eq=False)
class _Waiting(Generic[T]):
    request: ClaimRequest
    image: str
    since: float
    number: int
    granted: asyncio.Future[T]


class ReadyQueue(Generic[T]):
    """See the picture above. Belongs to one event loop.

    Args:
        grant: Called with a sandbox and the claim that gets it, at once: from then on the claim counts as held.
        take_back: Called with a sandbox that was granted to a claim which is no more.
    """

    def __init__(
        self, grant: Callable[[T, ClaimRequest], None], take_back: Callable[[T], None]
    ) -> None:
        self.max_per_job: int | None = None
        self._grant, self._take_back = grant, take_back
        self._ready: dict[str, list[T]] = {}
        self._waiting: list[_Waiting[T]] = []
        self._held: Counter[str] = Counter()
        self._numbers = itertools.count()

    # ── claims ──

    async def get(
        self,
        request: ClaimRequest,
        image: str,
        seconds: float,
        on_wait: Callable[[], None],
        *,
        since: float = 0.0,
    ) -> T | None:
        """A sandbox, at once or within `seconds`; None where none came.

        Args:
            request: The claim.
            image: Of which image.
            seconds: How long it waits.
            on_wait: Called before it waits.
            since: When it was made, for `waiting`.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request, image, since, next(self._numbers), future)
        if (found := self._serve(waiting)) is not None:
            return found
        if seconds <= 0:
            return None
        self._waiting.append(waiting)
        on_wait()
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return _result(future)
        except asyncio.CancelledError:
            if (item := _result(future)) is not None:
                self._take_back(item)
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    @property
    def num_waiting(self) -> int:
        """Claims that wait."""
        return len(self._open())

    def waiting(self) -> list[Wanted]:
        """The claims that would get a sandbox if there were one, most urgent first."""
        left: Counter[str] = Counter()
        found: list[Wanted] = []
        for each in sorted(self._open(), key=self._urgency):
            job = each.request.job
            left[job] += 1
            if self.max_per_job is None or self._held[job] + left[job] <= self.max_per_job:
                found.append(Wanted(each.image, job, each.request.priority, each.since))
        return found

    def is_at_quota(self, job: str) -> bool:
        """The job holds as many as it may."""
        return self.max_per_job is not None and self._held[job] >= self.max_per_job

    # ── sandboxes ──

    def put(self, item: T) -> None:
        """A sandbox is ready."""
        fitting = [
            each
            for each in self._open()
            if each.image == item.image
            and item.job in ("", each.request.job)
            and not self.is_at_quota(each.request.job)
        ]
        if not fitting:
            self._ready.setdefault(item.image, []).append(item)
            return
        first = min(fitting, key=self._urgency)
        self._waiting.remove(first)
        self._grant(item, first.request)
        first.granted.set_result(item)

    def remove(self, item: T) -> None:
        """A sandbox that waited is no more."""
        ready = self._ready.get(item.image, [])
        if item in ready:
            ready.remove(item)

    # ── who holds what ──

    def took(self, job: str) -> None:
        """The job holds one more."""
        self._held[job] += 1

    def gave_back(self, job: str) -> None:
        """The job holds one less, and may have another."""
        self._held[job] -= 1
        if self._held[job] <= 0:
            del self._held[job]
        if self.max_per_job is not None:
            self.serve_all(job)

    def serve_all(self, job: str | None = None) -> None:
        """Claims (of a job) that may have got what is there."""
        for each in sorted(self._open(), key=self._urgency):
            if job in (None, each.request.job) and (item := self._serve(each)) is not None:
                self._waiting.remove(each)
                each.granted.set_result(item)

    def _serve(self, waiting: _Waiting[T]) -> T | None:
        """The sandbox for it, if there is one: what its job used last, else what nobody has used."""
        job, ready = waiting.request.job, self._ready.get(waiting.image, [])
        if not ready or self.is_at_quota(job):
            return None
        fitting = [each for each in ready if each.job in ("", job)]
        own = [each for each in fitting if each.job == job]
        if not fitting:
            return None
        found = (own or fitting)[-1]
        ready.remove(found)
        self._grant(found, waiting.request)
        return found

    def _open(self) -> list[_Waiting[T]]:
        return [each for each in self._waiting if not each.granted.done()]

    def _urgency(self, waiting: _Waiting[T]) -> tuple[int, int, int]:
        request = waiting.request
        return (-request.priority, self._held[request.job], waiting.number)


def _result(future: asyncio.Future[T]) -> T | None:
    return future.result() if future.done() and not future.cancelled() else None
