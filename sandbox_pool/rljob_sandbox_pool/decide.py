"""What a pool does next, from what it sees. Pure.

    sandboxes, claims, failures ─► decide ─► expire(claim)*, end(sandbox, why)*, start(image)*

A sandbox that ends holds its place until nothing of it is left, so there are never more than `maximum`. Where there
are too many, those that are kept for a look go first, then those that are not ready yet, then the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rljob_sandbox_pool import sizing
from rljob_sandbox_pool.leases import Lease
from rljob_sandbox_pool.member import MemberState
from rljob_sandbox_pool.sizing import Counts

IDLE_SECONDS = 120.0
"""A sandbox beyond `warm` that nobody wanted for so long is ended."""
MAX_QUARANTINED = 8
"""Sandboxes of a pool that are kept for a look: the newest."""


class Seen(NamedTuple):
    """One sandbox."""

    id: str
    image: str
    state: MemberState
    since: float
    """When it came into its state; like all times here, monotonic."""
    born: float
    """When it was started, or adopted."""
    is_outdated: bool = False
    """Made from an earlier spec: not used again."""
    is_stuck: bool = False
    """STARTING: waits for a node with room, or an image, although nothing is on its way."""
    is_unheard: bool = False
    """STARTING: adopted, so that a claim may hold it."""


@dataclass(frozen=True)
class Observed:
    """All that matters."""

    now: float
    warm: int
    maximum: int
    max_starting: int
    weights: Mapping[str, int]
    """What is to be kept warm: images with their weights."""
    sandboxes: Sequence[Seen]
    waiting: Sequence[str] = ()
    """Images of the claims that would get a sandbox if there were one, most urgent first."""
    expired: Sequence[Lease] = ()
    """Claims past their time to live."""
    failing: Mapping[str, float] = field(default_factory=dict)
    """Images whose last start failed, and when the next may be tried."""
    quarantine_seconds: float = 0.0


class End(NamedTuple):
    """A sandbox to end."""

    id: str
    why: str
    """Empty: it is only not needed any more."""


@dataclass(frozen=True)
class Actions:
    """To be done in this order."""

    expire: list[Lease]
    end: list[End]
    start: list[str]
    """Images, most urgent first."""


def decide(seen: Observed) -> Actions:
    """See the picture above."""
    plan = _Plan(seen)
    plan.end([each for each in plan.living if _is_over(each, seen)])
    plan.end(_aside(plan.living)[MAX_QUARANTINED:])
    plan.end(_surplus(plan))
    plan.end(_victims(plan.living, -plan.room()))
    urgent, spare = _wanted(plan)
    # Whoever waits takes the place of what nobody waits for; a spare one only that of one kept for a look.
    if (lack := len(urgent) - plan.room()) > 0:
        plan.end(_victims(_dispensable(plan), lack))
    if (lack := len(urgent) + len(spare) - plan.room()) > 0:
        plan.end(_victims(_aside(plan.living), lack))
    starting = sum(each.state is MemberState.STARTING for each in seen.sandboxes)
    room = min(seen.maximum - len(seen.sandboxes), seen.max_starting - starting)
    return Actions(list(seen.expired), plan.ended, [*urgent, *spare][: max(0, room)])


class _Plan:
    """What is left, and what was decided to end."""

    def __init__(self, seen: Observed) -> None:
        self.seen = seen
        expired = {lease.sandbox_id for lease in seen.expired}
        self.ended = [End(box, "the claim's time to live is over") for box in expired]
        self.living = [
            each
            for each in seen.sandboxes
            if each.state is not MemberState.ENDING and each.id not in expired
        ]
        self._counts: dict[str, Counts] = {}
        images = {*seen.weights, *seen.waiting, *(each.image for each in self.living)}
        self.warm = dict.fromkeys(images, 0) | sizing.share(seen.warm, seen.weights)

    def end(self, boxes: Sequence[Seen]) -> None:
        """These go."""
        if not boxes:
            return
        self._counts = {}
        gone = {each.id for each in boxes}
        self.ended += [End(box, "") for box in gone]
        self.living = [each for each in self.living if each.id not in gone]

    def room(self) -> int:
        """Places that are free once all that ends is gone; below 0: there are too many."""
        return self.seen.maximum - len(self.living)

    def counts(self) -> dict[str, Counts]:
        """What is left by image."""
        if not self._counts:
            self._counts = self._count()
        return self._counts

    def _count(self) -> dict[str, Counts]:
        states: dict[str, Counter[str]] = {image: Counter() for image in self.warm}
        for each in self.living:
            states[each.image][each.state.value] += 1
        for image in self.seen.waiting:
            states[image]["waiting"] += 1
        return {image: Counts(**each) for image, each in states.items()}


def _is_over(box: Seen, seen: Observed) -> bool:
    """It is of no use any more."""
    if box.state is MemberState.QUARANTINED:
        return seen.now - box.since >= seen.quarantine_seconds
    fresh = box.state in (MemberState.READY, MemberState.STARTING)
    return box.is_outdated and fresh and not box.is_unheard


def _aside(boxes: Sequence[Seen]) -> list[Seen]:
    """Those kept for a look, newest first."""
    found = [each for each in boxes if each.state is MemberState.QUARANTINED]
    return sorted(found, key=lambda each: -each.since)


def _surplus(plan: _Plan) -> list[Seen]:
    """By image: those that were idle for long, the longest first, and those that are stuck, the newest first."""
    found: list[Seen] = []
    for image, counts in plan.counts().items():
        boxes = [
            each
            for each in plan.living
            if (each.state is MemberState.READY or each.is_stuck) and each.image == image
        ]
        warm, now = plan.warm[image], plan.seen.now
        ready = [each for each in boxes if each.state is MemberState.READY]
        idle = [each for each in ready if now - each.since > IDLE_SECONDS]
        num_idle = sizing.num_to_end(counts, warm=warm, idle=len(idle))
        found += sorted(idle, key=lambda each: each.since)[:num_idle]
        stuck = [each for each in boxes if each.is_stuck]
        num_stuck = sizing.num_not_needed(counts, warm=warm)
        found += sorted(stuck, key=lambda each: -each.born)[:num_stuck]
    return found


def _dispensable(plan: _Plan) -> list[Seen]:
    """What may go for a claim: what is ready, since it does not fit, or is kept, and starts that no claim waits for."""
    starting = MemberState.STARTING
    found = [each for each in plan.living if each.state is not starting]
    for image, counts in plan.counts().items():
        boxes = [each for each in plan.living if each.state is starting and each.image == image]
        found += _victims(boxes, counts.starting - max(0, counts.waiting - counts.resetting))
    return found


def _victims(boxes: Sequence[Seen], num: int) -> list[Seen]:
    """Of these, those to end first; none that a claim holds, may hold or has just held."""
    if num <= 0:
        return []
    open_to = (MemberState.QUARANTINED, MemberState.STARTING, MemberState.READY)
    found = [each for each in boxes if each.state in open_to and not each.is_unheard]
    return sorted(found, key=_order)[:num]


def _order(box: Seen) -> tuple[int, float]:
    if box.state is MemberState.QUARANTINED:
        return (0, box.since)
    return (3 if box.state is MemberState.READY else 2 - box.is_stuck, -box.born)


def _wanted(plan: _Plan) -> tuple[list[str], list[str]]:
    """Images to start, were there room for all: for claims that wait, and to spare, most urgent first."""
    seen, counts = plan.seen, plan.counts()
    stuck = {each.image for each in plan.living if each.is_stuck}
    allowed = {image: _num_allowed(seen, image, counts[image]) for image in seen.weights}
    coming = {image: each.coming for image, each in counts.items()}
    urgent: list[str] = []
    for image in seen.waiting:
        if coming[image] > 0:
            coming[image] -= 1
        elif image not in stuck and allowed.get(image, 0) > 0:
            allowed[image] -= 1
            urgent.append(image)
    spare: list[tuple[float, str]] = []
    for image in seen.weights:
        warm = plan.warm[image]
        num = sizing.num_spare_missing(counts[image], warm=warm)
        for nth in range(0 if image in stuck else min(num, allowed[image])):
            spare.append(((warm - num + nth) / warm, image))
    return urgent, [image for _, image in sorted(spare)]


def _num_allowed(seen: Observed, image: str, counts: Counts) -> int:
    """How many of it may start: after a failure one at a time, each after a pause, until one succeeds."""
    if image not in seen.failing:
        return seen.maximum
    return 0 if seen.now < seen.failing[image] else max(0, 1 - counts.starting)
