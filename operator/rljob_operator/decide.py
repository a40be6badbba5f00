"""What should be up of a job, and what its status says: one pure function.

    deletionTimestamp ─► deletion ─► (nothing is up, finalizer)
    Succeeded, Failed ─► ended ────► (nothing is up, ttl)
    faults ───────────► rejected ─► (left alone)
    spec.suspend ─────► suspending ► Suspending, Suspended
    else ─────────────► running ───► Pending, Preparing, Running, then Succeeded or Failed

Whatever must be remembered between two passes lies in the status, so that an operator may be killed at any moment:
attempt numbers, failures, deadlines' beginnings (the transition times of Suspended and Prepared), the progress
counter, the autoscaler's observations. The rest is read off the children each time.
"""

from __future__ import annotations

from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob_operator.decision import stopping
from rljob_operator.decision.accept import cluster_faults
from rljob_operator.decision.case import Case
from rljob_operator.decision.running import running
from rljob_operator.observed import ClusterConfig, Decision, Observed
from rljob_operator.parse import parse

_TERMINAL = {conditions.PHASE_SUCCEEDED, conditions.PHASE_FAILED}


def decide(observed: Observed, config: ClusterConfig) -> Decision:
    """See the module."""
    if observed.resource["metadata"].get("deletionTimestamp"):
        return stopping.deletion(observed)
    case = Case(observed)
    if case.draft.phase in _TERMINAL:
        return stopping.ended(case)
    job = parse(observed.resource)
    faults = job if isinstance(job, list) else _faults(case, job, config)
    if isinstance(job, list) or faults:
        return stopping.rejected(case, faults)
    case.draft.set(conditions.ACCEPTED, True, conditions.REASON_VALID)
    if job.spec.suspend:
        return stopping.suspending(case)
    return running(case, job)


def _faults(case: Case, job: RLJob, config: ClusterConfig) -> list[str]:
    """Rendering is tried once per generation: a newer operator's rules stop no job that runs."""
    before = case.draft.was(conditions.ACCEPTED)
    known = before.get("observedGeneration") == case.draft.generation
    return [] if known and before["status"] == "True" else cluster_faults(job, config)
