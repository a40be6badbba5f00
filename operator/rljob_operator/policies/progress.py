"""Whether a job stands still, since when, and whom it is waiting for."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """The newest progress counter and when it last went up (monotonic seconds)."""

    counter: int = -1
    since_seconds: float = 0.0

    def seen(self, counter: int, now_seconds: float) -> Progress:
        """The state after looking at `counter`."""
        return self if counter == self.counter else Progress(counter, now_seconds)

    def stalled(self, now_seconds: float, deadline_seconds: float) -> bool:
        """Nothing has moved for longer than the deadline."""
        return now_seconds - self.since_seconds > deadline_seconds


class Told(msgspec.Struct, frozen=True):
    """What a component last said it waits for, and how long ago."""

    waiting_for: str
    age_seconds: float


_ORDER = ("store", "prepare", "engine", "sandbox-pool", "gateway", "worker", "trainer")
_SILENT_SECONDS = 15.0
"""A component that reports every few seconds and has not for so long hangs."""


def blame(states: Mapping[str, str], told: Mapping[str, Told]) -> str:
    """One sentence: the component that is stalled and what it waits for.

    First comes one that is not up; then one that reports but has gone silent, since it hangs; then those that say what
    they wait for.
    """
    down = [
        f"{name} is {state}"
        for name, state in sorted(states.items(), key=_rank)
        if state not in {"ready", "done"}
    ]
    if down:
        return ", ".join(down)
    silent = [
        f"{name} has said nothing for {report.age_seconds:.0f} s"
        for name, report in told.items()
        if report.age_seconds > _SILENT_SECONDS
    ]
    if silent:
        return ", ".join(silent)
    waiting = [
        f"{name} waits for {report.waiting_for}"
        for name, report in told.items()
        if report.waiting_for
    ]
    return ", ".join(waiting) or "no component says what it waits for"


def _rank(item: tuple[str, str]) -> int:
    role = next((role for role in _ORDER if item[0].startswith(role)), "")
    return _ORDER.index(role) if role else len(_ORDER)
