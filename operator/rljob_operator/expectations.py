"""What the operator did and does not see in its copy yet, so that no decision rests on a copy that lags.

    create, apply ─► pending: the answer stands in for the child until the copy's watch has told of it
    delete        ─► going:   the child counts as being deleted until it is gone from the copy
    refused       ─► held:    not tried again before its pause is over, unless what is wanted has changed
    apply         ─► settled: what the API server made of our fields; anything else there is drift

Names of children are deterministic, so a lagging copy could never make two of one; it could make a decision count an
attempt twice. All of this is memory: after a restart the copies are read afresh. Pure; time is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_operator.observed import ChildKey, Object

EXPIRY_SECONDS = 60.0
"""A copy that has not caught up by then never will: it is taken at its word again."""
FIRST_HOLD_SECONDS, LONGEST_HOLD_SECONDS = 2.0, 60.0


@dataclass(frozen=True)
class Pending:
    """A write that was answered."""

    before: str
    """Version of the child in the copy when it was written; empty: it was not there."""
    answer: Object
    expires: float


@dataclass(frozen=True)
class Refusal:
    """A write that was refused."""

    wanted: str
    """Hash of what was wanted."""
    times: int
    until: float
    warning: Object
    """As an Event, for whoever decides."""


@dataclass
class Expectations:
    """Of one job."""

    pending: dict[ChildKey, Pending] = field(default_factory=dict[ChildKey, Pending])
    going: dict[str, float] = field(default_factory=dict[str, float])
    """uid → when to stop expecting."""
    refusals: dict[ChildKey, Refusal] = field(default_factory=dict[ChildKey, Refusal])
    settled: dict[ChildKey, tuple[str, str]] = field(
        default_factory=dict[ChildKey, tuple[str, str]]
    )
    """(uid, digest of the live values of the fields that we applied)."""

    # ── what was done ──

    def written(self, key: ChildKey, before: Object | None, answer: Object, now: float) -> None:
        """A create or apply was answered."""
        self.refusals.pop(key, None)
        if version(before) != version(answer):
            self.pending[key] = Pending(version(before), answer, now + EXPIRY_SECONDS)

    def deleted(self, uid: str, now: float) -> None:
        """A delete was answered."""
        self.going[uid] = now + EXPIRY_SECONDS

    def refused(self, key: ChildKey, wanted: str, warning: Object, now: float) -> None:
        """A create, apply or delete was refused for good."""
        last = self.refusals.get(key)
        times = last.times + 1 if last and last.wanted == wanted else 1
        pause = min(LONGEST_HOLD_SECONDS, FIRST_HOLD_SECONDS * 2.0 ** min(times - 1, 10))
        self.refusals[key] = Refusal(wanted, times, now + pause, warning)

    # ── what follows from it ──

    def overlay(
        self, copy: Mapping[ChildKey, Object], told: Mapping[ChildKey, str], now: float
    ) -> dict[ChildKey, Object]:
        """The children as they are at least: the copy, with our own answered writes in it.

        Args:
            copy: What the watches have.
            told: The version that a watch told of last, per child; `gone` in it where that was its end.
            now: On the clock of the writes.
        """
        seen = dict(copy)
        for key, pending in list(self.pending.items()):
            last = told.get(key, "")
            caught_up = last != pending.before and last.startswith(f"{_uid(pending.answer)}/")
            if caught_up or now > pending.expires:
                del self.pending[key]
            else:
                seen[key] = pending.answer
        there = {_uid(child) for child in seen.values()}
        for uid, expires in list(self.going.items()):
            if uid not in there or now > expires:
                del self.going[uid]
        for key, child in seen.items():
            if _uid(child) in self.going and "deletionTimestamp" not in child["metadata"]:
                metadata = {**child["metadata"], "deletionTimestamp": "1970-01-01T00:00:00Z"}
                seen[key] = {**child, "metadata": metadata}
        return seen

    def held(self, key: ChildKey, wanted: str, now: float) -> bool:
        """Whether this write was refused and its pause is not over."""
        refusal = self.refusals.get(key)
        return refusal is not None and refusal.wanted == wanted and now < refusal.until

    def forget_refusals(self, wanted: set[ChildKey]) -> None:
        """What is no longer wanted is no longer refused."""
        for key in self.refusals.keys() - wanted:
            del self.refusals[key]

    def warnings(self) -> list[Object]:
        """The refusals, as Events."""
        return [refusal.warning for refusal in self.refusals.values()]

    def next_try(self) -> float | None:
        """When the first pause is over."""
        return min((refusal.until for refusal in self.refusals.values()), default=None)


def gone(child: Object) -> str:
    """What `version` would be of a child whose end was told."""
    return f"{_uid(child)}/gone"


def version(child: Object | None) -> str:
    """uid and resource version: what changes with every write; empty for a child that is not there."""
    if child is None:
        return ""
    metadata = child["metadata"]
    return f"{metadata.get('uid', '')}/{metadata.get('resourceVersion', '')}"


def _uid(child: Object) -> str:
    return str(child["metadata"].get("uid", ""))
