"""One component that runs as Jobs, one per attempt: prepare, the trainer, the collector.

    n is over (status) ─► pause ─► store ready, nothing of an older attempt runs ─► Job n+1 ─► seen: it is attempt n+1
          ▲                                                                                       │
          └───────── the policy says "again" ◄── failed, deleted, ended without finishing ◄───────┘

An attempt exists once its Job was seen, never before: so no number is used twice or skipped however stale the view is.
A Job that has ended stays until the status that counts it was read back: so no failure is forgotten.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rljob_operator.decision import objects, trouble
from rljob_operator.decision.seen import Seen
from rljob_operator.observed import Object
from rljob_operator.policies import attempts as policy
from rljob_operator.policies.attempts import Attempts, End
from rljob_operator.policies.restart import EXIT_FENCED, EXIT_USER_ERROR, Decision

UNWRITTEN = "its status to be written"
_LONGEST_PAUSE_SECONDS = 60.0
"""No pause is so long: one that ends later was written by a clock that has been set back since."""
_LOST = 1
"""Exit code of a pod that nobody saw end."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass makes of a component."""

    attempts: Attempts
    retry_at: float | None = None
    number: int | None = None
    """The Job that should be there."""
    job: Object | None = None
    """The newest Job, unless it is being deleted."""
    complete: bool = False
    """The newest Job has ended well: its caller says what that means."""
    decision: Decision | None = None
    """This pass saw an attempt end."""
    waits_for: str = ""
    """Why the next attempt has not begun."""


def newest(attempts: Attempts, jobs: dict[int, Object]) -> Attempts:
    """The numbers with what is seen: a Job that is there was started."""
    return msgspec.structs.replace(attempts, attempt=max([attempts.attempt, attempts.ended, *jobs]))


def look(
    component: str,
    before: Attempts,
    attempts: Attempts,
    retry_at: float | None,
    seen: Seen,
    *,
    step: int,
    backoff_limit: int,
    now: float,
    may_start: str,
    title: str = "",
    disrupted: str = "",
) -> Stage:
    """One pass.

    Args:
        component: `prepare` or `trainer`.
        before: What the status said that was read.
        attempts: What is known now.
        retry_at: When the next attempt is due.
        seen: The cluster.
        step: Newest committed step.
        backoff_limit: Failures in a row that are allowed.
        now: Seconds since the epoch.
        may_start: Empty, or why no attempt may begin now.
        title: How people call it, where that is another word.
        disrupted: What an earlier pass saw: an evicted pod may be gone before its Job says that it has ended.
    """
    jobs = seen.prepare_jobs if component == "prepare" else seen.trainer_jobs
    attempts = newest(attempts, jobs)
    job = jobs.get(attempts.attempt)
    job = None if job is None or objects.deleting(job) else job
    if attempts.running:
        if job is not None and objects.complete(job):
            return Stage(attempts=attempts, number=attempts.attempt, job=job, complete=True)
        if job is not None and not objects.failed(job):
            return Stage(attempts=attempts, number=attempts.attempt, job=job)
        if job is None:  # by other hands: whoever deletes a Job wants a new one
            ended = policy.suspended(attempts)
            return _next(component, before, ended, None, seen, now, may_start)
        return count(
            component,
            attempts,
            job,
            seen,
            step=step,
            backoff_limit=backoff_limit,
            now=now,
            title=title,
            disrupted=disrupted,
        )
    return _next(component, before, attempts, retry_at, seen, now, may_start)


def count(
    component: str,
    attempts: Attempts,
    job: Object,
    seen: Seen,
    *,
    step: int,
    backoff_limit: int,
    now: float,
    title: str = "",
    disrupted: str = "",
) -> Stage:
    """The newest attempt is over: what follows."""
    pods = seen.pods_of_attempt(component, attempts.attempt)
    end = end_of(title or component, pods, job, step, disrupted)
    after, decision = policy.over(attempts, end, backoff_limit)
    return Stage(
        attempts=after,
        retry_at=now + decision.delay_seconds,
        number=attempts.attempt,
        job=job,
        decision=decision,
    )


def _next(
    component: str,
    before: Attempts,
    attempts: Attempts,
    retry_at: float | None,
    seen: Seen,
    now: float,
    may_start: str,
) -> Stage:
    """Nothing runs; start the next attempt when it is time."""
    jobs = seen.prepare_jobs if component == "prepare" else seen.trainer_jobs
    job = jobs.get(attempts.ended)
    kept = attempts.ended if job is not None and not objects.deleting(job) else None
    stage = Stage(attempts=attempts, retry_at=retry_at, number=kept)
    number = attempts.ended + 1
    if before.ended < attempts.ended and kept is not None:
        return msgspec.structs.replace(stage, waits_for=UNWRITTEN)
    if retry_at is not None and 0 < retry_at - now <= _LONGEST_PAUSE_SECONDS:
        return msgspec.structs.replace(stage, waits_for="its pause")
    if may_start:
        return msgspec.structs.replace(stage, waits_for=may_start)
    if left := _left(component, seen, number):
        return msgspec.structs.replace(stage, number=None, waits_for=f"{left} to end")
    return msgspec.structs.replace(stage, number=number, retry_at=None)


def _left(component: str, seen: Seen, number: int) -> str:
    """Something of another attempt that still runs, or may."""
    jobs = seen.prepare_jobs if component == "prepare" else seen.trainer_jobs
    for attempt, job in sorted(jobs.items()):
        if attempt != number and not objects.finished(job):
            return objects.name_of(job)
    mine = {objects.name_of(pod) for pod in seen.pods_of_attempt(component, number)}
    others = (pod for pod in seen.of(component) if objects.name_of(pod) not in mine)
    return next((objects.name_of(pod) for pod in others if not objects.ended(pod)), "")


# ── how it ended ──


def end_of(component: str, pods: list[Object], job: Object, step: int, disrupted: str = "") -> End:
    """The end of an attempt, from its pods: a refusal explains more than a crash, a crash more than a kill."""
    refused = any(end["exitCode"] == EXIT_USER_ERROR for _, end in _ends(pods))
    disrupted = next((text for pod in pods if (text := trouble.disruption(pod))), disrupted)
    if disrupted and not refused:
        return End(component=component, code=_LOST, how=disrupted, disrupted=True, step=step)
    if objects.complete(job):
        how = "it was told to stop before it had finished"
        return End(component=component, code=0, how=how, step=step)
    ends = sorted(_ends(pods), key=lambda item: _rank(item[1]))
    if not ends:
        why = objects.condition(job, "Failed").get("message") or "no pod of it is left"
        how = next((text for pod in pods if (text := _own_words(pod))), f"its pod is gone: {why}")
        return End(component=component, code=_LOST, how=how, step=step)
    _, end = ends[0]
    how = trouble.how(end) if end.get("reason") == "OOMKilled" else ""
    lines = trouble.last_lines(end)
    return End(component=component, code=int(end["exitCode"]), how=how, lines=lines, step=step)


def _ends(pods: list[Object]) -> list[tuple[str, dict[str, Any]]]:
    found = [
        (objects.name_of(pod), end)
        for pod in pods
        for status in objects.container_statuses(pod)
        if (end := trouble.last_end(status)) is not None
    ]
    return [(pod, end) for pod, end in found if end.get("exitCode")]


def _rank(end: dict[str, Any]) -> tuple[int, str]:
    code = int(end["exitCode"])
    kind = {EXIT_USER_ERROR: 0, EXIT_FENCED: 1}.get(code, 4 if code > 128 else 3)
    if end.get("reason") == "OOMKilled":
        kind = 2
    return kind, str(end.get("finishedAt", ""))


def _own_words(pod: Object) -> str:
    status = objects.status_of(pod)
    if not status.get("reason"):
        return ""
    return f"{objects.name_of(pod)}: {status['reason']}: {status.get('message', '')}".rstrip(": ")
