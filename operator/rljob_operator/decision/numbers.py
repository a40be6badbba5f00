"""What the ledger, the pools and the pods say in numbers, for the status.

Rounded, and left as they are while the ledger is silent: a quiet job's status does not change.
"""

from __future__ import annotations

from typing import Any

from rljob import labels
from rljob.api.rljob_types import RLJob
from rljob.ledger.types import LedgerSnapshot
from rljob_operator.decision import objects
from rljob_operator.decision.seen import Seen

_DIGITS = 4


def from_ledger(snapshot: LedgerSnapshot) -> dict[str, Any]:
    """Fields of the status, but for `rollouts`."""
    known: dict[str, Any] = {
        "step": snapshot.step,
        "policyVersion": snapshot.policy.version.n if snapshot.policy.version else None,
        "rewardMean": _rounded(snapshot.reward_mean),
        "backlog": snapshot.stream_entries,
        "staleness": _staleness(snapshot) or None,
    }
    if snapshot.validation:
        step = max(snapshot.validation)
        known["validation"] = {"step": step, "score": _rounded(snapshot.validation[step])}
    return {key: value for key, value in known.items() if value is not None}


def last_checkpoint(step: int, job: RLJob) -> int | None:
    """Newest step that is known to have a checkpoint: it is written before its step is committed."""
    trainer = job.spec.trainer
    if job.spec.mode != "train":
        return None
    last = step if step >= trainer.steps else step - step % trainer.checkpoint.every_steps
    return last or None


def episodes(snapshot: LedgerSnapshot) -> dict[str, Any]:
    """The ledger's part of `rollouts`."""
    counts = snapshot.counts
    completed, failed = counts.get("completed", 0), counts.get("failed", 0)
    known = {
        "completed": completed,
        "failed": failed,
        "running": counts.get("running", 0),
        "completionRate": _rounded(completed / (completed + failed))
        if completed + failed
        else None,
        "meanTurns": _rounded(snapshot.turns_recent, 2),
    }
    return {key: value for key, value in known.items() if value is not None}


def rollout_pods(seen: Seen) -> dict[str, Any]:
    """The cluster's part of `rollouts`."""
    pods = [pod for pod in seen.of("rollout") if not objects.deleting(pod)]
    return {
        "replicas": len(pods),
        "readyReplicas": sum(objects.ready(pod) for pod in pods),
        "selector": f"{labels.JOB}={seen.name},{labels.COMPONENT}=rollout",
    }


def sandboxes(seen: Seen) -> dict[str, int]:
    """Sums over the job's pools."""
    found = [objects.status_of(pool) for pool in seen.pools]
    return {
        "warm": sum(int(status.get("ready", 0)) for status in found),
        "claimed": sum(int(status.get("claimed", 0)) for status in found),
    }


def _staleness(snapshot: LedgerSnapshot) -> dict[str, Any]:
    if "mean" not in snapshot.staleness:
        return {}
    mean, oldest = snapshot.staleness["mean"], snapshot.staleness.get("max", 0)
    return {"mean": _rounded(mean), "max": int(oldest)}


def _rounded(value: float | None, digits: int = _DIGITS) -> float | None:
    return None if value is None else round(float(value), digits)
