"""What a pod's status means for its sandbox, and how long it is waited for. Pure."""

from __future__ import annotations

from typing import Any

from rljob.kube.resources import Object
from rljob_sandbox_pool.runtimes.base import Trouble

CAPACITY_LIMITED = "CapacityLimited"
"""No node has room for it."""
IMAGE_UNAVAILABLE = "ImageUnavailable"
"""An image of it cannot be pulled."""
CONTAINER_FAILED = "ContainerNotCreated"
"""The node refuses to make its container."""
POD_NOT_MADE = "PodNotMade"
"""The node makes none of its containers: it has no such runtime, no network, no user namespaces."""
SANDBOX_SECONDS = 30.0
"""A pod that has a node gets its address within seconds, before any image is pulled; after so long it is a trouble."""
NODE_SECONDS = 60.0
"""A pod is replaced whose node was in trouble with it for so long: another node may not be."""
UP_SECONDS = 600.0
"""A pod that does not run after so long is replaced, unless it waits for a node with room."""
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONTAINER_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_EXIT_WORDS = {3: "the claim's time to live is over"}
"""Exit codes of the guest (`guest.main`)."""


def _status(pod: Object) -> dict[str, Any]:
    return pod.get("status") or {}


def _containers(pod: Object) -> list[dict[str, Any]]:
    status = _status(pod)
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _condition(pod: Object, kind: str) -> dict[str, Any]:
    conditions = _status(pod).get("conditions") or []
    return next((each for each in conditions if each.get("type") == kind), {})


def node_of(pod: Object) -> str:
    """The node that has it; empty: none."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def is_scheduled(pod: Object) -> bool:
    """A node has it."""
    return bool(node_of(pod))


def fate(pod: Object) -> str:
    """How it ended or ends; empty: it has not."""
    status = _status(pod)
    if status.get("phase") in ("Failed", "Succeeded"):
        words = [str(status[key]) for key in ("reason", "message") if status.get(key)]
        return ": ".join([*words, *_terminations(pod)])[:1000] or f"the pod is {status['phase']}"
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return "the pod is being deleted"
    return ""


def _terminations(pod: Object) -> list[str]:
    found: list[str] = []
    for container in _containers(pod):
        ended = (container.get("state") or {}).get("terminated")
        if not ended or ended.get("exitCode") == 0:
            continue
        code = ended.get("exitCode")
        words = ended.get("message") or _EXIT_WORDS.get(code, "")
        reason = ended.get("reason") or ""
        found.append(f"container {container['name']}: exit code {code} {reason} {words}".strip())
    return found


def trouble(pod: Object) -> Trouble | None:
    """What it waits for although nothing is on its way."""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        message = str(scheduled.get("message") or scheduled.get("reason") or "no node takes it")
        return Trouble(CAPACITY_LIMITED, message[:1000])
    for container in _containers(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason") or ""
        words = str(waiting.get("message") or "")
        if reason in _IMAGE_REASONS:
            # The kubelet changes between two reasons with every try: the message stays the same here.
            kind = "ErrImagePull" if reason == "ImagePullBackOff" else reason
            words = words.rpartition("ErrImagePull: ")[2]
            return Trouble(IMAGE_UNAVAILABLE, f"{kind}: {container.get('image')}: {words}"[:1000])
        if reason in _CONTAINER_REASONS:
            return Trouble(CONTAINER_FAILED, f"{reason}: {words}"[:1000])
    return None


class Patience:
    """How long a pod is waited for: for ever, as long as no node has room for it.

    Args:
        now: Monotonic, like all times here.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._placed_at: float | None = None
        self._troubled_at: float | None = None

    def trouble(self, pod: Object, now: float) -> Trouble | None:
        """What it waits for although nothing is on its way."""
        if not is_scheduled(pod):
            return trouble(pod)
        if self._placed_at is None:
            self._placed_at = now
        if (found := trouble(pod)) or _status(pod).get("podIP"):
            return found
        # Its node fails to make what all its containers share: network, user namespace, runtime.
        if now - self._placed_at < SANDBOX_SECONDS:
            return None
        words = f"a pod has a node and no address for {SANDBOX_SECONDS:.0f} s; its events say why"
        return Trouble(POD_NOT_MADE, words)

    def over(self, pod: Object, now: float) -> str:
        """Why it is not waited for any longer; empty: it is. Asked every few seconds."""
        found = self.trouble(pod, now)
        if found is None:
            self._troubled_at = None
        elif found.reason == CAPACITY_LIMITED:
            self._began, self._troubled_at = now, None
        elif self._troubled_at is None:
            self._troubled_at = self._placed_at if found.reason == POD_NOT_MADE else now
        if found and self._troubled_at is not None and now - self._troubled_at >= NODE_SECONDS:
            return f"{found.message} (node {node_of(pod)})"
        if now - self._began < UP_SECONDS:
            return ""
        return f"not up after {UP_SECONDS:.0f} s: {found.message if found else 'it does not run'}"
