"""How many rollout pods there should be: by the manifest, by our autoscaler, or by somebody else's."""

from __future__ import annotations

from typing import Any

import msgspec

from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob.ledger.types import LedgerSnapshot
from rljob_operator.decision import objects
from rljob_operator.decision.case import Case
from rljob_operator.decision.times import to_seconds, to_text
from rljob_operator.observed import Object
from rljob_operator.plan import scaler_of
from rljob_operator.policies.autoscale import Bounds, Look, Memory, advise

_HELD_BACK = {"staleness_bound", "all_steps_admitted"}
"""What a worker waits for when no further group may start."""
_FRESH_SECONDS = 20.0
"""Older reports, and an older view of the ledger, say nothing about now."""


def wanted(case: Case, job: RLJob, store_ready: bool) -> int | None:
    """Rollout pods now; None: none yet, the store comes first. The number is stated in the status."""
    sts = case.seen.rollout_set
    current = replicas_of(sts) if sts is not None else None
    desired = _desired(case, job, sts)
    case.draft.fields["rollouts"]["desired"] = desired
    return current if not store_ready and not current else desired


def replicas_of(sts: Object) -> int:
    """spec.replicas; Kubernetes' own default is 1."""
    return int((sts.get("spec") or {}).get("replicas", 1))


def _desired(case: Case, job: RLJob, sts: Object | None) -> int:
    rollout = job.spec.rollout
    if sts is not None and replicas_of(sts) and scaler_of(sts):
        return replicas_of(sts)  # a HorizontalPodAutoscaler decides
    if rollout.min_replicas is None or rollout.max_replicas is None:
        case.draft.fields["autoscale"] = None
        return rollout.replicas
    bounds = Bounds(rollout.min_replicas, rollout.max_replicas)
    started = case.draft.fields.get("autoscale") is not None
    before = case.draft.old.get("rollouts", {}).get("desired") if started else None
    current = bounds.clamp(rollout.replicas) if before is None else int(before)
    memory = _remembered(case.draft.fields.get("autoscale") or {})
    advice = advise(memory, _look(case, job), current, bounds)
    case.draft.fields["autoscale"] = _kept(advice.memory)
    if advice.why:
        text = f"{current} → {advice.desired}: {advice.why}"
        case.draft.announce("Normal", conditions.REASON_SCALED, text)
    return advice.desired


def _look(case: Case, job: RLJob) -> Look | None:
    snapshot = case.ledger.snapshot
    if snapshot is None or case.ledger.age_seconds > _FRESH_SECONDS:
        return None
    trainer = snapshot.reports.get("trainer")
    if trainer is None or trainer.age_seconds > _FRESH_SECONDS or snapshot.phase:
        return None
    pods = [pod for pod in case.seen.of("rollout") if objects.ready(pod)]
    return Look(
        now_seconds=case.now,
        waiting_seconds=float(trainer.facts.get("seconds_waiting", 0.0)),
        incarnation=snapshot.incarnation,
        ready_groups=snapshot.counts.get("ready_groups", 0),
        groups_per_step=job.spec.trainer.groups_per_step,
        held_back=_held_back(snapshot),
        ready_replicas=len(pods),
    )


def _held_back(snapshot: LedgerSnapshot) -> bool:
    told = [
        report.waiting_for
        for name, report in snapshot.reports.items()
        if name.startswith("worker") and report.age_seconds < _FRESH_SECONDS
    ]
    return bool(told) and all(text in _HELD_BACK for text in told)


def _remembered(kept: dict[str, Any]) -> Memory:
    return Memory(
        sample_seconds=to_seconds(kept.get("sampleTime")),
        waiting_seconds=float(kept.get("waitingSeconds", 0.0)),
        incarnation=int(kept.get("incarnation", -1)),
        up=int(kept.get("up", 0)),
        down=int(kept.get("down", 0)),
        scaled_seconds=to_seconds(kept.get("scaleTime")),
    )


def _kept(memory: Memory) -> dict[str, Any]:
    known: dict[str, Any] = {
        **msgspec.to_builtins({"up": memory.up, "down": memory.down}),
        "scaleTime": None if memory.scaled_seconds is None else to_text(memory.scaled_seconds),
    }
    if memory.sample_seconds is not None:
        known |= {
            "sampleTime": to_text(memory.sample_seconds),
            "waitingSeconds": round(memory.waiting_seconds, 1),
            "incarnation": memory.incarnation,
        }
    return {key: value for key, value in known.items() if value is not None}
