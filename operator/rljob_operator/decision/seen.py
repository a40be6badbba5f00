"""What was observed, sorted by role: Jobs by attempt, pods by component, pools, volumes."""

from __future__ import annotations

import re

import msgspec

from rljob import labels
from rljob_operator.decision.objects import ended, gpus, label, name_of
from rljob_operator.observed import ChildKey, Object, Observed

JOB_NAME = "batch.kubernetes.io/job-name"
"""Label that the Job controller puts on its pods."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    name: str
    """Of the RLJob."""
    store_set: Object | None
    rollout_set: Object | None
    prepare_jobs: dict[int, Object]
    """By attempt; those being deleted included."""
    trainer_jobs: dict[int, Object]
    """Also the collector's."""
    pools: list[Object]
    claims: dict[str, Object]
    pods: dict[str, list[Object]]
    """By component."""
    warnings: tuple[Object, ...]

    def of(self, component: str) -> list[Object]:
        """Pods of a component, in the order of their names."""
        return self.pods.get(component, [])

    def pods_of_attempt(self, component: str, attempt: int) -> list[Object]:
        """Pods of one Job."""
        job = f"{self.name}-{component}-{attempt}"
        return [pod for pod in self.of(component) if job in (label(pod, JOB_NAME), _bylabel(pod))]

    def gpus(self) -> int:
        """GPUs that pods of the job ask for."""
        return sum(gpus(pod) for pods in self.pods.values() for pod in pods if not ended(pod))


def see(observed: Observed) -> Seen:
    """Sort."""
    name = observed.resource["metadata"]["name"]
    children = observed.children
    pods: dict[str, list[Object]] = {}
    for pod in sorted(observed.pods, key=name_of):
        pods.setdefault(label(pod, labels.COMPONENT), []).append(pod)
    return Seen(
        name=name,
        store_set=children.get(ChildKey("StatefulSet", f"{name}-store")),
        rollout_set=children.get(ChildKey("StatefulSet", f"{name}-rollout")),
        prepare_jobs=_attempts(children, f"{name}-prepare"),
        trainer_jobs=_attempts(children, f"{name}-trainer"),
        pools=[child for key, child in sorted(children.items()) if key.kind == "SandboxPool"],
        claims={
            key.name: child
            for key, child in sorted(children.items())
            if key.kind == "PersistentVolumeClaim"
        },
        pods=pods,
        warnings=observed.warnings,
    )


def _attempts(children: dict[ChildKey, Object], prefix: str) -> dict[int, Object]:
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    found = (
        (pattern.fullmatch(key.name), child) for key, child in children.items() if key.kind == "Job"
    )
    return {int(match[1]): child for match, child in found if match}


def _bylabel(pod: Object) -> str:
    """The Job's name by our own labels."""
    job, component = label(pod, labels.JOB), label(pod, labels.COMPONENT)
    return f"{job}-{component}-{label(pod, labels.ATTEMPT)}"
