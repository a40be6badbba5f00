"""Events: those that the operator posts on an RLJob, and the warnings that others post on its children.

Decision.events ─► one object per (job, reason, message), counted up when it happens again
Warning Events of the namespace, read at most every few seconds and only while something is not ready
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

import structlog

from rljob import labels
from rljob.clock import Clock, SystemClock
from rljob.kube.client import KubeClient
from rljob.kube.errors import ExistsError, KubeError
from rljob.kube.resources import CORE_EVENT, Object, name_of, namespace_of, uid_of
from rljob_operator.observed import ChildKey, Event

LOOK_SECONDS = 8.0
"""Between two looks at a namespace's warnings."""
MAX_MESSAGE = 1000
"""Characters; the API server takes 1024."""
MOST_WARNINGS = 64
"""Newest warnings of one job that are looked at."""

_log = structlog.get_logger("rljob.operator")


class EventPoster:
    """Posts events on RLJobs. A post that fails is told in the log and left."""

    def __init__(self, client: KubeClient, clock: Clock | None = None) -> None:
        self._client, self._clock = client, clock or SystemClock()

    async def post(self, job: Object, events: Sequence[Event]) -> None:
        """Post all of them, in order."""
        for event in events:
            _log.info(
                "event",
                job=name_of(job),
                namespace=namespace_of(job),
                reason=event.reason,
                message=event.message,
            )
            try:
                await self._post(job, event)
            except KubeError as error:
                _log.warning(
                    "event_not_posted", job=name_of(job), what=event.reason, reason=str(error)
                )

    async def _post(self, job: Object, event: Event) -> None:
        now = datetime.fromtimestamp(self._clock.now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = event_object(job, event, now)
        name, namespace = name_of(body), namespace_of(job)
        try:
            await self._client.create(CORE_EVENT, body, namespace)
        except ExistsError:
            found = await self._client.find(CORE_EVENT, name, namespace)
            count = int((found or {}).get("count") or 1) + 1
            patch = {"count": count, "lastTimestamp": now}
            await self._client.patch(CORE_EVENT, name, patch, namespace)


def event_object(job: Object, event: Event, now: str) -> Object:
    """The Event; its name follows from what it says, so a repeat meets the first."""
    said = f"{uid_of(job)}\0{event.type}\0{event.reason}\0{event.message}"
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name_of(job)}.{digest}", "namespace": namespace_of(job)},
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:MAX_MESSAGE],
        "involvedObject": {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": name_of(job),
            "namespace": namespace_of(job),
            "uid": uid_of(job),
            "resourceVersion": str(job["metadata"].get("resourceVersion", "")),
        },
        "source": {"component": labels.FIELD_MANAGER},
        "reportingComponent": labels.FIELD_MANAGER,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


class Warnings:
    """Warning Events by namespace: one list serves all jobs there."""

    def __init__(self, client: KubeClient, clock: Clock | None = None) -> None:
        self._client, self._clock = client, clock or SystemClock()
        self._seen: dict[str, tuple[float, list[Object]]] = {}

    async def of(
        self, namespace: str, uids: Collection[str], names: Collection[ChildKey]
    ) -> tuple[Object, ...]:
        """The warnings of these objects, oldest first; none where they cannot be read.

        Args:
            namespace: Where.
            uids: Of the objects that are there.
            names: Of objects that may be gone, or were never made.
        """
        now = self._clock.monotonic()
        when, events = self._seen.get(namespace, (float("-inf"), []))
        if now - when > LOOK_SECONDS:
            try:
                events, _ = await self._client.list(
                    CORE_EVENT, namespace, field_selector="type=Warning"
                )
            except KubeError as error:
                _log.warning("warnings_not_read", namespace=namespace, reason=str(error))
            self._seen[namespace] = (now, events)
        return tuple(
            sorted((e for e in events if _is_of(e, uids, names)), key=_time)[-MOST_WARNINGS:]
        )


def _is_of(event: Object, uids: Collection[str], names: Collection[ChildKey]) -> bool:
    involved = event.get("involvedObject") or {}
    if uid := involved.get("uid"):
        return uid in uids
    return ChildKey(str(involved.get("kind")), str(involved.get("name"))) in names


def _time(event: Object) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(time) for time in times if time), "")
