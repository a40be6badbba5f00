"""How a trainer's or collector's end becomes the job's.

| ledger | newest Job | then |
| --- | --- | --- |
| says Succeeded or Failed | has ended, or lingers | the job has ended so |
| was asked after the Job's end, says nothing | complete | it was told to stop: another attempt |
| cannot be asked although its store is up | complete | wait for it, then trust the exit code |
| cannot be asked, its own store is down | complete | wait for the store: all of them may have been drained |
| cannot be asked | complete, and was seen to be evicted | it was told to stop: another attempt |
| | failed | the policy of attempts |
"""

from __future__ import annotations

from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob_operator.decision import attempt, objects, trouble
from rljob_operator.decision.attempt import Stage
from rljob_operator.decision.case import Case
from rljob_operator.decision.roles import own_store
from rljob_operator.observed import Decision
from rljob_operator.policies.restart import Action

TRUST_SECONDS = 60.0
"""How long a ledger that cannot be asked is waited for once the Job is complete and the store ready."""
TRUST_AWAY_SECONDS = 900.0
"""The same for a Redis of one's own that cannot be reached at all."""
LINGER_SECONDS = 120.0
"""How long a process may live on after it told the ledger that the job has ended."""


def verdict(case: Case, job: RLJob, stage: Stage) -> Decision | None:
    """The job's end, if this is it."""
    snapshot = case.ledger.snapshot
    refused = stage.decision is not None and stage.decision.action is Action.FAIL
    if refused and stage.decision and stage.decision.reason == conditions.REASON_BAD_INPUT:
        return None  # its own words say more than the ledger's
    # before the first attempt it can only be of an earlier job, whose keys were left in a Redis of one's own
    begun = stage.attempts.attempt > 0
    if snapshot is not None and snapshot.phase and begun and _no_longer_runs(case, stage):
        return _by_ledger(case, job, snapshot.phase, snapshot.message)
    if stage.complete and not _asked_since(case, stage) and _no_word_will_come(case, job, stage):
        text = f"{_done(job)}; the ledger could not be asked, the exit code was 0"
        return case.end(conditions.PHASE_SUCCEEDED, conditions.REASON_STEPS_DONE, text)
    return None


def has_succeeded(case: Case) -> bool:
    """The trainer or collector has done its work, although the operator, which may have been away, did not say so."""
    snapshot = case.ledger.snapshot
    begun = case.draft.attempts("trainer").attempt > 0
    return begun and snapshot is not None and snapshot.phase == conditions.PHASE_SUCCEEDED


def unfinished(case: Case, job: RLJob, stage: Stage, step: int) -> Stage:
    """A Job that ended well although the job has not: it was told to stop."""
    if not stage.complete or stage.job is None:
        return stage
    evicted = _evicted(case, stage)
    if not evicted and not _asked_since(case, stage):
        return stage
    return attempt.count(
        "trainer",
        stage.attempts,
        stage.job,
        case.seen,
        step=step,
        backoff_limit=job.spec.lifecycle.backoff_limit,
        now=case.now,
        title="the trainer" if job.spec.mode == "train" else "the collector",
        disrupted=evicted,
    )


def _no_word_will_come(case: Case, job: RLJob, stage: Stage) -> bool:
    ended_at, draft = objects.finished_at(stage.job) if stage.job else None, case.draft
    if ended_at is None or _evicted(case, stage):
        return False
    if draft.holds(conditions.STORE_READY):
        since = max(ended_at, draft.since(conditions.STORE_READY))
        return case.now - since > TRUST_SECONDS
    return not own_store(job) and case.now - ended_at > TRUST_AWAY_SECONDS


def _evicted(case: Case, stage: Stage) -> str:
    pods = case.seen.pods_of_attempt("trainer", stage.attempts.attempt)
    return next((text for pod in pods if (text := trouble.disruption(pod))), disrupted(case))


def disrupted(case: Case, kind: str = conditions.TRAINER_READY) -> str:
    """What an earlier pass said of the pods of the newest attempt, if that was an eviction."""
    was = case.draft.was(kind)
    return str(was["message"]) if was.get("reason") == conditions.REASON_DISRUPTED else ""


def _no_longer_runs(case: Case, stage: Stage) -> bool:
    if stage.job is None or objects.finished(stage.job):
        return True
    since = case.draft.progress_since()
    return since is not None and case.now - since > LINGER_SECONDS


def _asked_since(case: Case, stage: Stage) -> bool:
    """The ledger was seen after the Job's end."""
    ended_at = objects.finished_at(stage.job) if stage.job else None
    if case.ledger.snapshot is None or ended_at is None:
        return False
    # the Job's time is cut to seconds
    return case.now - case.ledger.age_seconds > ended_at + 1.0


def _by_ledger(case: Case, job: RLJob, phase: str, message: str) -> Decision:
    if phase == conditions.PHASE_SUCCEEDED:
        return case.end(phase, conditions.REASON_STEPS_DONE, _done(job))
    text = message or "the trainer gave up without a word"
    return case.fail(conditions.REASON_TRAINER_FAILED, text)


def _done(job: RLJob) -> str:
    if job.spec.mode == "train":
        return f"{job.spec.trainer.steps} steps are trained and committed"
    return "all rows are scored" if job.spec.mode == "eval" else "all prompts are collected"
