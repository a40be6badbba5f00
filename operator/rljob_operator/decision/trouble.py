"""Why a pod is not ready, in the words of whoever refuses it: kubelet, scheduler, API server, provisioner.

| seen at | reason |
| --- | --- |
| a container waits with ErrImagePull, ImagePullBackOff, InvalidImageName … | ErrImagePull |
| a container waits with CreateContainerConfigError … | CreateContainerConfigError |
| it is evicted, preempted, its node drained | Disrupted |
| a container was killed for memory | OOMKilled |
| a container ended and is started again | Crashed, with its last line |
| a volume claim is not bound, a mount fails | VolumePending |
| the scheduler finds no node | Unschedulable |
| Kueue's gate is on the pod | Queued |
| the API server refuses the pod | QuotaExceeded, FailedCreate |
| the API server refuses the Job, StatefulSet, pool itself | ApplyFailed, NameCollision, PermissionDenied |

Messages hold nothing that changes while nothing happens (ages, counts, random names), or the status would be written
again and again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from rljob.api import conditions
from rljob_operator.decision import objects
from rljob_operator.decision.times import to_seconds
from rljob_operator.observed import Object

_IMAGE = {
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
}  # fmt: skip
_CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
_SIGNALLED = 128
_LAST_LINES = 5


class Trouble(NamedTuple):
    """A reason (of `rljob.api.conditions`) and a sentence."""

    reason: str
    message: str


# ── containers ──


def of_pod(pod: Object) -> Trouble | None:
    """What is wrong with a pod, by its own status; None where it may just be on its way."""
    if text := disruption(pod):
        return Trouble(conditions.REASON_DISRUPTED, text)
    for status in objects.container_statuses(pod):
        if trouble := _of_container(objects.name_of(pod), status):
            return trouble
    if objects.status_of(pod).get("phase") == "Failed" and (
        why := objects.status_of(pod).get("reason")
    ):
        text = objects.status_of(pod).get("message") or "no more is known"
        return Trouble(conditions.REASON_CRASHED, f"{objects.name_of(pod)}: {why}: {text}")
    return _of_scheduler(pod)


def disruption(pod: Object) -> str:
    """Its node is drained, it is preempted or evicted: whose words, or empty."""
    found = objects.condition(pod, "DisruptionTarget")
    if found.get("status") != "True":
        return ""
    return f"{objects.name_of(pod)}: {found.get('message') or found.get('reason', 'disrupted')}"


def _of_container(pod: str, status: dict[str, Any]) -> Trouble | None:
    state = status.get("state") or {}
    waiting = state.get("waiting") or {}
    why, text = waiting.get("reason", ""), waiting.get("message") or ""
    if why in _IMAGE:
        detail = re.sub(r'^Back-off pulling image "[^"]*"(: ErrImagePull: )?', "", text)
        kind = "" if why in {"ErrImagePull", "ImagePullBackOff"} else f"{why}: "
        said = f"image {status.get('image', '')}: {kind}{detail or 'cannot be pulled'}"
        return Trouble(conditions.REASON_IMAGE, f"{pod}: {said}")
    if why in _CONFIG and not (why == "RunContainerError" and last_end(status)):
        return Trouble(conditions.REASON_CONFIG, f"{pod}: container {status['name']}: {text}")
    end = last_end(status)
    if end is None or status.get("ready") or end.get("exitCode") == 0:
        return None
    reason = (
        conditions.REASON_OUT_OF_MEMORY
        if end.get("reason") == "OOMKilled"
        else conditions.REASON_CRASHED
    )
    said = last_line(end)
    text = f"{pod}: {status['name']} ended: {how(end)}" + (f": {said}" if said else "")
    return Trouble(reason, text)


def last_end(status: dict[str, Any]) -> dict[str, Any] | None:
    """How a container ended last, if it ever did."""
    for state in (status.get("state") or {}, status.get("lastState") or {}):
        if end := state.get("terminated"):
            return end
    return None


def how(end: dict[str, Any]) -> str:
    """How it ended, in a few words."""
    if end.get("reason") == "OOMKilled":
        return "OOMKilled, it used more memory than its limit"
    code = int(end.get("exitCode", -1))
    return f"killed by signal {code - _SIGNALLED}" if code > _SIGNALLED else f"exit code {code}"


def last_lines(end: dict[str, Any]) -> tuple[str, ...]:
    """The last lines of what it said."""
    lines = [line.strip() for line in str(end.get("message") or "").splitlines()]
    return tuple([line for line in lines if line][-_LAST_LINES:])


def last_line(end: dict[str, Any]) -> str:
    """The last line of what it said."""
    lines = last_lines(end)
    return lines[-1] if lines else ""


# ── scheduler, volumes, API server ──


def _of_scheduler(pod: Object) -> Trouble | None:
    scheduled = objects.condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return None
    if scheduled.get("reason") == "SchedulingGated":
        return Trouble(conditions.REASON_QUEUED, "queued by Kueue")
    text = re.sub(r"\s*preemption: .*$", "", scheduled.get("message") or "not scheduled yet")
    return Trouble(conditions.REASON_UNSCHEDULABLE, f"{objects.name_of(pod)}: {text}")


def unbound(trouble: Trouble) -> bool:
    """The scheduler waits for a volume: the provisioner's words say more."""
    return trouble.reason == conditions.REASON_UNSCHEDULABLE and "unbound" in trouble.message


def of_claims(
    claims: Iterable[Object], warnings: Iterable[Object], *, even_without_words: bool
) -> Trouble | None:
    """A volume claim that is not bound."""
    for claim in claims:
        if objects.status_of(claim).get("phase") == "Bound":
            continue
        name = objects.name_of(claim)
        text = warning_text(warnings, {("PersistentVolumeClaim", name)}, None)
        if not text and not even_without_words:
            continue
        kind = (claim.get("spec") or {}).get("storageClassName")
        default = f"is not bound (StorageClass {kind or 'not given, and no default'})"
        return Trouble(conditions.REASON_VOLUME, f"volume {name}: {text or default}")
    return None


def of_unbound(pod: Object, warnings: Iterable[Object]) -> Trouble:
    """A pod that waits for volumes which are not the job's own: the scheduler does not say which."""
    volumes = (pod.get("spec") or {}).get("volumes") or []
    names = [
        str(claim["claimName"])
        for volume in volumes
        if (claim := volume.get("persistentVolumeClaim"))
    ]
    owners = {("PersistentVolumeClaim", name) for name in names}
    said = warning_text(warnings, owners, None) or "not all of them are bound"
    text = f"{objects.name_of(pod)} waits for its volumes ({', '.join(names)}): {said}"
    return Trouble(conditions.REASON_VOLUME, text)


def of_mounts(
    pods: Iterable[Object], warnings: Iterable[Object], since_seconds: float
) -> Trouble | None:
    """A scheduled pod whose volumes cannot be mounted."""
    for pod in pods:
        name = objects.name_of(pod)
        text = warning_text(
            warnings,
            {("Pod", name)},
            lambda reason: reason in {"FailedMount", "FailedAttachVolume"},
            since_seconds,
        )
        if text:
            return Trouble(conditions.REASON_VOLUME, f"{name}: {text}")
    return None


def of_creation(
    owners: Collection[tuple[str, str]], warnings: Iterable[Object], since_seconds: float
) -> Trouble | None:
    """The API server refuses pods of these owners (kind, name)."""
    text = warning_text(warnings, owners, lambda reason: reason == "FailedCreate", since_seconds)
    if not text:
        return None
    quota = "exceeded quota" in text or "failed quota" in text
    reason = conditions.REASON_QUOTA if quota else conditions.REASON_FAILED_CREATE
    return Trouble(reason, f"{sorted(owners)[0][1]}: {text}")


REFUSED = {
    conditions.REASON_APPLY_FAILED,
    conditions.REASON_NAME_COLLISION,
    conditions.REASON_PERMISSION_DENIED,
}
"""What the operator itself was answered when it wrote a child."""


def of_refusals(owners: Collection[tuple[str, str]], warnings: Iterable[Object]) -> Trouble | None:
    """The API server refuses these children (kind, name) themselves."""
    for event in warnings:
        if event.get("reason") in REFUSED and _about(event) in owners:
            return _refused(event)
    return None


def of_other_refusals(warnings: Iterable[Object]) -> Trouble | None:
    """It refuses a child that no role waits for by name: a policy, a file, a volume; or the job cannot be rendered."""
    for event in warnings:
        if event.get("reason") in REFUSED and _about(event)[0] not in _WORKLOADS:
            return _refused(event)
    return None


_WORKLOADS = {"Job", "StatefulSet", "SandboxPool"}


def _refused(event: Object) -> Trouble:
    kind, name = _about(event)
    return Trouble(str(event["reason"]), f"{kind} {name}: {event.get('message', '')}")


_PREFIXES = (
    r"^Error creating: ",
    r"^create Pod \S+ in StatefulSet \S+ failed error: ",
    r'^pods "[^"]*" is forbidden: ',
)


def warning_text(
    warnings: Iterable[Object],
    owners: Collection[tuple[str, str]],
    wanted: Callable[[str], bool] | None,
    since_seconds: float = 0.0,
) -> str:
    """The newest warning of one of `owners` since then, without what changes from try to try."""
    found = [
        (when, event)
        for event in warnings
        if _about(event) in owners
        and (wanted is None or wanted(str(event.get("reason", ""))))
        and (when := _when(event)) >= since_seconds
    ]
    if not found:
        return ""
    text = str(max(found, key=lambda item: item[0])[1].get("message") or "")
    for prefix in _PREFIXES:
        text = re.sub(prefix, "", text)
    return " ".join(text.split())


def _about(event: Object) -> tuple[str, str]:
    about = event.get("involvedObject") or {}
    return str(about.get("kind", "")), str(about.get("name", ""))


def _when(event: Object) -> float:
    series = event.get("series") or {}
    texts = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return next((when for text in texts if (when := to_seconds(text)) is not None), 0.0)
