"""GPUs of a job: how many it asks for, and what a pod that asks for some must tolerate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rljob.api.rljob_types import RLJob
from rljob.errors import ManifestError
from rljob_operator.render.quantities import parse


def requested(job: RLJob, rollouts: int | None = None) -> int:
    """GPUs that the job asks for with that many rollout pods; without a number, with `rollout.replicas`."""
    spec = job.spec
    pods = spec.rollout.replicas if rollouts is None else rollouts
    trainer = spec.trainer.replicas * _count(spec.trainer.resources) if spec.mode == "train" else 0
    return (
        pods * (_count(spec.rollout.engine.resources) + _count(spec.rollout.worker.resources))
        + trainer
    )


def names(resources: Iterable[Mapping[str, Any]]) -> list[str]:
    """GPU resources (nvidia.com/gpu, amd.com/gpu …) that some resource requirements name."""
    found = {name for item in resources for part in _amounts(item) for name in part if is_gpu(name)}
    return sorted(found)


def tolerations(resources: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """GPU nodes are tainted with the name of their GPUs, so that only pods that ask for some land there."""
    return [
        {"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in names(resources)
    ]


def is_gpu(name: str) -> bool:
    """Whether a resource is a GPU."""
    return name.endswith("/gpu")


def _count(resources: Mapping[str, Any]) -> int:
    amounts: dict[str, Any] = {}
    for part in _amounts(resources):
        amounts |= {name: value for name, value in part.items() if is_gpu(name)}
    try:
        return sum(int(parse(value, name)[0]) for name, value in amounts.items())
    except ManifestError:
        return 0  # the manifest is refused elsewhere, with the path


def _amounts(resources: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Requests, then limits."""
    for key in ("requests", "limits"):
        if isinstance(part := resources.get(key), Mapping):
            yield part
