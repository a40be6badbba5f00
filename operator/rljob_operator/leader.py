"""Leadership of this process, and the end of it.

    acquire ─► lead ─► lost: the process ends at once, whatever its loop is doing
                 └──► release at a good end: the other replica takes over at its next look

The lease itself is `rljob.kube.lease`. A thread of its own looks whether it was renewed in time: an event loop that
hangs, or a process that was stopped for a minute, must not go on writing when it wakes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from rljob.kube.lease import LeaderLease
from rljob_operator import operator_metrics as metrics

LEASE_NAME = "rljob-operator"
LOST_EXIT_CODE = 4
LOOK_SECONDS = 0.5


def end_now() -> None:
    """End the process without a goodbye: any further write could cross those of the next leader."""
    sys.stderr.write("rljob-operator: the lease was lost; ending\n")
    sys.stderr.flush()
    os._exit(LOST_EXIT_CODE)


class LeaseGuard:
    """Watches a lease that was acquired, from a thread, until `close`.

    Args:
        lease: Ours.
        when_lost: Called once, from the thread.
    """

    def __init__(self, lease: LeaderLease, when_lost: Callable[[], None] = end_now) -> None:
        self._lease, self._when_lost = lease, when_lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lease guard", daemon=True)
        metrics.LEADER.set(1)
        self._thread.start()

    def close(self) -> None:
        """Look no more: we are about to give the lease back."""
        metrics.LEADER.set(0)
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            if not self._lease.leads:
                self._when_lost()
                return
