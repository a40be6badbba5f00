"""How fast sandboxes start: slowly at first and after failures; all pools at a rate, each its share. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable

MAX_IN_FLIGHT, MAX_DELETIONS = 24, 6
"""Creates of all pools, and deletions, that are not answered yet: together fewer than the client has connections, so
that none waits unsent while its deadline runs."""
LARGEST_BATCH = MAX_IN_FLIGHT
FIRST_BACKOFF_SECONDS = 0.25
LONGEST_BACKOFF_SECONDS = 30.0
ASKED_SECONDS = 0.5
"""Who has asked within so long counts when the starts are shared out."""


def backoff_seconds(failures: int) -> float:
    """Pause before the next start after so many failures in a row."""
    if failures == 0:
        return 0.0
    return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 16))


class Failures:
    """Starts of one image that failed in a row."""

    def __init__(self, problem: str, now: float) -> None:
        self.num = 0
        self._failed_at = -math.inf
        self.add(problem, began=now, now=now)

    def add(self, problem: str, *, began: float, now: float) -> None:
        """One more. Starts that were under way together fail together: one failure in a row, not many."""
        self.problem = problem
        """The newest, in words."""
        if began <= self._failed_at:
            return
        self.num += 1
        self._failed_at = now
        self.no_start_before = now + backoff_seconds(self.num)
        """The end of the pause, monotonic."""


class SlowStart:
    """One create, then two, four, …: a pod that is refused is refused once, not a hundred times."""

    def __init__(self) -> None:
        self._window = 1
        self._in_flight = 0

    @property
    def room(self) -> int:
        """How many creates may begin."""
        return max(0, self._window - self._in_flight)

    def begin(self, num: int) -> None:
        """Creates were sent."""
        self._in_flight += num

    def succeeded(self) -> None:
        """One of them was answered."""
        self._in_flight -= 1
        self._window = min(LARGEST_BATCH, self._window + 1)

    def failed(self) -> None:
        """One of them was not, or refused."""
        self._in_flight -= 1
        self._window = 1


class StartBucket:
    """Starts per second of all pools together. Where several ask, none gets more than its share.

    Args:
        rate: Starts per second.
        burst: Starts at once, after a rest.
    """

    def __init__(self, rate: float = 50.0, burst: int = 50) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._filled = float(burst), -math.inf
        self._asked: dict[Hashable, float] = {}
        self._in_flight = 0

    def take(self, who: Hashable, wanted: int, now: float) -> int:
        """How many of `wanted` starts `who` makes now; each is `answered` later."""
        gained = self._rate * (now - self._filled) if self._filled > -math.inf else 0.0
        self._tokens, self._filled = min(self._burst, self._tokens + gained), now
        self._asked = {each: at for each, at in self._asked.items() if now - at < ASKED_SECONDS}
        if wanted <= 0:
            return 0
        self._asked[who] = now
        share = max(1, math.ceil(self._tokens / len(self._asked)))
        room = max(0, MAX_IN_FLIGHT - self._in_flight)
        given = min(wanted, share, int(self._tokens), room)
        self._tokens -= given
        self._in_flight += given
        return given

    def answered(self) -> None:
        """One of those starts was answered, or given up."""
        self._in_flight -= 1
