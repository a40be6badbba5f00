"""A local copy of the objects that a selector selects, kept by list and watch.

    list (pages) ─► copy ◄─ watch: added, modified, deleted; bookmarks move the resource version
      ▲                       │ server ends it, connection breaks: watch again from the last resource version
      └───────────────────────┘ 410, or silence: list again; what vanished meanwhile is reported as deleted

`on_change(old, new)` is called for every change: (None, new) added, (old, new) changed, (old, None) gone. It is
called inside the loop's task, must be quick and must not raise. `age_seconds` says since when nothing was heard, not
even a bookmark (the server sends one a minute): whoever lives on the copy checks it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import NamedTuple

import structlog

from rljob.clock import Clock, SystemClock
from rljob.kube.client import KubeClient
from rljob.kube.errors import GoneError, KubeError
from rljob.kube.resources import Object, Resource, name_of, namespace_of, uid_of

WATCH_SECONDS = 290
"""The server ends a watch after so long (a little less or more)."""
SILENCE_SECONDS = 90.0
"""A watch that says nothing for so long, no bookmark either, is given up and everything listed again."""
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0

OnChange = Callable[[Object | None, Object | None], None]
_log = structlog.get_logger("rljob.kube")


class Key(NamedTuple):
    """Which object."""

    namespace: str
    name: str


def key_of(obj: Object) -> Key:
    """Namespace and name of an object."""
    return Key(namespace_of(obj), name_of(obj))


def without_managed_fields(obj: Object) -> Object:
    """The default `trim`: who set which field is half of an object, and nobody here asks."""
    obj["metadata"].pop("managedFields", None)
    return obj


class Informer:
    """See the picture above. `run` it as a task; use from one event loop.

    Args:
        client: Whom to ask.
        resource: Which kind.
        namespace: Which namespace; None: all.
        label_selector: Which objects.
        field_selector: Which objects.
        on_change: Told about every change.
        trim: Makes an object smaller before it is kept.
        silence_seconds: See `SILENCE_SECONDS`.
        clock: Time.
    """

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        on_change: OnChange | None = None,
        trim: Callable[[Object], Object] = without_managed_fields,
        silence_seconds: float = SILENCE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self.resource = resource
        self.objects: dict[Key, Object] = {}
        self.synced = asyncio.Event()
        """Set once the first list is in `objects` (and was reported)."""
        self.error = ""
        """What the last attempt failed of; empty: it did not."""
        self._client, self._namespace = client, namespace
        self._label_selector, self._field_selector = label_selector, field_selector
        self._on_change = on_change or (lambda old, new: None)
        self._trim, self._silence_seconds = trim, silence_seconds
        self._clock = clock or SystemClock()
        self._heard = self._clock.monotonic()
        self._version = ""

    def age_seconds(self) -> float:
        """Since the server was last heard: an event, a bookmark, a list."""
        return self._clock.monotonic() - self._heard

    def get(self, namespace: str, name: str) -> Object | None:
        """One object of the copy."""
        return self.objects.get(Key(namespace, name))

    async def run(self) -> None:
        """Forever. What the server refuses is said in `error` and in the log, and tried again."""
        failures = 0
        while True:
            heard = self._heard
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                self.error, failures = "", 0
                continue
            except GoneError:
                self._version = ""
                reason = "the resource version is gone"
            except KubeError as error:
                reason = str(error)
                if self.age_seconds() >= self._silence_seconds:
                    self._version = ""
            # A watch that was cut after it had said something is an everyday matter.
            failures = 0 if self._heard > heard else failures + 1
            self.error = reason if failures else ""
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures, 8))
            if failures > 1:
                _log.warning(
                    "watch_failed", kind=self.resource.kind, reason=reason, pause_seconds=pause
                )
            await self._clock.sleep(pause * random.uniform(0.5, 1.0))

    async def _list(self) -> None:
        items, version = await self._client.list(
            self.resource,
            self._namespace,
            label_selector=self._label_selector,
            field_selector=self._field_selector,
        )
        self._hear()
        listed = {key_of(item): self._trim(item) for item in items}
        for key in [key for key in self.objects if key not in listed]:
            self._on_change(self.objects.pop(key), None)
        for key, new in listed.items():
            self._put(key, new)
        self._version = version
        self.error = ""
        self.synced.set()

    async def _watch(self) -> None:
        events = self._client.watch(
            self.resource,
            self._namespace,
            resource_version=self._version,
            label_selector=self._label_selector,
            field_selector=self._field_selector,
            timeout_seconds=int(WATCH_SECONDS * random.uniform(0.9, 1.1)),
            silence_seconds=self._silence_seconds,
        )
        async with aclosing(events) as stream:
            async for kind, obj in stream:
                self._hear()
                self._version = str(obj["metadata"]["resourceVersion"])
                if kind == "DELETED":
                    if old := self.objects.pop(key_of(obj), None):
                        self._on_change(old, None)
                elif kind in ("ADDED", "MODIFIED"):
                    self._put(key_of(obj), self._trim(obj))

    def _put(self, key: Key, new: Object) -> None:
        old = self.objects.get(key)
        if old is not None and uid_of(old) != uid_of(new):
            # Another object of the same name: its predecessor's end was not seen.
            self._on_change(self.objects.pop(key), None)
            old = None
        if old is not None and _version_of(old) == _version_of(new):
            return
        self.objects[key] = new
        self._on_change(old, new)

    def _hear(self) -> None:
        self._heard, self.error = self._clock.monotonic(), ""


def _version_of(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))
