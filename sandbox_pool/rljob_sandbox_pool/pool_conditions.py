"""The status of a SandboxPool object. Pure.

condition   True                                             False
Ready       as many sandboxes as wanted are warm or in use   they are on their way
Degraded    sandboxes cannot be made; the message says why   nothing is wrong
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rljob.api import conditions
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.kube.resources import Object
from rljob_sandbox_pool.runtimes.base import Trouble
from rljob_sandbox_pool.sizing import Counts

WRITE_SECONDS = 2.0
"""Between two writes of one status where a condition has changed."""
COUNTS_SECONDS = 5.0
"""Between two writes where only counts have."""


def status(
    spec: SandboxPoolSpec,
    counts: Counts,
    trouble: Trouble | None,
    *,
    generation: int,
    earlier: Mapping[str, Any],
    now: float,
) -> Object:
    """The whole status.

    Args:
        spec: What is wanted.
        counts: What there is.
        trouble: Why it is less.
        generation: Of the object whose spec that is.
        earlier: The status that was written last, for the times of transitions.
        now: Seconds since the epoch.
    """
    usable = counts.ready + counts.claimed + counts.resetting
    wanted = min(spec.warm, spec.max)
    ready = (usable >= wanted, "Warm" if usable >= wanted else "Warming")
    words = f"{counts.ready} of {spec.warm} warm, {counts.claimed} claimed"
    found = [
        _condition(conditions.READY, *ready, words if not ready[0] else ""),
        _condition(
            conditions.DEGRADED,
            trouble is not None,
            trouble.reason if trouble else "AsExpected",
            trouble.message if trouble else "",
        ),
    ]
    return {
        "observedGeneration": generation,
        "ready": counts.ready,
        "claimed": counts.claimed,
        "starting": counts.starting,
        "resetting": counts.resetting,
        "quarantined": counts.quarantined,
        "warm": spec.warm,
        "max": spec.max,
        "conditions": _with_times(found, earlier.get("conditions") or [], now),
    }


def refused(problem: str, *, generation: int, earlier: Mapping[str, Any], now: float) -> Object:
    """The status of an object whose spec makes no sense."""
    found = [
        _condition(conditions.READY, False, "InvalidSpec", ""),
        _condition(conditions.DEGRADED, True, "InvalidSpec", problem),
    ]
    times = _with_times(found, earlier.get("conditions") or [], now)
    return {**earlier, "observedGeneration": generation, "conditions": times}


def is_due(wanted: Mapping[str, Any], written: Mapping[str, Any], age_seconds: float) -> bool:
    """It should be written now. `age_seconds`: since the last write."""
    if wanted == written:
        return False
    urgent = any(
        wanted.get(key) != written.get(key) for key in ("conditions", "observedGeneration")
    )
    return age_seconds >= (WRITE_SECONDS if urgent else COUNTS_SECONDS)


def _condition(kind: str, holds: bool, reason: str, message: str) -> Object:
    return {
        "type": kind,
        "status": "True" if holds else "False",
        "reason": reason,
        "message": message[:1024],
    }


def _with_times(found: Sequence[Object], earlier: Sequence[Object], now: float) -> list[Object]:
    before = {each.get("type"): each for each in earlier}
    moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for each in found:
        old = before.get(each["type"], {})
        same = old.get("status") == each["status"]
        each["lastTransitionTime"] = old.get("lastTransitionTime") or moment if same else moment
    return list(found)
