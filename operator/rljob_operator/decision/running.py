"""A job that shall run: Pending → Preparing → Running → Succeeded or Failed.

store ready ─► prepare Job ─► pools, rollouts, trainer together ─► trainer Job complete, ledger says Succeeded
"""

from __future__ import annotations

import re

from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob_operator.decision import attempt, ending, refusals, roles, scale, trouble
from rljob_operator.decision.attempt import Stage
from rljob_operator.decision.case import SOON_SECONDS, Case
from rljob_operator.decision.roles import Role
from rljob_operator.decision.times import to_text
from rljob_operator.observed import Decision, Shape
from rljob_operator.policies import deadlines
from rljob_operator.policies.placement import Placed, overdue
from rljob_operator.policies.progress import Progress, Told, blame
from rljob_operator.policies.restart import Action

LOOK_SECONDS = 5.0
"""Between looks at the ledger of a running job."""
IDLE_SECONDS = 30.0
"""Between looks at one that is being prepared: changes wake it."""


def running(case: Case, job: RLJob) -> Decision:
    """One pass."""
    draft = case.draft
    draft.set(conditions.SUSPENDED, False, conditions.REASON_RUNNING)
    since = draft.since(conditions.SUSPENDED)
    draft.fields.setdefault("startTime", to_text(case.now))
    case.count(job)
    store = roles.store(job, case.seen, case.ledger, since)
    case.state(store)
    limit = job.spec.lifecycle.active_deadline_seconds
    if deadlines.passed(since, limit, case.now) and not ending.has_succeeded(case):
        text = f"it ran for longer than spec.lifecycle.activeDeadlineSeconds ({limit} s)"
        return case.fail(conditions.REASON_ACTIVE_DEADLINE, text)
    if draft.holds(conditions.PREPARED):
        return _working(case, job, store, since)
    return _preparing(case, job, store, since)


# ── prepare ──


def _preparing(case: Case, job: RLJob, store: Role, since: float) -> Decision:
    draft = case.draft
    stage = _look(case, job, "prepare", store, step=0)
    if stage.complete:
        draft.set(conditions.PREPARED, True, conditions.REASON_DONE)
        return _working(case, job, store, since)
    if stage.decision is not None and stage.decision.action is Action.FAIL:
        return case.fail(stage.decision.reason, stage.decision.message)
    role = _attempt_role(case, "prepare", stage, since)
    case.state(role)
    for kind in (conditions.SANDBOXES_READY, conditions.ROLLOUTS_READY, conditions.TRAINER_READY):
        draft.set(kind, False, conditions.REASON_WAITING, "waits for prepare")
    begun = bool(stage.number or stage.attempts.attempt)
    shape = Shape(store=roles.own_store(job), prepare_attempt=stage.number)
    # in a queue it holds nothing that others could use
    queued = role.reason == conditions.REASON_QUEUED
    started = any(_up(pod) for pod in case.seen.of("prepare"))
    waiting = [] if queued or started else [store, role]
    phase = conditions.PHASE_PREPARING if begun else conditions.PHASE_PENDING
    longest = IDLE_SECONDS if store.ready else LOOK_SECONDS
    return _answer(case, job, shape, phase, [store, role], waiting, stage, since, longest)


def _up(pod: dict[str, object]) -> bool:
    status = pod.get("status")
    return isinstance(status, dict) and status.get("phase") in {"Running", "Succeeded"}


# ── pools, rollouts, trainer ──


def _working(case: Case, job: RLJob, store: Role, since: float) -> Decision:
    draft, seen = case.draft, case.seen
    since = max(since, draft.since(conditions.PREPARED))
    snapshot = case.ledger.snapshot
    step = max(int(draft.fields.get("step", 0)), snapshot.step if snapshot else 0)
    stage = _look(case, job, "trainer", store, step=step)
    if (verdict := ending.verdict(case, job, stage)) is not None:
        return verdict
    stage = ending.unfinished(case, job, stage, step)
    _remember(case, job, "trainer", stage)
    if stage.decision is not None and stage.decision.action is Action.FAIL:
        return case.fail(stage.decision.reason, stage.decision.message)
    if (refusal := refusals.refusal(case, job)) is not None:
        return case.fail(*refusal)
    wanted = scale.wanted(case, job, store.ready)
    parts = [
        store,
        roles.sandboxes(job, seen),
        roles.rollouts(seen, wanted, since),
        _attempt_role(case, "trainer", stage, since, title(job)),
    ]
    for role in parts[1:]:
        case.state(role)
    if all(role.ready or role.usable for role in parts):
        draft.fields.setdefault("readyTime", to_text(case.now))
    if parts[2].ready or parts[2].usable:
        draft.fields["rollouts"].setdefault("firstReadyTime", to_text(case.now))
    written = draft.was(conditions.PREPARED).get("status") == "True"
    shape = Shape(
        store=roles.own_store(job),
        prepare_attempt=None if written else _number(case, "prepare"),
        pools=True,
        rollouts=wanted,
        trainer_attempt=stage.number,
    )
    waiting = [] if draft.fields.get("readyTime") else parts
    phase = conditions.PHASE_RUNNING
    return _answer(case, job, shape, phase, parts, waiting, stage, since, LOOK_SECONDS)


def title(job: RLJob) -> str:
    """What takes the results, in people's words."""
    return "trainer" if job.spec.mode == "train" else "collector"


def _number(case: Case, component: str) -> int | None:
    number = case.draft.attempts(component).attempt
    return number if number in case.seen.prepare_jobs else None


# ── attempts ──


def _look(case: Case, job: RLJob, component: str, store: Role, step: int) -> Stage:
    draft = case.draft
    kind = conditions.PREPARED if component == "prepare" else conditions.TRAINER_READY
    stage = attempt.look(
        component,
        draft.attempts_before(component),
        draft.attempts(component),
        draft.retry_at(component),
        case.seen,
        step=step,
        backoff_limit=job.spec.lifecycle.backoff_limit,
        now=case.now,
        may_start="" if store.ready else "the store",
        title=f"the {title(job)}" if component == "trainer" else "preparing",
        disrupted=ending.disrupted(case, kind),
    )
    if component == "prepare":
        _remember(case, job, component, stage)
    return stage


def _remember(case: Case, job: RLJob, component: str, stage: Stage) -> None:
    """Keep the numbers; say so if an attempt ended."""
    case.draft.remember(component, stage.attempts, stage.retry_at)
    if stage.decision is None or stage.decision.action is Action.FAIL:
        return  # the end of the job says it
    name = title(job) if component == "trainer" else component
    case.draft.announce("Warning", conditions.REASON_ATTEMPT_ENDED, _ended(name, stage))


def _ended(name: str, stage: Stage) -> str:
    text = f"{name} attempt {stage.attempts.ended} ended"
    if stage.decision is None:
        return text
    said = stage.decision.message or stage.decision.reason
    return f"{text}: {said}"


def _attempt_role(case: Case, component: str, stage: Stage, since: float, name: str = "") -> Role:
    """How the present attempt is, or what the next one waits for."""
    kind = conditions.PREPARED if component == "prepare" else conditions.TRAINER_READY
    name, next_one = name or component, stage.attempts.ended + 1
    if stage.decision is not None:
        text = f"{_ended(name, stage)}; attempt {next_one} follows"
        return Role(name, kind, False, conditions.REASON_CRASHED, text)
    if stage.waits_for:
        old = case.draft.was(kind)
        if old.get("reason") == conditions.REASON_CRASHED:
            return Role(name, kind, False, conditions.REASON_CRASHED, old["message"])
        text = f"{name} attempt {next_one} waits for {stage.waits_for}"
        return Role(name, kind, False, conditions.REASON_WAITING, text)
    evicted = ending.disrupted(case, kind)
    if stage.complete and evicted:
        return Role(name, kind, False, conditions.REASON_DISRUPTED, evicted)
    if stage.complete:
        text = f"attempt {stage.attempts.attempt} has ended; waits for the ledger's word"
        return Role(name, kind, False, conditions.REASON_WAITING, text)
    number = stage.number or next_one
    role = roles.job_pods(case.seen, component, number, stage.job, since)
    if evicted and not role.ready and role.reason == conditions.REASON_STARTING:
        return Role(name, kind, False, conditions.REASON_DISRUPTED, evicted)  # until it is counted
    # prepare runs to its end: that its pod is ready says nothing
    ready = role.ready and component != "prepare"
    message = role.message or ("" if ready else f"attempt {number} is running")
    reason = conditions.REASON_STARTING if role.ready and not ready else role.reason
    return role._replace(name=name, ready=ready, reason=reason, message=message)


# ── deadlines ──


def _answer(
    case: Case,
    job: RLJob,
    shape: Shape,
    phase: str,
    parts: list[Role],
    waiting: list[Role],
    stage: Stage,
    since: float,
    longest: float,
) -> Decision:
    """The two deadlines that do not end a job, then the answer."""
    life = job.spec.lifecycle
    placed = [Placed(role.name, role.ready or role.usable, role.words) for role in waiting]
    late = overdue(placed, since, life.ready_deadline_seconds, case.now)
    stalled = _progress(case, parts, since, life.progress_deadline_seconds)
    refused = trouble.of_other_refusals(case.seen.warnings)
    if late:
        case.draft.set(conditions.PROGRESSING, False, conditions.REASON_READY_DEADLINE, late)
    elif refused is not None:
        case.draft.set(conditions.PROGRESSING, False, refused.reason, refused.message)
    down = "; ".join(f"{role.name}: {role.words}" for role in parts if not role.ready)
    began = case.draft.since(conditions.SUSPENDED)
    due = [
        stage.retry_at,
        case.now + SOON_SECONDS if stage.waits_for == attempt.UNWRITTEN else None,
        began + life.active_deadline_seconds if life.active_deadline_seconds else None,
        since + life.ready_deadline_seconds,
        (case.draft.progress_since() or since) + life.progress_deadline_seconds,
    ]
    return case.answer(
        shape,
        phase,
        late or (refused.message if refused else "") or stalled or down,
        due=due,
        longest=longest,
        suspend_because=late,
    )


def _progress(case: Case, parts: list[Role], since: float, deadline: float) -> str:
    """State whether it progresses; if not, whom it waits for."""
    draft, snapshot = case.draft, case.ledger.snapshot
    before = Progress(draft.progress_counter(), max(draft.progress_since() or 0.0, since))
    after = before.seen(snapshot.progress, case.now) if snapshot else before
    draft.remember_progress(after.counter, after.since_seconds)
    if not after.stalled(case.now, deadline):
        draft.set(conditions.PROGRESSING, True, conditions.REASON_PROGRESS)
        return ""
    reports = snapshot.reports if snapshot else {}
    told = {
        name: Told(report.waiting_for, report.age_seconds + case.ledger.age_seconds)
        for name, report in reports.items()
        if not _is_gone(case, name)
    }
    states = {role.name: "ready" if role.ready else f"not ready ({role.words})" for role in parts}
    text = f"no progress for more than {deadline:g} s: {blame(states, told)}"
    old = draft.was(conditions.PROGRESSING)
    if old.get("status") == "False" and _but_numbers(old["message"]) == _but_numbers(text):
        text = old["message"]  # ages grow; that is no news
    draft.set(conditions.PROGRESSING, False, conditions.REASON_PROGRESS_DEADLINE, text)
    return text


def _is_gone(case: Case, component: str) -> bool:
    """A worker of a rollout pod that was scaled away: its last report stays in the ledger."""
    role, _, index = component.rpartition("-")
    desired = (case.draft.fields.get("rollouts") or {}).get("desired", 0)
    return role == "worker" and index.isdigit() and int(index) >= desired


def _but_numbers(text: str) -> str:
    return re.sub(r"\d+", "", text)
