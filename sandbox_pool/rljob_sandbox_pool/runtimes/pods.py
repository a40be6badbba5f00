"""Sandboxes as pods.

    start ─► create ─► pod seen by the informer: has an address ─► located ─► … ─► terminal, or being deleted ─► failed
                 └─ refused ─► failed, ended                                          kill ─► delete ─► gone ─► ended

A sandbox holds its place in the pool from `start` until its pod is known to be gone, whatever the informer has seen by
then: so there is never a pod above the pool's `max`. A create whose answer was lost may still arrive: it is deleted by
name until that cannot be any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import structlog

from rljob.api.rljob_types import SandboxPoolSpec
from rljob.clock import Clock, SystemClock
from rljob.errors import SandboxError
from rljob.kube.client import KubeClient
from rljob.kube.errors import ExistsError, KubeError
from rljob.kube.informer import Key, key_of
from rljob.kube.resources import POD, Object, name_of, uid_of
from rljob.labels import GUEST_PORT
from rljob_sandbox_pool.runtimes import pod_template
from rljob_sandbox_pool.runtimes.base import SandboxSpec, Trouble
from rljob_sandbox_pool.runtimes.pod_identity import IMAGE, TEMPLATE_HASH, Owner
from rljob_sandbox_pool.runtimes.pod_status import POD_NOT_MADE, fate, is_scheduled, trouble
from rljob_sandbox_pool.runtimes.pod_template import PodConfig
from rljob_sandbox_pool.starts import MAX_DELETIONS, SlowStart, StartBucket

CREATE_SECONDS = 4.0
"""Deadline of a create, well below the Lease's: whoever takes over sees what its predecessor made."""
SANDBOX_SECONDS = 60.0
"""A pod that has a node gets its address within seconds, before any image is pulled; after so long it is a trouble."""
UP_SECONDS = 600.0
"""A pod that has a node but no address after so long is replaced."""
ARRIVAL_SECONDS = 75.0
"""An API server answers a request, or gives it up, within a minute: after that a lost create cannot arrive."""
DELETE_AGAIN_SECONDS = 5.0

_log = structlog.get_logger("rljob.sandbox_pool")


class PodSandbox:
    """One pod. See `base.RunningSandbox`."""

    def __init__(self, runtime: PodRuntime, name: str, manifest: Object | None) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.template = runtime.template
        self.failed: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._runtime = runtime
        self._pod: Object | None = None
        self._changed = asyncio.Event()
        self._created_at: float | None = None
        self._scheduled_at: float | None = None
        self._is_doubtful = False
        self._killing = False
        if manifest is not None:
            creating = runtime.spawn(self._create(manifest))
            creating.add_done_callback(lambda _: runtime.answered())

    async def locate(self) -> str:
        """See `base.RunningSandbox`. A pod that no node takes is waited for; the pool does not start more then."""
        clock, since = self._runtime.clock, float("inf")
        while not self.failed.done():
            if address := (self._pod or {}).get("status", {}).get("podIP"):
                host = f"[{address}]" if ":" in address else address
                return f"http://{host}:{GUEST_PORT}"
            now = clock.monotonic()
            since = min(since, now) if self._pod and is_scheduled(self._pod) else float("inf")
            if now - since > UP_SECONDS:
                words = trouble(self._pod or {})
                reason = words.message if words else "it has no address"
                raise SandboxError(
                    f"sandbox {self.name}: not up after {UP_SECONDS:.0f} s: {reason}"
                )
            self._changed.clear()
            waiting = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait(
                    {waiting, self.failed}, timeout=5.0, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waiting.cancel()
        raise SandboxError(f"sandbox {self.name}: {self.failed.result()}")

    def trouble(self) -> Trouble | None:
        """See `base.RunningSandbox`."""
        if self._pod is None:
            return None
        return trouble(self._pod) or self._not_made()

    def _not_made(self) -> Trouble | None:
        """Its node fails to make what all its containers share: network, user namespace, runtime."""
        since = self._scheduled_at
        if since is None or self._runtime.clock.monotonic() - since < SANDBOX_SECONDS:
            return None
        if ((self._pod or {}).get("status") or {}).get("podIP"):
            return None
        words = f"a pod has a node and no address for {SANDBOX_SECONDS:.0f} s; its events say why"
        return Trouble(POD_NOT_MADE, words)

    def kill(self) -> None:
        """See `base.RunningSandbox`."""
        if not self._killing and not self.ended.done():
            self._killing = True
            self._runtime.spawn(self._delete())

    def seen(self, pod: Object) -> None:
        """The informer (or the create's own answer) shows the pod."""
        if self._pod is not None and uid_of(self._pod) != uid_of(pod):
            return
        self._pod = pod
        if self._scheduled_at is None and is_scheduled(pod):
            self._scheduled_at = self._runtime.clock.monotonic()
        self._is_doubtful = False
        self._changed.set()
        if (how := fate(pod)) and not self.failed.done():
            self.failed.set_result(how)

    def gone(self, how: str) -> None:
        """There is no such pod any more."""
        self._runtime.forget(self.name)
        for future in (self.failed, self.ended):
            if not future.done():
                future.set_result(how)
        self._changed.set()

    async def _create(self, manifest: Object) -> None:
        runtime = self._runtime
        self._created_at = runtime.clock.monotonic()
        try:
            pod = await runtime.kube.call(
                "POST",
                POD.path(runtime.owner.namespace),
                body=manifest,
                deadline_seconds=CREATE_SECONDS,
            )
        except ExistsError:
            # Names are random: it is our own, made by an attempt whose answer was lost.
            runtime.slow_start.succeeded()
        except KubeError as error:
            runtime.slow_start.failed()
            # Without the name, which is another each time: a condition's message stays the same.
            how = f"a pod cannot be created: {error}".replace(f'"{self.name}" ', "")
            # What is refused does not exist. Of what was not answered nobody knows.
            if 400 <= error.status < 500:
                self.gone(how)
                return
            self._is_doubtful = True
            if not self.failed.done():
                self.failed.set_result(how)
        else:
            runtime.slow_start.succeeded()
            # The informer may have been quicker, and know the address already.
            if self._pod is None:
                self.seen(pod)

    async def _delete(self) -> None:
        """Until it is gone. The informer mostly says so first."""
        runtime, clock = self._runtime, self._runtime.clock
        while not self.ended.done():
            try:
                async with runtime.deletions:
                    if self.ended.done():
                        return
                    was_there = await runtime.kube.delete(
                        POD,
                        self.name,
                        runtime.owner.namespace,
                        uid=uid_of(self._pod) if self._pod else "",
                        grace_seconds=0,
                    )
            except KubeError as error:
                _log.warning("pod_not_deleted", pod=self.name, reason=str(error))
                was_there = True
            age = clock.monotonic() - (self._created_at or float("-inf"))
            may_arrive = self._pod is None and age < ARRIVAL_SECONDS
            if not was_there and not may_arrive:
                self.gone("deleted")
                return
            await clock.sleep(DELETE_AGAIN_SECONDS)


class PodRuntime:
    """Starts the pods of one SandboxPool object. See `base.Runtime`.

    Args:
        kube: Whom to ask.
        owner: The object.
        spec: Its spec.
        config: What all pools have in common.
        bucket: What all pools share: starts per second.
        deletions: What all pools share: deletions at a time.
        leads: Whether we may still start pods: a pool manager that lost its Lease must not.
        clock: Time.
    """

    name = "pods"
    max_starting = 1_000_000
    start_seconds = UP_SECONDS

    def __init__(
        self,
        kube: KubeClient,
        owner: Owner,
        spec: SandboxPoolSpec,
        config: PodConfig,
        bucket: StartBucket,
        *,
        deletions: asyncio.Semaphore | None = None,
        leads: Callable[[], bool] = lambda: True,
        clock: Clock | None = None,
    ) -> None:
        self.kube, self.owner = kube, owner
        self.deletions = deletions or asyncio.Semaphore(MAX_DELETIONS)
        self.on_room: Callable[[], None] = lambda: None
        """Called when more may be started than before."""
        self._leads = leads
        self.clock = clock or SystemClock()
        self.slow_start = SlowStart()
        self._config, self._bucket = config, bucket
        self._boxes: dict[str, PodSandbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.update(spec)

    def update(self, spec: SandboxPoolSpec) -> None:
        """Another spec: pods of an earlier one are outdated where it made them differ."""
        self._spec = spec
        self.template = pod_template.template_hash(spec, self._config)

    def limits(self) -> dict[str, str]:
        """See `base.Runtime`."""
        restricted = self._spec.pod_security == "restricted"
        return {
            "network": "NetworkPolicy",
            "disk": "emptyDir",
            # the kernel exempts the node's own root
            "pids": "rlimit" if restricted or not self._spec.host_users else "none",
            "memory": "cgroup",
            "cpu": "cgroup",
            "user": "own uid" if restricted else "image",
        }

    def images(self, spec: SandboxPoolSpec) -> dict[str, int]:
        """See `base.Runtime`."""
        return {each.image: each.weight for each in spec.images} or {self._config.sandbox_image: 1}

    def take_starts(self, wanted: int) -> int:
        """See `base.Runtime`."""
        if not self._leads():
            return 0
        key = Key(self.owner.namespace, self.owner.name)
        num = self._bucket.take(key, min(wanted, self.slow_start.room), self.clock.monotonic())
        self.slow_start.begin(num)
        return num

    def start(self, spec: SandboxSpec) -> PodSandbox:
        """See `base.Runtime`."""
        manifest = pod_template.pod(spec, self._spec, self.owner, self._config)
        box = PodSandbox(self, spec.id, manifest)
        self._boxes[spec.id] = box
        return box

    def adopt(self, pod: Object) -> tuple[str, str, PodSandbox]:
        """A pod that an earlier pool manager started: its name, its image, and itself."""
        annotations = pod["metadata"].get("annotations") or {}
        box = PodSandbox(self, name_of(pod), None)
        box.template = annotations.get(TEMPLATE_HASH, "")
        self._boxes[box.name] = box
        box.seen(pod)
        return box.name, annotations.get(IMAGE, ""), box

    def is_outdated(self, running: object) -> bool:
        """See `base.Runtime`."""
        return isinstance(running, PodSandbox) and running.template != self.template

    def on_pod(self, old: Object | None, new: Object | None) -> bool:
        """From the informer: a pod of this pool. False where it is none that this runtime knows."""
        box = self._boxes.get(key_of(new or old or {}).name)
        if box is None:
            return False
        if new is not None:
            box.seen(new)
        else:
            box.gone(fate(old or {}) or "the pod was deleted")
        return True

    def forget(self, name: str) -> None:
        """That pod is gone."""
        self._boxes.pop(name, None)

    def names(self) -> Iterable[str]:
        """Pods that hold a place."""
        return self._boxes.keys()

    def answered(self) -> None:
        """A create has come to its end, whatever that is."""
        self._bucket.answered()
        self.on_room()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something until it is done or the runtime closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """See `base.Runtime`."""
        for task in self._tasks:
            task.cancel()
