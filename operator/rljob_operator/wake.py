"""Single flight: at most one pass per object at a time, and one more for whatever woke it meanwhile.

    wake(uid) ─► event of that uid ─► pass ─► sleep until woken, or until the pass wants to look again
                     ▲                 │ fails: pause, doubling up to a minute; wakes wait for its end
                     └─────────────────┘

Passes of different objects run beside each other, a bounded number at once. A pass that says GONE ends its task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from rljob.clock import Clock, SystemClock
from rljob.errors import InfraError
from rljob_operator import operator_metrics as metrics

GONE: Final = -1.0
"""What a pass returns when its object is no more."""
AT_ONCE = 8
"""Passes that run at the same time."""
GAP_SECONDS = 0.2
"""Between two passes of one object: a burst of events becomes one pass."""
PASS_SECONDS = 120.0
"""A pass that takes longer is given up and tried again."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0

Pass = Callable[[str], Awaitable[float | None]]
"""One look at an object: seconds until it wants to look again, None for never, or GONE."""

_log = structlog.get_logger("rljob.operator")


class Wakes:
    """See the picture above. Belongs to one event loop."""

    def __init__(self, clock: Clock | None = None, *, gap_seconds: float = GAP_SECONDS) -> None:
        self._pass: Pass | None = None
        self._clock = clock or SystemClock()
        self._gap_seconds = gap_seconds
        self._events: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    def wake(self, uid: str) -> None:
        """Something of this object has changed."""
        if uid in self._events:
            self._events[uid].set()
            return
        self._events[uid] = event = asyncio.Event()
        event.set()
        if self._pass is not None:
            self._start(uid, self._pass)

    def start(self, one_pass: Pass) -> None:
        """Begin; what was woken before is looked at now."""
        self._pass = one_pass
        for uid in self._events:
            self._start(uid, one_pass)

    async def aclose(self, deadline_seconds: float = 5.0) -> None:
        """Let passes that are under way end, until the deadline, and start no more."""
        self._pass = None
        tasks = list(self._tasks.values())
        for event in self._events.values():
            event.set()
        if tasks:
            await asyncio.wait(tasks, timeout=deadline_seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, uid: str, one_pass: Pass) -> None:
        self._tasks[uid] = asyncio.create_task(self._loop(uid, one_pass), name=f"reconcile {uid}")

    async def _loop(self, uid: str, one_pass: Pass) -> None:
        event, failures = self._events[uid], 0
        while self._pass is not None:
            event.clear()
            again, failed = await self._once(uid, one_pass)
            failures = failures + 1 if failed else 0
            if again == GONE and not event.is_set():
                del self._events[uid], self._tasks[uid]
                return
            if failures:
                pause = min(
                    LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10)
                )
                await self._clock.sleep(pause)
            elif again != GONE:
                await self._sleep(event, again)

    async def _sleep(self, event: asyncio.Event, seconds: float | None) -> None:
        if self._pass is not None:
            await self._clock.sleep(self._gap_seconds)
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            pass

    async def _once(self, uid: str, one_pass: Pass) -> tuple[float | None, bool]:
        """(when to look again, whether it failed)."""
        async with self._slots:
            began = self._clock.monotonic()
            result = "error"
            try:
                async with asyncio.timeout(PASS_SECONDS):
                    again = await one_pass(uid)
                result = "ok"
                return again, False
            except (InfraError, TimeoutError) as error:
                result = "retry"
                _log.warning("pass_failed", uid=uid, reason=str(error) or type(error).__name__)
            except Exception:  # noqa: BLE001 (a fault in one job's pass must not end those of the others)
                _log.exception("pass_failed", uid=uid)
            finally:
                metrics.RECONCILES.inc(result=result)
                metrics.RECONCILE_SECONDS.observe(self._clock.monotonic() - began)
            return None, True
