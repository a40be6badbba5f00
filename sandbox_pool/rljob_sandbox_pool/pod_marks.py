"""What `kubectl get pods -L rljob.dev/state,rljob.dev/holder-job` shows, written behind the pool's back.

    a sandbox comes into another state ─► wanted (per pod, the last one counts) ─► so for 2 s ─► one patch at a time
                                                                                     of all pools, 10 a second at most

A claim never waits for it, and nothing reads it: it is for people. What changes faster is never written.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict, deque
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import structlog

from rljob import labels
from rljob.api.rljob_types import API_VERSION
from rljob.clock import Clock
from rljob.kube.client import KubeClient
from rljob.kube.errors import ExistsError, KubeError, NotFoundError
from rljob.kube.informer import Key, key_of
from rljob.kube.resources import CORE_EVENT, POD, SANDBOX_POOL, Object
from rljob_sandbox_pool.member import Member, MemberState
from rljob_sandbox_pool.runtimes.pod_identity import Owner, label_value

SETTLE_SECONDS = 2.0
PAUSE_SECONDS = 0.1
"""Between two writes of all pools together."""
MAX_TRIES = 5
MAX_EVENTS = 100
"""Events that wait; more are left out."""
EVENT_SECONDS = 10.0
"""Between two Events of one pool; what is left out is in the log, and on the pods."""
MAX_EVIDENCE_BYTES = 1024
MAX_NOTE = 253
QUARANTINED: Final = "Quarantined"
"""Reason of an Event on the SandboxPool."""
_HELD: Final = (MemberState.CLAIMED, MemberState.QUARANTINED)
_log = structlog.get_logger("rljob.sandbox_pool")


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Labels and annotations of one pod; empty: there is none."""

    state: str
    holder_job: str = ""
    claim: str = ""
    owner: str = ""
    evidence: str = ""

    def patch(self) -> Object:
        """A merge patch that makes them so."""
        tags = {labels.STATE: self.state, labels.HOLDER_JOB: self.holder_job or None}
        notes = {labels.CLAIM: self.claim, labels.OWNER: self.owner, labels.EVIDENCE: self.evidence}
        return {
            "metadata": {
                "labels": tags,
                "annotations": {key: text or None for key, text in notes.items()},
            }
        }


def marks_of(member: Member) -> Marks:
    """A sandbox as its pod should show it."""
    evidence = "; ".join(member.evidence).encode()[:MAX_EVIDENCE_BYTES].decode("utf-8", "ignore")
    is_held = member.state in _HELD
    return Marks(
        state=member.state.value,
        holder_job=_safe(member.job.rpartition("/")[2]) if is_held else "",
        claim=member.claim_id[:MAX_NOTE],
        owner=member.owner[:MAX_NOTE],
        evidence=evidence if member.state is MemberState.QUARANTINED else "",
    )


def marks_on(pod: Object) -> Marks:
    """What a pod shows now."""
    metadata = pod["metadata"]
    tags, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return Marks(
        state=tags.get(labels.STATE, ""),
        holder_job=tags.get(labels.HOLDER_JOB, ""),
        claim=notes.get(labels.CLAIM, ""),
        owner=notes.get(labels.OWNER, ""),
        evidence=notes.get(labels.EVIDENCE, ""),
    )


def _safe(name: str) -> str:
    """As a label's value."""
    return label_value(re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("-._"))


class PodMarks:
    """See the picture above. Belongs to one event loop.

    Args:
        kube: Whom to ask.
        clock: Time.
    """

    def __init__(self, kube: KubeClient, clock: Clock) -> None:
        self._kube, self._clock = kube, clock
        self._shown: dict[Key, Marks] = {}
        self._wanted: OrderedDict[Key, tuple[Marks, float, int]] = OrderedDict()
        """Marks, when they are due, tries so far; those that are due first come first."""
        self._events: deque[Object] = deque(maxlen=MAX_EVENTS)
        self._told: dict[str, float] = {}
        """uid of a pool → when its last Event was made."""

    def seen(self, pod: Object) -> None:
        """The informer shows a pod."""
        self._shown[key_of(pod)] = marks_on(pod)

    def forget(self, pod: Object) -> None:
        """There is no such pod any more."""
        self._shown.pop(key_of(pod), None)
        self._wanted.pop(key_of(pod), None)

    def note(self, owner: Owner, member: Member) -> None:
        """A sandbox has come into another state. Quick: it is called on the way of every claim."""
        key = Key(owner.namespace, member.id)
        self._wanted.pop(key, None)
        if member.state is MemberState.ENDING:
            return
        now = self._clock.monotonic()
        if member.state is MemberState.QUARANTINED and self._may_tell(owner.uid, now):
            self._events.append(quarantine_event(owner, member, self._clock.now()))
        self._wanted[key] = (marks_of(member), now + SETTLE_SECONDS, 0)

    def _may_tell(self, pool: str, now: float) -> bool:
        self._told = {uid: at for uid, at in self._told.items() if now - at < EVENT_SECONDS}
        if pool in self._told:
            return False
        self._told[pool] = now
        return True

    async def loop(self) -> None:
        """For ever."""
        while True:
            if self._events:
                await self._post(self._events.popleft())
            else:
                await self._write_next()
            await self._clock.sleep(PAUSE_SECONDS)

    async def _write_next(self) -> None:
        """The pod that has waited longest and needs a write."""
        while self._wanted:
            key, (marks, due, tries) = next(iter(self._wanted.items()))
            if due > self._clock.monotonic():
                return
            del self._wanted[key]
            if self._shown.get(key) != marks:
                await self._write(key, marks, tries)
                return

    async def _write(self, key: Key, marks: Marks, tries: int) -> None:
        try:
            await self._kube.patch(POD, key.name, marks.patch(), key.namespace)
        except NotFoundError:
            self._shown.pop(key, None)
        except KubeError as error:
            if tries + 1 == MAX_TRIES:
                _log.warning("pod_not_marked", pod=key.name, reason=str(error))
            elif key not in self._wanted:
                due = self._clock.monotonic() + SETTLE_SECONDS
                self._wanted[key] = (marks, due, tries + 1)
        else:
            self._shown[key] = marks

    async def _post(self, event: Object) -> None:
        try:
            await self._kube.create(CORE_EVENT, event, event["metadata"]["namespace"])
        except ExistsError:
            return
        except KubeError as error:
            name = event["involvedObject"]["name"]
            _log.warning("event_not_posted", pool=name, reason=str(error))


def quarantine_event(owner: Owner, member: Member, now: float) -> Object:
    """One for each sandbox that did not verify."""
    when = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    digest = hashlib.sha256(member.id.encode()).hexdigest()[:16]
    evidence = "; ".join(member.evidence)
    involved: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": SANDBOX_POOL.kind,
        "name": owner.name,
        "namespace": owner.namespace,
        "uid": owner.uid,
    }
    return {
        "apiVersion": CORE_EVENT.api_version,
        "kind": CORE_EVENT.kind,
        "metadata": {"name": f"{owner.name[:200]}.{digest}", "namespace": owner.namespace},
        "type": "Warning",
        "reason": QUARANTINED,
        "message": f"sandbox {member.id} did not verify after a reset: {evidence}"[:1000],
        "involvedObject": involved,
        "source": {"component": labels.POOL_FIELD_MANAGER},
        "reportingComponent": labels.POOL_FIELD_MANAGER,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
