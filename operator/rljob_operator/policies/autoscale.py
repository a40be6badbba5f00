"""How many rollout pods a job should have, between its bounds. Pure; what it remembers is given and given back.

| over the last look (30 s or more) | it speaks for |
| --- | --- |
| the trainer waited for more than a quarter of it, too few groups are ready, and workers are not held back | more |
| the trainer hardly waited, and a batch lies ready or every worker is held back by the staleness bound | fewer |
| anything else | as many |

Two looks in a row for more, or four for fewer, change the number: up by what the waiting asks for, at most twice as
many; down by a tenth, at least one. After a change nothing happens for a while, and nothing is added while pods that
were asked for are not ready. Workers held back by the bound would only be joined by more idle ones.
"""

from __future__ import annotations

import math

import msgspec

LOOK_SECONDS = 30.0
WAITS, HARDLY = 0.25, 0.05
"""Shares of the time."""
LOOKS_UP, LOOKS_DOWN = 2, 4
PAUSE_UP_SECONDS, PAUSE_DOWN_SECONDS = 90.0, 300.0
"""After a change, before the next one up or down: engines take minutes to start and to show what they bring."""


class Bounds(msgspec.Struct, frozen=True):
    """spec.rollout.minReplicas and maxReplicas."""

    minimum: int
    maximum: int

    def clamp(self, count: int) -> int:
        """The nearest allowed number."""
        return max(self.minimum, min(self.maximum, count))


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """The job at one moment."""

    now_seconds: float
    waiting_seconds: float
    """What the trainer has waited for groups in all, since it started."""
    incarnation: int
    """Which start of the trainer; another one counts from 0."""
    ready_groups: int
    groups_per_step: int
    held_back: bool
    """Every worker that says something is idle since no group may start."""
    ready_replicas: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered between two looks."""

    sample_seconds: float | None = None
    waiting_seconds: float = 0.0
    incarnation: int = -1
    up: int = 0
    """Looks in a row that spoke for more."""
    down: int = 0
    scaled_seconds: float | None = None
    """When the number was changed last."""


class Advice(msgspec.Struct, frozen=True):
    """What to do."""

    memory: Memory
    desired: int
    why: str = ""
    """Why the number changed; empty: it did not."""


def advise(memory: Memory, look: Look | None, current: int, bounds: Bounds) -> Advice:
    """The table above; without a look (the ledger is silent) only the bounds count."""
    clamped = bounds.clamp(current)
    if clamped != current:
        why = f"minReplicas is {bounds.minimum}, maxReplicas {bounds.maximum}"
        return Advice(memory, clamped, why)
    if look is None:
        return Advice(memory, current)
    if memory.sample_seconds is None or memory.incarnation != look.incarnation:
        return Advice(_sampled(memory, look, 0, 0), current)
    passed = look.now_seconds - memory.sample_seconds
    if passed < LOOK_SECONDS:
        return Advice(memory, current)
    share = min(1.0, max(0.0, (look.waiting_seconds - memory.waiting_seconds) / passed))
    up = memory.up + 1 if _starved(share, look) else 0
    down = memory.down + 1 if _ahead(share, look) else 0
    desired = bounds.clamp(_number(memory, look, current, share, up, down))
    if desired == current:
        # no higher than what is needed, so that a quiet job's status stays as it is
        return Advice(_sampled(memory, look, min(up, LOOKS_UP), min(down, LOOKS_DOWN)), current)
    changed = msgspec.structs.replace(_sampled(memory, look, 0, 0), scaled_seconds=look.now_seconds)
    return Advice(changed, desired, _why(share, look, desired > current))


def _starved(share: float, look: Look) -> bool:
    return share > WAITS and look.ready_groups < look.groups_per_step and not look.held_back


def _ahead(share: float, look: Look) -> bool:
    return share < HARDLY and (look.held_back or look.ready_groups >= look.groups_per_step)


def _number(memory: Memory, look: Look, current: int, share: float, up: int, down: int) -> int:
    since = math.inf if memory.scaled_seconds is None else look.now_seconds - memory.scaled_seconds
    if up >= LOOKS_UP and since >= PAUSE_UP_SECONDS and look.ready_replicas >= current:
        # the trainer would not wait if groups came 1 / (1 - share) times as fast
        return max(current + 1, math.ceil(current / max(0.5, 1.0 - share)))
    if down >= LOOKS_DOWN and since >= PAUSE_DOWN_SECONDS:
        return current - max(1, current // 10)
    return current


def _sampled(memory: Memory, look: Look, up: int, down: int) -> Memory:
    return Memory(
        sample_seconds=look.now_seconds,
        waiting_seconds=look.waiting_seconds,
        incarnation=look.incarnation,
        up=up,
        down=down,
        scaled_seconds=memory.scaled_seconds,
    )


def _why(share: float, look: Look, more: bool) -> str:
    groups = f"{look.ready_groups} of {look.groups_per_step} groups are ready"
    if more:
        return f"the trainer waited for {share:.0%} of the time, {groups}"
    if look.held_back:
        return "the trainer does not wait, and workers are held back by the staleness bound"
    return f"the trainer does not wait, {groups}"
