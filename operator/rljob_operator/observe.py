"""What the cluster holds of one job, put together for `decide`.

Jobs, Children (copies) ─ overlay of our own writes ─┐
Secret (read by name)   ─────────────────────────────┤
ledger (if its store can be asked) ──────────────────┼─► Observed
Warning Events (only while something is not ready) ──┤
refused writes ──────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob import labels
from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob.clock import Clock
from rljob.kube import resources
from rljob.kube.client import KubeClient
from rljob.kube.resources import name_of, namespace_of, uid_of
from rljob_operator.copies import Children
from rljob_operator.events import Warnings
from rljob_operator.expectations import Expectations
from rljob_operator.ledgers import Address, Ledgers
from rljob_operator.observed import LedgerView, Object, Observed
from rljob_operator.plan import key_of
from rljob_operator.render.secrets import decoded

SECRET_SECONDS = 60.0
"""How long a Secret that was read is believed."""
FINISHED = (conditions.PHASE_SUCCEEDED, conditions.PHASE_FAILED)


@dataclass
class State:
    """What the operator remembers of a job between passes. All of it can be lost."""

    expectations: Expectations = field(default_factory=Expectations)
    secrets: dict[str, tuple[float, Object | None]] = field(
        default_factory=dict[str, tuple[float, Object | None]]
    )
    """Name → (when it was read, what it was)."""
    status_written: float = float("-inf")
    status_unkept: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the API server did not keep of the status written last: writing it again would change nothing."""


class Observer:
    """Puts together what is known."""

    def __init__(
        self,
        client: KubeClient,
        children: Children,
        ledgers: Ledgers,
        warnings: Warnings,
        clock: Clock,
    ) -> None:
        self._client, self._children, self._clock = client, children, clock
        self._ledgers, self._warnings = ledgers, warnings

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._children.forget(uid)

    async def observe(self, resource: Object, job: RLJob | None, state: State) -> Observed:
        """One job now; `job` is None where its manifest is refused. Raises KubeError."""
        uid, namespace, name = uid_of(resource), namespace_of(resource), name_of(resource)
        secret = await self._secret(namespace, f"{name}-secrets", state)
        copy = dict(self._children.of(uid))
        if secret is not None:
            copy[key_of(secret)] = secret
        children = state.expectations.overlay(
            copy, self._children.told(uid), self._clock.monotonic()
        )
        pods = self._children.pods(uid)
        ledger = LedgerView()
        if job is not None:
            ledger = await self._ledger(resource, job, pods, secret, state)
        warnings: tuple[Object, ...] = ()
        if phase_of(resource) not in FINISHED and not_ready(children.values(), pods):
            everything = [*children.values(), *pods]
            uids = {uid_of(item) for item in everything}
            warnings = await self._warnings.of(namespace, uids, {key_of(it) for it in everything})
        return Observed(
            resource=resource,
            children=children,
            pods=pods,
            ledger=ledger,
            warnings=(*warnings, *state.expectations.warnings()),
            now_seconds=self._clock.now(),
        )

    async def address(
        self,
        resource: Object,
        job: RLJob,
        pods: Iterable[Object],
        secret: Object | None,
        state: State,
    ) -> Address | None:
        """Where the ledger can be asked; None where it cannot be now. Raises KubeError."""
        redis = job.spec.store.redis
        if redis.url is not None:
            return Address(redis.url, job.ledger_name)
        if redis.secret_ref is not None:
            ref = redis.secret_ref
            found = await self._secret(namespace_of(resource), ref.name, state)
            url = decoded(found).get(ref.key, "").strip() if found else ""
            return Address(url, job.ledger_name) if url else None
        host = _store_address(pods)
        password = decoded(secret).get("redis") if secret else None
        if not host or not password:
            return None
        return Address(f"redis://:{password}@{host}:{labels.STORE_PORT}/0", job.ledger_name)

    async def _ledger(
        self,
        resource: Object,
        job: RLJob,
        pods: Iterable[Object],
        secret: Object | None,
        state: State,
    ) -> LedgerView:
        uid = uid_of(resource)
        if phase_of(resource) in FINISHED:
            return self._ledgers.unasked(uid)
        address = await self.address(resource, job, pods, secret, state)
        if address is None:
            return self._ledgers.unasked(uid, _no_address(job))
        return await self._ledgers.view(uid, address)

    async def _secret(self, namespace: str, name: str, state: State) -> Object | None:
        now = self._clock.monotonic()
        read, secret = state.secrets.get(name, (float("-inf"), None))
        if secret is None or now - read > SECRET_SECONDS:
            secret = await self._client.find(resources.SECRET, name, namespace)
            state.secrets[name] = (now, secret)
        return secret


def _no_address(job: RLJob) -> str:
    """Why the ledger cannot be asked, where that is not just a store on its way."""
    ref = job.spec.store.redis.secret_ref
    return "" if ref is None else f"Secret {ref.name} is not there, or has no key {ref.key}"


def phase_of(resource: Object) -> str:
    """status.phase; empty before the first."""
    return str((resource.get("status") or {}).get("phase") or "")


def not_ready(children: Iterable[Object], pods: Iterable[Object]) -> bool:
    """Whether something of a job is on its way or in trouble, so that others' warnings are worth a look."""
    return any(map(_pod_waits, pods)) or any(map(_child_waits, children))


def is_ready(pod: Object) -> bool:
    """Condition Ready of a pod."""
    found = (pod.get("status") or {}).get("conditions") or ()
    return any(item["type"] == "Ready" and item["status"] == "True" for item in found)


def _pod_waits(pod: Object) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return phase != "Succeeded" and not is_ready(pod)


def _child_waits(child: Object) -> bool:
    spec: Mapping[str, Any] = child.get("spec") or {}
    status: Mapping[str, Any] = child.get("status") or {}
    match child["kind"]:
        case "StatefulSet":
            return int(status.get("readyReplicas") or 0) < int(spec.get("replicas") or 0)
        case "Job":
            ended = int(status.get("succeeded") or 0) + int(status.get("failed") or 0)
            return not ended and not int(status.get("ready") or 0)
        case "PersistentVolumeClaim":
            return status.get("phase") != "Bound"
        case "SandboxPool":
            return int(status.get("ready") or 0) < 1
        case _:
            return False


def _store_address(pods: Iterable[Object]) -> str:
    """Of the job's own Valkey, once it is ready; IPv6 in brackets."""
    for pod in pods:
        component = (pod["metadata"].get("labels") or {}).get(labels.COMPONENT)
        if component == "store" and is_ready(pod):
            address = str(pod["status"].get("podIP") or "")
            return f"[{address}]" if ":" in address else address
    return ""
