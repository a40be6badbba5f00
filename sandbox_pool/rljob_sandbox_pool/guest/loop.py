"""One thread, one selector: descriptors, timers, children that ended."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable

Callback = Callable[[], None]
MIN_SWEEP = 64
"""Timers, at least, before those that were cancelled are looked for."""


class Timer:
    """A callback to come; `cancel` takes it back."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callback) -> None:
        self.when = when
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Never run it."""
        self.callback = None


class Loop:
    """Runs callbacks when descriptors are ready, time has come, or a child has ended."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._sweep_at = MIN_SWEEP
        self._order = itertools.count()
        self._events: dict[int, dict[int, Callback]] = {}

    @staticmethod
    def now() -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def watch(
        self, fd: int, *, read: Callback | None = None, write: Callback | None = None
    ) -> None:
        """Replace what is waited for on `fd`; neither: nothing."""
        wanted = {selectors.EVENT_READ: read, selectors.EVENT_WRITE: write}
        callbacks = {event: callback for event, callback in wanted.items() if callback is not None}
        known = fd in self._events
        if not callbacks:
            if known:
                del self._events[fd]
                self._selector.unregister(fd)
            return
        mask = sum(callbacks)
        if not known:
            self._selector.register(fd, mask)
        elif sum(self._events[fd]) != mask:
            self._selector.modify(fd, mask)
        self._events[fd] = callbacks

    def call_at(self, when: float, callback: Callback) -> Timer:
        """Run `callback` at `now() >= when`."""
        timer = Timer(when, callback)
        if len(self._timers) >= self._sweep_at:
            self._sweep()
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def _sweep(self) -> None:
        # Nearly all deadlines are taken back long before they come: they must not be kept until then.
        self._timers = [entry for entry in self._timers if entry[2].callback is not None]
        heapq.heapify(self._timers)
        self._sweep_at = 2 * len(self._timers) + MIN_SWEEP

    def on_child(self, callback: Callback) -> None:
        """Run `callback` whenever children may have ended."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def woken() -> None:
            os.read(reader, 4096)
            callback()

        self.watch(reader, read=woken)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Forever."""
        while True:
            self.run_once()

    def run_once(self, longest_seconds: float = 60.0) -> None:
        """Wait for something, run its callbacks."""
        for key, mask in self._selector.select(self._patience(longest_seconds)):
            for event in (selectors.EVENT_READ, selectors.EVENT_WRITE):
                # A callback may have ended the watch of a later one.
                if mask & event and (callback := self._events.get(key.fd, {}).get(event)):
                    callback()
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                timer.callback()

    def _patience(self, longest_seconds: float) -> float:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return longest_seconds
        return min(longest_seconds, max(0.0, self._timers[0][0] - self.now()))
