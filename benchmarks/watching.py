"""What appears in a cluster and what goes, with the moment it was seen: watches in a thread of their own.

with Watch(kubeconfig, POD, namespace="n") as pods: …  pods.first, pods.objects, pods.most
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from rljob.kube.client import KubeClient
from rljob.kube.config import from_kubeconfig
from rljob.kube.informer import Informer, key_of
from rljob.kube.resources import Object, Resource

SYNC_SECONDS = 30.0
OnChange = Callable[[Object | None, Object | None], None]


class Seen(NamedTuple):
    """One object."""

    kind: str
    namespace: str
    name: str


class Watch:
    """Written by its thread, read by any other. Dicts are to be copied before they are walked through: `list(…)`.

    Args:
        kubeconfig: Whom to ask.
        resources: Which kinds.
        namespace: Where; empty: everywhere.
        selector: Labels; empty: all.
        on_change: Also told of every change, in the thread's event loop.
    """

    def __init__(
        self,
        kubeconfig: Path,
        *resources: Resource,
        namespace: str = "",
        selector: str = "",
        on_change: OnChange | None = None,
    ) -> None:
        self.first: dict[Seen, float] = {}
        """When it was first seen, monotonic; also of what is gone."""
        self.objects: dict[Seen, Object] = {}
        """What is there now."""
        self.most = 0
        """Most objects that were there at once, in the API server's own order of events."""
        self._kubeconfig, self._resources = kubeconfig, resources
        self._namespace, self._selector = namespace or None, selector
        self._on_change = on_change
        self._synced, self._failed = threading.Event(), ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._body, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._synced.wait(SYNC_SECONDS) or self._failed:
            raise RuntimeError(f"the cluster cannot be watched: {self._failed or 'no answer'}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SYNC_SECONDS)

    def _body(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001 (told to whoever waits)
            self._failed = repr(error)
            self._synced.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        kube = KubeClient(from_kubeconfig(self._kubeconfig), user_agent="rljob-benchmark")
        informers = [
            Informer(
                kube,
                resource,
                self._namespace,
                label_selector=self._selector,
                on_change=self._teller(resource.kind),
            )
            for resource in self._resources
        ]
        tasks = [asyncio.create_task(informer.run()) for informer in informers]
        try:
            for informer in informers:
                await informer.synced.wait()
            self._synced.set()
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await kube.aclose()

    def _teller(self, kind: str) -> OnChange:
        def changed(old: Object | None, new: Object | None) -> None:
            self.changed(kind, old, new)
            if self._on_change is not None:
                self._on_change(old, new)

        return changed

    def changed(self, kind: str, old: Object | None, new: Object | None) -> None:
        """One event."""
        seen = Seen(kind, *key_of(new or old or {}))
        if new is None:
            self.objects.pop(seen, None)
            return
        self.first.setdefault(seen, time.monotonic())
        self.objects[seen] = new
        self.most = max(self.most, len(self.objects))
