"""How many sandboxes are too few or too many. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """The members of a pool (of one image of it) by state, and the claims that wait for one."""

    starting: int = 0
    ready: int = 0
    claimed: int = 0
    resetting: int = 0
    quarantined: int = 0
    ending: int = 0
    waiting: int = 0

    @property
    def total(self) -> int:
        """Everything that exists."""
        living = self.starting + self.ready + self.claimed + self.resetting
        return living + self.quarantined + self.ending

    @property
    def busy(self) -> int:
        """What no claim can have, and none may put an end to."""
        return self.starting + self.claimed + self.resetting

    @property
    def coming(self) -> int:
        """What will be ready soon."""
        return self.starting + self.resetting


def share(warm: int, weights: Mapping[str, int]) -> dict[str, int]:
    """How many of `warm` sandboxes each image gets: by weight, what is left over to the largest remainders."""
    total = sum(weights.values())
    given = {image: warm * weight // total for image, weight in weights.items()}
    by_rest = sorted(weights, key=lambda image: -(warm * weights[image] % total))
    for image in by_rest[: warm - sum(given.values())]:
        given[image] += 1
    return given


def num_spare_missing(counts: Counts, *, warm: int) -> int:
    """Of one image: too few to spare, beside those that claims wait for. What is ready does not fit who waits."""
    return max(0, warm - counts.ready - max(0, counts.coming - counts.waiting))


def num_not_needed(counts: Counts, *, warm: int) -> int:
    """Of one image: how many of those that are on their way nobody wants any more."""
    return max(0, counts.coming - counts.waiting - max(0, warm - counts.ready))


def num_to_end(counts: Counts, *, warm: int, idle: int) -> int:
    """Of `idle` sandboxes of an image that nobody has wanted for long, those beyond `warm`."""
    return max(0, min(idle, counts.ready - warm))
