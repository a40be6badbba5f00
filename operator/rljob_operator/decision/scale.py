"""How many rollout pods there should be."""

from __future__ import annotations

from rljob.api.rljob_types import RLJob
from rljob_operator.decision.case import Case
from rljob_operator.observed import Object

_HPA_MANAGER = "kube-controller-manager"


def wanted(case: Case, job: RLJob, store_ready: bool) -> int | None:
    """None: none yet, the store comes first; else the number, also stated in the status."""
    sts = case.seen.rollout_set
    current = replicas_of(sts) if sts is not None else None
    desired = job.spec.rollout.replicas
    case.draft.fields["rollouts"]["desired"] = desired
    if not store_ready and not current:
        return current
    return desired


def replicas_of(sts: Object) -> int:
    """spec.replicas; Kubernetes' own default is 1."""
    return int((sts.get("spec") or {}).get("replicas", 1))
