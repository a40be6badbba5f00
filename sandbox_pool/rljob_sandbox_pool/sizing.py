"""How many sandboxes to start or to end. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STARTING = 4
"""Started at once: a start is a tenth of a second of CPU, and the machine has other work."""
FIRST_BACKOFF_SECONDS = 0.25
LONGEST_BACKOFF_SECONDS = 30.0


@dataclass(frozen=True)
class Counts:
    """The members of a pool by state, and the claims that wait for one."""

    starting: int = 0
    ready: int = 0
    claimed: int = 0
    resetting: int = 0
    ending: int = 0
    waiting: int = 0

    @property
    def total(self) -> int:
        """Everything that exists."""
        return self.starting + self.ready + self.claimed + self.resetting + self.ending


def num_to_start(counts: Counts, *, warm: int, maximum: int) -> int:
    """Enough for everyone who waits and `warm` to spare; never more than `maximum` in all.

    What is being reset will be ready soon and counts as such; what is ending still holds its place.
    """
    missing = warm + counts.waiting - counts.ready - counts.starting - counts.resetting
    return max(0, min(missing, maximum - counts.total, MAX_STARTING - counts.starting))


def num_to_end(counts: Counts, *, warm: int, idle: int) -> int:
    """Of `idle` sandboxes that nobody has wanted for long, those beyond `warm`."""
    return max(0, min(idle, counts.ready - warm - counts.waiting))


def backoff_seconds(failures: int) -> float:
    """Pause before the next start after so many failures in a row."""
    if failures == 0:
        return 0.0
    return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 16))
