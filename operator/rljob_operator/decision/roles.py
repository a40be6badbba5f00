"""Whether each role is up, and if not, why: one condition per role.

| role | is ready when |
| --- | --- |
| store | the job's Valkey has a ready pod; a Redis of one's own answers |
| sandboxes | every pool says Ready, or hands out sandboxes |
| rollouts | as many rollout pods as are wanted are ready (engine, gateway, worker); one is enough to be usable |
| trainer | every pod of the present attempt is ready |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rljob import labels
from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob_operator.decision import objects, trouble
from rljob_operator.decision.seen import Seen
from rljob_operator.decision.trouble import Trouble
from rljob_operator.observed import LedgerView, Object

_SKEW_SECONDS = 10.0
"""Between our clock and that of whoever writes Events."""


class Role(NamedTuple):
    """A role at one moment."""

    name: str
    kind: str
    """Its condition."""
    ready: bool
    reason: str
    message: str
    usable: bool = False
    """Not all of it is ready, but enough to do its work."""

    @property
    def words(self) -> str:
        """What is awaited, in one piece."""
        return self.message or self.reason


def own_store(job: RLJob) -> bool:
    """The operator runs a Valkey for the job."""
    redis = job.spec.store.redis
    return redis.url is None and redis.secret_ref is None


def store(job: RLJob, seen: Seen, ledger: LedgerView, since: float) -> Role:
    """The ledger's store."""
    if not own_store(job):
        if ledger.error:
            where = "spec.store.redis: " + ledger.error
            return _down(
                "store", conditions.STORE_READY, Trouble(conditions.REASON_UNREACHABLE, where)
            )
        return _up("store", conditions.STORE_READY)
    pods = seen.of("store")
    if any(objects.ready(pod) for pod in pods):
        # its pod is what the job needs; that the operator cannot ask it is worth a word
        said = f"the operator cannot ask it: {ledger.error}" if ledger.error else ""
        return _up("store", conditions.STORE_READY)._replace(message=said)
    why = _why(
        seen, pods, {("StatefulSet", f"{seen.name}-store")}, 1, [f"{seen.name}-store"], since
    )
    return _down("store", conditions.STORE_READY, why)


def sandboxes(job: RLJob, seen: Seen) -> Role:
    """All pools of the job."""
    found = {objects.name_of(pool): pool for pool in seen.pools if not objects.deleting(pool)}
    for pool in job.spec.sandbox_pools:
        child = found.get(labels.pool_name(seen.name, pool.name))
        if child is None:
            named = {("SandboxPool", labels.pool_name(seen.name, pool.name))}
            if refused := trouble.of_refusals(named, seen.warnings):
                return _down("sandboxes", conditions.SANDBOXES_READY, refused)
            words = f"pool {pool.name}: not made yet"
            return _down(
                "sandboxes", conditions.SANDBOXES_READY, Trouble(conditions.REASON_STARTING, words)
            )
        if not _serves(child, pool.warm):
            return _down("sandboxes", conditions.SANDBOXES_READY, _pool_trouble(pool.name, child))
    return _up("sandboxes", conditions.SANDBOXES_READY)


def _serves(pool: Object, warm: int) -> bool:
    status = objects.status_of(pool)
    if objects.holds(pool, "Ready") or status.get("claimed", 0) > 0:
        return True
    return status.get("ready", 0) > 0 or (warm == 0 and not objects.holds(pool, "Degraded"))


def _pool_trouble(name: str, pool: Object) -> Trouble:
    for kind, bad in (("Degraded", "True"), ("Ready", "False")):
        found = objects.condition(pool, kind)
        if found.get("status") == bad and found.get("message"):
            reason = found.get("reason") or conditions.REASON_STARTING
            return Trouble(str(reason), f"pool {name}: {found['message']}")
    return Trouble(conditions.REASON_STARTING, f"pool {name}: no sandbox is ready yet")


def rollouts(seen: Seen, wanted: int | None, since: float) -> Role:
    """Rollout pods, engine, gateway and worker in each."""
    pods = [pod for pod in seen.of("rollout") if not objects.deleting(pod)]
    ready = [pod for pod in pods if objects.ready(pod)]
    kind = conditions.ROLLOUTS_READY
    if not wanted:
        return _down("rollouts", kind, Trouble(conditions.REASON_WAITING, "waits for the store"))
    if len(ready) >= wanted:
        return _up("rollouts", kind)
    rest = [pod for pod in pods if not objects.ready(pod)]
    why = _why(
        seen,
        rest,
        {("StatefulSet", f"{seen.name}-rollout")},
        wanted - len(ready),
        [f"{seen.name}-artifacts"],
        since,
    )
    if not ready:
        return _down("rollouts", kind, why)
    message = f"{len(ready)} of {wanted} pods are ready; {why.message}"
    return Role("rollouts", kind, False, conditions.REASON_PARTLY_READY, message, usable=True)


def job_pods(seen: Seen, component: str, attempt: int, job: Object | None, since: float) -> Role:
    """The pods of one prepare, trainer or collector Job."""
    kind = conditions.PREPARED if component == "prepare" else conditions.TRAINER_READY
    pods = seen.pods_of_attempt(component, attempt)
    wanted = int(((job or {}).get("spec") or {}).get("parallelism") or 1)
    if job is not None and objects.held(job):
        words = f"attempt {attempt} is queued by Kueue"
        return _down(component, kind, Trouble(conditions.REASON_QUEUED, words))
    if sum(objects.ready(pod) for pod in pods) >= wanted:
        return _up(component, kind)
    rest = [pod for pod in pods if not objects.ready(pod)]
    owner = {("Job", f"{seen.name}-{component}-{attempt}")}
    why = _why(
        seen, rest, owner, wanted - (len(pods) - len(rest)), [f"{seen.name}-artifacts"], since
    )
    return _down(component, kind, why)


def _up(name: str, kind: str) -> Role:
    return Role(name, kind, True, conditions.REASON_READY, "")


def _down(name: str, kind: str, why: Trouble) -> Role:
    return Role(name, kind, False, why.reason, why.message)


def _why(
    seen: Seen,
    pods: Sequence[Object],
    owners: set[tuple[str, str]],
    wanted: int,
    claims: Sequence[str],
    since: float,
) -> Trouble:
    """The first trouble that can be named, else what a start looks like."""
    troubles = [found for pod in pods if (found := trouble.of_pod(pod))]
    mine = [seen.claims[name] for name in claims if name in seen.claims]
    first = troubles[0] if troubles else None
    if first is not None and first.reason != conditions.REASON_UNSCHEDULABLE:
        return first
    after = since - _SKEW_SECONDS
    waits = first is not None and trouble.unbound(first)
    return (
        trouble.of_refusals(owners, seen.warnings)
        or trouble.of_claims(mine, seen.warnings, even_without_words=waits)
        or (
            trouble.of_unbound(_first_with(pods, first), seen.warnings)
            if first and waits
            else first
        )
        or (trouble.of_creation(owners, seen.warnings, after) if len(pods) < wanted else None)
        or trouble.of_mounts(pods, seen.warnings, after)
        or _starting(pods, owners)
    )


def _first_with(pods: Sequence[Object], found: Trouble) -> Object:
    return next(pod for pod in pods if trouble.of_pod(pod) == found)


def _starting(pods: Sequence[Object], owners: set[tuple[str, str]]) -> Trouble:
    if not pods:
        kind, name = sorted(owners)[0]
        return Trouble(conditions.REASON_STARTING, f"{kind} {name} has no pod yet")
    pod = pods[0]
    statuses: list[dict[str, Any]] = list(objects.container_statuses(pod))
    waiting = [str(status["name"]) for status in statuses if not _passed(status)]
    what = f"waits for {', '.join(waiting)}" if waiting else "starts"
    return Trouble(conditions.REASON_STARTING, f"{objects.name_of(pod)} {what}")


def _passed(status: dict[str, Any]) -> bool:
    ended = (status.get("state") or {}).get("terminated") or {}
    return bool(status.get("ready")) or ended.get("exitCode") == 0
