"""What a pool does next, from what it sees. Pure.

    sandboxes, claims, failures ─► decide ─► expire(claim)*, end(sandbox, why)*, start(image)*

A sandbox that ends holds its place until nothing of it is left, so there are never more than `maximum`. Where there
are too many, those that are kept for a look go first, then those that are not ready yet, then the newest.

One that comes back goes to whom it fits, without asking here: in a full pool it would go round among the claims of one
job, or of one image, for ever. So `yields` says first whether its place is for another.
"""

from __future__ import annotations

import math
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
PATIENCE_SECONDS = 2.0
"""A claim that has waited for so long is not passed over by less urgent ones any more."""
STARTS_PER_TURN, LONGEST_TURN_SECONDS = 4.0, 10.0
"""How long a sandbox serves at least before it makes room for another: so many times as long as its start took, so that
those who share a pool do not spend most of their time on starts."""


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
    job: str = ""
    """Whose claims it has served: it serves no other's."""
    grown: float = 0.0
    """When it was heard first."""


class Wanted(NamedTuple):
    """One claim that waits."""

    image: str
    job: str = ""
    priority: int = 0
    since: float = 0.0
    """When it was made."""

    def fits(self, box: Seen) -> bool:
        """The sandbox may serve it."""
        return self.image == box.image and box.job in ("", self.job)


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
    waiting: Sequence[Wanted] = ()
    """The claims that would get a sandbox if there were one, most urgent first."""
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
    supply = _Supply(seen, plan.living)
    urgent, spare = _wanted(plan, supply)
    # Whoever waits takes the place of what nobody waits for; a spare one only that of one kept for a look.
    if (lack := len(urgent) - plan.room()) > 0:
        plan.end(_victims(_dispensable(plan, supply), lack))
    if (lack := len(urgent) + len(spare) - plan.room()) > 0:
        plan.end(_victims(_aside(plan.living), lack))
    starting = sum(each.state is MemberState.STARTING for each in seen.sandboxes)
    room = min(seen.maximum - len(seen.sandboxes), seen.max_starting - starting)
    return Actions(list(seen.expired), plan.ended, [*urgent, *spare][: max(0, room)])


def yields(seen: Observed, box: Seen) -> bool:
    """A sandbox that comes back is to make room for a claim that it does not fit.

    So it is where that claim comes before all that it fits, and nothing else is on its way to it; where it has waited
    for long, or has the higher priority; and where the sandbox has had its turn.
    """
    turn = min(STARTS_PER_TURN * (box.grown - box.born), LONGEST_TURN_SECONDS)
    if seen.now - box.grown < turn:
        return False
    fitting = (nth for nth, claim in enumerate(seen.waiting) if claim.fits(box))
    end = next(fitting, len(seen.waiting))
    priority = seen.waiting[end].priority if end < len(seen.waiting) else math.inf
    others = [each for each in seen.sandboxes if each.id != box.id]
    busy = (MemberState.STARTING, MemberState.CLAIMED, MemberState.RESETTING)
    room = seen.maximum - 1 - sum(each.state in busy for each in others)
    lacking = _Supply(seen, others).lacking(seen.waiting[:end])
    return any(
        seen.now - claim.since >= PATIENCE_SECONDS or claim.priority > priority
        for claim in lacking[max(0, room) :]
    )


class _Supply:
    """What becomes ready by itself, and what may be started: until a claim that waits has it."""

    def __init__(self, seen: Observed, boxes: Sequence[Seen]) -> None:
        states = {state: [each for each in boxes if each.state is state] for state in MemberState}
        self.starting = Counter(each.image for each in states[MemberState.STARTING])
        self._back = Counter((each.image, each.job) for each in states[MemberState.RESETTING])
        stuck = {each.image for each in boxes if each.is_stuck}
        self.allowed = {
            image: 0 if image in stuck else _num_allowed(seen, image, self.starting[image])
            for image in seen.weights
        }

    def lacking(self, claims: Sequence[Wanted]) -> list[Wanted]:
        """Of these, those for which one more is to be started."""
        found: list[Wanted] = []
        for claim in claims:
            if not self._has(claim) and self.allowed.get(claim.image, 0) > 0:
                self.allowed[claim.image] -= 1
                found.append(claim)
        return found

    def _has(self, claim: Wanted) -> bool:
        for key in ((claim.image, claim.job), (claim.image, "")):
            if self._back[key] > 0:
                self._back[key] -= 1
                return True
        if self.starting[claim.image] > 0:
            self.starting[claim.image] -= 1
            return True
        return False


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
        images = {each.image for each in (*seen.waiting, *self.living)} | {*seen.weights}
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
        for claim in self.seen.waiting:
            states[claim.image]["waiting"] += 1
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


def _dispensable(plan: _Plan, supply: _Supply) -> list[Seen]:
    """What may go for a claim: what is ready, since it does not fit, or is kept, and starts that no claim waits for."""
    starting = MemberState.STARTING
    found = [each for each in plan.living if each.state is not starting]
    for image, num in supply.starting.items():
        boxes = [each for each in plan.living if each.state is starting and each.image == image]
        found += _victims(boxes, num)
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


def _wanted(plan: _Plan, supply: _Supply) -> tuple[list[str], list[str]]:
    """Images to start, were there room for all: for claims that wait, and to spare, most urgent first."""
    urgent = [claim.image for claim in supply.lacking(plan.seen.waiting)]
    spare: list[tuple[float, str]] = []
    for image in plan.seen.weights:
        warm = plan.warm[image]
        num = sizing.num_spare_missing(plan.counts()[image], warm=warm)
        for nth in range(min(num, supply.allowed[image])):
            spare.append(((warm - num + nth) / warm, image))
    return urgent, [image for _, image in sorted(spare)]


def _num_allowed(seen: Observed, image: str, num_starting: int) -> int:
    """How many of it may start: after a failure one at a time, each after a pause, until one succeeds."""
    if image not in seen.failing:
        return seen.maximum
    return 0 if seen.now < seen.failing[image] else max(0, 1 - num_starting)
