"""Events: said once, when something changes."""

from __future__ import annotations

from typing import Any

from rljob.api import conditions
from rljob_operator.decision.draft import Draft

_CALM = {
    conditions.REASON_STARTING,
    conditions.REASON_WAITING,
    conditions.REASON_READY,
    conditions.REASON_ENDED,
    conditions.REASON_SUSPEND,
    conditions.REASON_RUNNING,
    conditions.REASON_PROGRESS,
    conditions.REASON_QUEUED,
    conditions.REASON_PARTLY_READY,
}
"""Reasons that are no cause for a warning."""
_ROLES = (
    conditions.STORE_READY,
    conditions.PREPARED,
    conditions.SANDBOXES_READY,
    conditions.ROLLOUTS_READY,
    conditions.TRAINER_READY,
)
_PHASES = {
    conditions.PHASE_PREPARING: "model and rows are being made ready",
    conditions.PHASE_RUNNING: "rollouts and trainer are started",
    conditions.PHASE_SUSPENDING: "the trainer writes a checkpoint, workers drain",
    conditions.PHASE_SUSPENDED: "nothing runs any more; volumes and the ledger stay",
}


def announce(draft: Draft, phase: str) -> None:
    """Events for phase and conditions that this pass changed."""
    _conditions(draft)
    old, new = draft.was(conditions.SUSPENDED), draft.now_is(conditions.SUSPENDED)
    if old.get("status", "False") != "False" and new["status"] == "False":
        draft.announce("Normal", conditions.REASON_RESUMED, "spec.suspend is false again")
    if phase == draft.phase:
        return
    end = draft.now_is(
        conditions.FAILED if phase == conditions.PHASE_FAILED else conditions.COMPLETE
    )
    if phase == conditions.PHASE_FAILED:
        draft.announce("Warning", end["reason"], end["message"])
    elif phase == conditions.PHASE_SUCCEEDED:
        draft.announce("Normal", end["reason"], end["message"])
    elif phase == conditions.PHASE_REJECTED:
        accepted = draft.now_is(conditions.ACCEPTED)
        draft.announce("Warning", accepted["reason"], accepted["message"])
    elif phase in _PHASES:
        draft.announce("Normal", phase, _PHASES[phase])


def _conditions(draft: Draft) -> None:
    for kind in _ROLES:
        old, new = draft.was(kind), draft.now_is(kind)
        if not new or _same(old, new):
            continue
        if new["reason"] not in _CALM and not (
            new["status"] == "True" and new["reason"] == conditions.REASON_DONE
        ):
            draft.announce("Warning", new["reason"], f"{kind}: {new['message']}")
        elif new["status"] == "True" and old.get("status") != "True":
            draft.announce("Normal", kind, new["message"] or "ready")
    old, new = draft.was(conditions.PROGRESSING), draft.now_is(conditions.PROGRESSING)
    if not new or _same(old, new):
        return
    if new["status"] == "False" and new["reason"] not in _CALM:
        draft.announce("Warning", new["reason"], new["message"])
    elif old.get("reason") == conditions.REASON_PROGRESS_DEADLINE and new["status"] == "True":
        draft.announce("Normal", conditions.REASON_PROGRESS, "something completes again")


def _same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return (old.get("status"), old.get("reason")) == (new["status"], new["reason"])
