"""How many sandboxes to start or to end. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass

FIRST_BACKOFF_SECONDS = 0.25
LONGEST_BACKOFF_SECONDS = 30.0


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

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            *(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        )


def share(warm: int, weights: Mapping[str, int]) -> dict[str, int]:
    """How many of `warm` sandboxes each image gets: by weight, what is left over to the largest remainders."""
    total = sum(weights.values())
    given = {image: warm * weight // total for image, weight in weights.items()}
    by_rest = sorted(weights, key=lambda image: -(warm * weights[image] % total))
    for image in by_rest[: warm - sum(given.values())]:
        given[image] += 1
    return given


def num_missing(counts: Counts, *, warm: int) -> int:
    """Of one image: enough for everyone who waits and `warm` to spare.

    What is being reset will be ready soon and counts as such.
    """
    coming = counts.ready + counts.starting + counts.resetting
    return max(0, warm + counts.waiting - coming + _num_unfit(counts))


def starts(
    counts: Mapping[str, Counts],
    warm: Mapping[str, int],
    *,
    maximum: int,
    max_starting: int,
    held: Collection[str] = (),
) -> list[str]:
    """Images of the sandboxes to start, most urgent first; never more than `maximum` in all.

    What is ending still holds its place; `held` images wait. What somebody waits for comes first, then the emptiest.
    """
    missing = {
        image: num_missing(each, warm=warm[image])
        for image, each in counts.items()
        if image not in held
    }
    total = sum(each.total for each in counts.values())
    starting = sum(each.starting for each in counts.values())
    room = max(0, min(maximum - total, max_starting - starting))
    wanted: list[tuple[bool, float, str]] = []
    for image, num in missing.items():
        for nth in range(min(num, room)):
            full = (warm[image] - num + nth) / max(1, warm[image])
            wanted.append((nth >= counts[image].waiting, full, image))
    return [image for _, _, image in sorted(wanted)[:room]]


def num_to_end(counts: Counts, *, warm: int, idle: int) -> int:
    """Of `idle` sandboxes of an image that nobody has wanted for long, those beyond `warm`."""
    return max(0, min(idle, counts.ready - _num_unfit(counts) - warm - counts.waiting))


def _num_unfit(counts: Counts) -> int:
    """Of one image: where some wait and some are ready, these do not fit those and are on their way out."""
    return min(counts.waiting, counts.ready)


def evictions(counts: Mapping[str, Counts], *, maximum: int) -> dict[str, int]:
    """Ready sandboxes to end by image, so that claims which they do not fit get others, or to come below `maximum`."""
    found = {image: _num_unfit(each) for image, each in counts.items()}
    total = sum(each.total for each in counts.values())
    ending = sum(each.ending for each in counts.values())
    waiting = sum(each.waiting for each in counts.values())
    coming = sum(each.starting + each.resetting for each in counts.values())
    excess = total - maximum
    # Idle ones of other images make room for those that are waited for, where there is no room.
    wanted = max(0, waiting - coming) if excess >= 0 else 0
    more = max(0, excess) + wanted - ending - sum(found.values())
    for image, each in sorted(counts.items(), key=lambda item: -item[1].ready):
        taken = max(0, min(more, each.ready - found[image]))
        found[image] += taken
        more -= taken
    return {image: num for image, num in found.items() if num}


def backoff_seconds(failures: int) -> float:
    """Pause before the next start after so many failures in a row."""
    if failures == 0:
        return 0.0
    return min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 16))
