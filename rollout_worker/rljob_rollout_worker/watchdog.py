"""Ends a worker whose event loop has stopped: a reward or tool that blocks (`time.sleep`) would freeze it for ever.

    event loop ──beat──► Watchdog ◄──look── thread: no beat for so long ─► stack, one line, exit 1 ─► driver restarts it

Looks are counted and not seconds, so a machine that slept or a stopped process is no stall. What keeps the interpreter
lock (a regular expression without end) stops the thread, too, and is not seen.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType

import structlog

from rljob.errors import MachineError

STALL_SECONDS = 120.0
VARIABLE = "RLJOB_WORKER_STALL_SECONDS"
EXIT_STALLED = 1
_LOOKS = 60
"""Looks per stall."""

_log = structlog.get_logger("rljob.worker")


class Watchdog:
    """Watches the running event loop while entered.

    Args:
        seconds: How long the loop may stand still; 0: for ever.
        doing: What runs, for people; called from the thread, while the loop stands still.
        end: Ends the process.
    """

    def __init__(
        self, seconds: float, doing: Callable[[], str], end: Callable[[int], object] = os._exit
    ) -> None:
        self._seconds, self._doing, self._end = seconds, doing, end
        self._beats = 0
        self._left = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._loop = asyncio.get_running_loop()
        if self._seconds > 0:
            self._beat()
            self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        self._left.set()
        if self._timer is not None:
            self._timer.cancel()
            self._thread.join()

    def _beat(self) -> None:
        self._beats += 1
        wait = self._seconds / _LOOKS / 2
        self._timer = self._loop.call_later(wait, self._beat)

    def _watch(self) -> None:
        seen, still = 0, 0
        while not self._left.wait(self._seconds / _LOOKS):
            still = still + 1 if self._beats == seen else 0
            seen = self._beats
            if still >= _LOOKS:
                self._stalled()
                return

    def _stalled(self) -> None:
        try:
            # stderr itself, whatever stands in for it; the line comes last, since the driver shows the last line
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
            fix = "a reward, task or tool blocks: await, or use asyncio.to_thread"
            _log.error(
                "event_loop_stalled",
                seconds=self._seconds,
                task=self._task(),
                doing=self._doing(),
                fix=fix,
            )
        finally:
            self._end(EXIT_STALLED)

    def _task(self) -> str:
        """The task that the loop stands still in."""
        task = asyncio.current_task(self._loop)
        if task is None:
            return ""
        return f"{task.get_name()} {getattr(task.get_coro(), '__qualname__', '')}".strip()


def stall_seconds(environment: Mapping[str, str] | None = None) -> float:
    """How long the loop may stand still. Raises MachineError for a variable that is no number."""
    value = (os.environ if environment is None else environment).get(VARIABLE, "")
    try:
        return max(0.0, float(value)) if value else STALL_SECONDS
    except ValueError as error:
        raise MachineError("environment", f"{VARIABLE} is {value!r}", "give seconds") from error
