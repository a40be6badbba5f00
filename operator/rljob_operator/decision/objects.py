"""Facts of one object as the API server gives it: any object, pods, Jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rljob_operator.decision.times import to_seconds
from rljob_operator.observed import Object

# ── any ──


def label(item: Object, key: str) -> str:
    """One of its labels; empty where it has none of that key."""
    return str((item["metadata"].get("labels") or {}).get(key, ""))


def name_of(item: Object) -> str:
    """metadata.name."""
    return str(item["metadata"]["name"])


def deleting(item: Object) -> bool:
    """It has a deletion timestamp."""
    return bool(item["metadata"].get("deletionTimestamp"))


def status_of(item: Object) -> dict[str, Any]:
    """Its status, which may be empty."""
    return item.get("status") or {}


def condition(item: Object, kind: str) -> dict[str, Any]:
    """A condition of its status; empty where it has none of that type."""
    found = (c for c in status_of(item).get("conditions") or [] if c.get("type") == kind)
    return next(found, {})


def holds(item: Object, kind: str) -> bool:
    """A condition is True."""
    return condition(item, kind).get("status") == "True"


# ── pods ──


def ended(pod: Object) -> bool:
    """All its containers have ended for good."""
    return status_of(pod).get("phase") in {"Succeeded", "Failed"}


def ready(pod: Object) -> bool:
    """It is ready and not being deleted."""
    return holds(pod, "Ready") and not deleting(pod)


def container_statuses(pod: Object) -> Iterator[dict[str, Any]]:
    """Of init containers (sidecars among them), then of the others."""
    status = status_of(pod)
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def gpus(pod: Object) -> int:
    """GPUs that a pod asks for."""
    spec = pod.get("spec") or {}
    containers: Iterable[Any] = [
        *(spec.get("initContainers") or []),
        *(spec.get("containers") or []),
    ]
    return sum(_gpus_of(container) for container in containers)


def _gpus_of(container: dict[str, Any]) -> int:
    resources = container.get("resources") or {}
    asked = (resources.get("limits") or {}) | (resources.get("requests") or {})
    value = str(asked.get("nvidia.com/gpu", "0"))
    return int(value) if value.isdigit() else 0


# ── Jobs ──


def complete(job: Object) -> bool:
    """All its pods ended well."""
    return holds(job, "Complete")


def failed(job: Object) -> bool:
    """It has failed and none of its pods runs any more."""
    return holds(job, "Failed")


def finished(job: Object) -> bool:
    """It is complete or has failed."""
    return complete(job) or failed(job)


def finished_at(job: Object) -> float | None:
    """When it was finished."""
    kind = "Complete" if complete(job) else "Failed"
    text = status_of(job).get("completionTime") or condition(job, kind).get("lastTransitionTime")
    return to_seconds(text)


def held(job: Object) -> bool:
    """Kueue holds it back: the Job is suspended, which we never do."""
    return bool((job.get("spec") or {}).get("suspend"))
