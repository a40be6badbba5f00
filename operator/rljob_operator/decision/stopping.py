"""A job that shall not run: suspended, ended, being deleted, or never accepted.

suspend: trainer and prepare Jobs, rollouts to 0 ─► pools ─► store ─► Suspended        (volumes stay)
ended:   trainer Job, rollouts ─► pools ─► store                                       (volumes stay)
deleted: everything ─► ledger keys, if the Redis is not the job's own ─► finalizer
"""

from __future__ import annotations

from typing import Any

import msgspec

from rljob import labels
from rljob.api import conditions
from rljob_operator.decision import attempt, objects
from rljob_operator.decision.case import Case
from rljob_operator.decision.scale import replicas_of
from rljob_operator.decision.times import to_seconds
from rljob_operator.observed import Decision, Event, Observed, Shape
from rljob_operator.policies import attempts as policy
from rljob_operator.policies import deadlines

PODS_SECONDS = 60.0
"""How long a deletion waits for the job's pods before it clears the ledger all the same."""
_LOOK_SECONDS = 5.0
_ROLES = (
    conditions.STORE_READY,
    conditions.SANDBOXES_READY,
    conditions.ROLLOUTS_READY,
    conditions.TRAINER_READY,
)


def rejected(case: Case, faults: list[str]) -> Decision:
    """The manifest makes no sense; whatever runs is left alone."""
    text = "\n".join(faults)
    case.draft.set(conditions.ACCEPTED, False, conditions.REASON_INVALID_SPEC, text)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return case.answer(None, conditions.PHASE_REJECTED, faults[0] + more)


# ── suspend ──


def suspending(case: Case) -> Decision:
    """spec.suspend is true."""
    draft = case.draft
    reason, why = _reason(case)
    for component, jobs in (
        ("prepare", case.seen.prepare_jobs),
        ("trainer", case.seen.trainer_jobs),
    ):
        known = attempt.newest(draft.attempts(component), jobs)
        draft.remember(component, policy.suspended(known), None)
    draft.fields["readyTime"] = None
    case.count()
    up = _still_up(case)
    began = "startTime" in draft.fields
    if began:
        for kind in _ROLES:
            draft.set(kind, False, reason, "suspended")
        draft.set(conditions.PROGRESSING, False, reason, why)
    draft.set(conditions.SUSPENDED, None if up else True, reason, why)
    phase = conditions.PHASE_SUSPENDING if up else conditions.PHASE_SUSPENDED
    shape = _shrinking(case, draining=True) if began or up else None
    message = f"{why}; waits for {up[0]} to end" if up else why
    return case.answer(shape, phase, message, longest=_LOOK_SECONDS if up else None)


def _reason(case: Case) -> tuple[str, str]:
    """By whom: a deadline that set spec.suspend, or a person."""
    old, progress = case.draft.was(conditions.SUSPENDED), case.draft.was(conditions.PROGRESSING)
    if old.get("status") in {"True", "Unknown"}:
        return old["reason"], old["message"]
    if progress.get("reason") == conditions.REASON_READY_DEADLINE:
        return progress["reason"], progress["message"]
    return conditions.REASON_SUSPEND, "spec.suspend is true"


def _still_up(case: Case) -> list[str]:
    """What is left of the job but volumes, in the order in which it goes."""
    seen = case.seen
    jobs = [*seen.trainer_jobs.values(), *seen.prepare_jobs.values()]
    pods = [pod for pods in seen.pods.values() for pod in pods if not objects.ended(pod)]
    sets = [
        sts
        for sts in (seen.rollout_set, seen.store_set)
        if sts is not None and (replicas_of(sts) or objects.status_of(sts).get("replicas"))
    ]
    return [objects.name_of(item) for item in (*jobs, *pods, *seen.pools, *sets)]


def _shrinking(case: Case, *, draining: bool) -> Shape:
    """Work goes first, then the sandboxes, then the store that all of them talk to."""
    seen = case.seen
    sts = seen.rollout_set
    rollouts = bool(seen.of("rollout")) or (
        sts is not None and bool(objects.status_of(sts).get("replicas"))
    )
    working = rollouts or any(
        not objects.ended(pod) for part in ("trainer", "prepare") for pod in seen.of(part)
    )
    return Shape(
        store=working and seen.store_set is not None and bool(replicas_of(seen.store_set)),
        pools=rollouts and bool(seen.pools),
        rollouts=0 if draining and sts is not None else None,
    )


# ── the end ──


def ended(case: Case) -> Decision:
    """Succeeded or Failed: nothing brings it back."""
    draft, life = case.draft, case.observed.resource.get("spec", {}).get("lifecycle") or {}
    for kind in (*_ROLES, conditions.PROGRESSING):
        if draft.was(kind):
            draft.set(kind, False, conditions.REASON_ENDED, "the job has ended")
    case.count()
    draft.fields["rollouts"]["running"] = 0
    kept = draft.phase == conditions.PHASE_FAILED and life.get("onFailure") == "keepPods"
    shape = _kept(case) if kept else _shrinking(case, draining=False)
    message = str(draft.old.get("message", ""))
    ttl, done = life.get("ttlSecondsAfterFinished"), draft.moment("completionTime")
    due = None if ttl is None or done is None else done + ttl
    longest = None if kept or not _still_up(case) else _LOOK_SECONDS
    answer = case.answer(shape, draft.phase, message, due=[due], longest=longest)
    if deadlines.passed(done, ttl, case.now):
        event = Event("Normal", conditions.REASON_EXPIRED, f"finished for {ttl} s: it is deleted")
        return _with(answer, delete_job=True, events=(*answer.events, event))
    return answer


def _kept(case: Case) -> Shape:
    """Pods of trainer and rollouts stay, with the store, for whoever looks at them; nothing is started anew."""
    seen, sts = case.seen, case.seen.rollout_set
    there = [n for n, job in seen.trainer_jobs.items() if not objects.deleting(job)]
    prepare = [n for n, job in seen.prepare_jobs.items() if not objects.deleting(job)]
    return Shape(
        store=seen.store_set is not None and bool(replicas_of(seen.store_set)),
        prepare_attempt=max(prepare, default=None),
        rollouts=None if sts is None else replicas_of(sts),
        trainer_attempt=max(there, default=None),
    )


# ── deletion ──


def deletion(observed: Observed) -> Decision:
    """metadata.deletionTimestamp is set."""
    resource = observed.resource
    metadata, status = resource["metadata"], resource.get("status") or {}
    answer = Decision(shape=Shape(), status=status, requeue_seconds=None)
    if labels.FINALIZER not in (metadata.get("finalizers") or []):
        return answer
    waited = observed.now_seconds - (to_seconds(metadata["deletionTimestamp"]) or 0.0)
    if observed.pods and waited < PODS_SECONDS:
        return _with(answer, requeue_seconds=min(_LOOK_SECONDS, PODS_SECONDS - waited))
    redis = ((resource.get("spec") or {}).get("store") or {}).get("redis") or {}
    if not (redis.get("url") or redis.get("secretRef")):
        return _with(answer, remove_finalizer=True)
    return _with(answer, destroy_ledger=True, remove_finalizer=True)


def _with(decision: Decision, **fields: Any) -> Decision:
    return msgspec.structs.replace(decision, **fields)
