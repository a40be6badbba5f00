"""Holds weights back until no training episode runs, where they may change only between batches.

    engine agent ── before_switch(version) ──► waits ──► (switch) ──► leases again, on the new version

| schedule                     | meanwhile                                    | until                       |
| ---------------------------- | -------------------------------------------- | --------------------------- |
| async                        | (no gate)                                    |                             |
| async, partialRollout: false | nothing new is leased                        | what runs has ended         |
| sync, one_step               | leases go on: the batch begun is completed   | nothing runs, nothing to get |

Waiting is bounded: past `limit_seconds` what still runs is handed back (it counts as no failure)
and the switch goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from rljob.clock import Clock
from rljob.ids import PolicyVersion

POLL_SECONDS = 0.05
HOLD_SECONDS = 60.0
"""How long nothing is leased after the gate opened and before the engine names the next version; then it failed."""

_log = structlog.get_logger("rljob.gate")


class SwitchGate:
    """The gate.

    Args:
        finishes_batch: Whether leasing goes on until the ledger has nothing more.
        limit_seconds: How long a switch may be held back.
        clock: Time.
        current: The version that the engine names now.
        num_running: Training episodes that may still sample.
        hand_back: Ends those and hands them back.
    """

    def __init__(
        self,
        *,
        finishes_batch: bool,
        limit_seconds: float,
        clock: Clock,
        current: Callable[[], PolicyVersion | None],
        num_running: Callable[[], int],
        hand_back: Callable[[], Awaitable[None]],
    ) -> None:
        self._finishes_batch, self._limit_seconds, self._clock = (
            finishes_batch,
            limit_seconds,
            clock,
        )
        self._current, self._num_running, self._hand_back = current, num_running, hand_back
        self._waiting = False
        self._held: tuple[PolicyVersion, float] | None = None
        self.exhausted: PolicyVersion | None = None
        """Set by the lease loop: the version for which the ledger had nothing more when it was last asked."""

    @property
    def leases_may_start(self) -> bool:
        """Whether the lease loop may ask for training episodes now."""
        if self._held is not None:
            version, until = self._held
            if self._current() == version and self._clock.monotonic() < until:
                return False
            self._held = None
        return not self._waiting or self._finishes_batch

    async def before_switch(self, version: PolicyVersion) -> None:
        """Called by the engine agent; returns when the engine may switch to `version`."""
        old = self._current()
        if old is None:
            return
        began, self._waiting = self._clock.monotonic(), True
        try:
            while self._is_busy():
                if self._clock.monotonic() - began > self._limit_seconds:
                    _log.warning(
                        "switch_waited_too_long", version=str(version), running=self._num_running()
                    )
                    await self._hand_back()
                    break
                await self._clock.sleep(POLL_SECONDS)
            self._held = (old, self._clock.monotonic() + HOLD_SECONDS)
        finally:
            self._waiting = False

    def _is_busy(self) -> bool:
        may_get_more = self._finishes_batch and self.exhausted != self._current()
        return self._num_running() > 0 or may_get_more
