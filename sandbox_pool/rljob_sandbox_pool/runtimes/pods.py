"""Sandboxes as pods.

    start ─► create ─► pod seen by the informer: has an address ─► located ─► … ─► terminal, or being deleted ─► failed
                 └─ refused ─► failed, ended                                          kill ─► delete ─► gone ─► ended

A sandbox holds its place in the pool from `start` until its pod is known to be gone, whatever the informer has seen by
then: so there is never a pod above the pool's `max`. A create whose answer was lost may still arrive: it is deleted by
name until that cannot be any more. A pod that the informer no longer shows may have lost a label: the same. One that it
never showed is asked for by name.

A pod that no node has room for is waited for; one that its node cannot bring up fails, for another to be tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import structlog

from rljob import labels
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.clock import Clock, SystemClock
from rljob.errors import SandboxError
from rljob.kube.client import KubeClient
from rljob.kube.errors import ExistsError, KubeError
from rljob.kube.informer import Key, key_of
from rljob.kube.resources import POD, Object, name_of, uid_of
from rljob_sandbox_pool.runtimes import pod_template
from rljob_sandbox_pool.runtimes.base import SandboxSpec, Trouble
from rljob_sandbox_pool.runtimes.pod_identity import IMAGE, TEMPLATE_HASH, Owner, labels_of
from rljob_sandbox_pool.runtimes.pod_status import UP_SECONDS, Patience, fate, node_of
from rljob_sandbox_pool.runtimes.pod_template import PodConfig
from rljob_sandbox_pool.starts import MAX_DELETIONS, SlowStart, StartBucket

CREATE_SECONDS = 4.0
"""Deadline of a create, well below the Lease's: whoever takes over sees what its predecessor made."""
MIND_SECONDS = 5.0
"""How often a pod is looked at that does not run yet, or that only its create's answer has shown."""
ARRIVAL_SECONDS = 75.0
"""An API server answers a request, or gives it up, within a minute: after that a lost create cannot arrive."""
DELETE_AGAIN_SECONDS = 5.0
AVOID_SECONDS, MAX_AVOIDED = 600.0, 16
"""How long a node that failed a pod is the last choice for others, and how many such nodes are kept in mind."""
_FOUND_BY = (labels.COMPONENT, labels.POOL, labels.JOB)
"""Labels."""

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
        self._changed, self._vanished = asyncio.Event(), asyncio.Event()
        self._created_at: float | None = None
        self._patience = Patience(runtime.clock.monotonic())
        self._is_made = self._is_shown = self._is_deleted = False
        self._killing = False
        if manifest is not None:
            creating = runtime.spawn(self._create(manifest))
            creating.add_done_callback(lambda _: runtime.answered())
        runtime.spawn(self._mind())

    async def locate(self) -> str:
        """See `base.RunningSandbox`. `_mind` ends it where there will be no address."""
        while not self.failed.done():
            if address := self._status().get("podIP"):
                host = f"[{address}]" if ":" in address else address
                return f"http://{host}:{labels.GUEST_PORT}"
            self._changed.clear()
            waiting = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({waiting, self.failed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
        raise SandboxError(f"sandbox {self.name}: {self.failed.result()}")

    def _status(self) -> dict[str, Any]:
        return (self._pod or {}).get("status") or {}

    def trouble(self) -> Trouble | None:
        """See `base.RunningSandbox`."""
        if self._pod is None:
            return None
        return self._patience.trouble(self._pod, self._runtime.clock.monotonic())

    def kill(self) -> None:
        """See `base.RunningSandbox`."""
        if not self._killing and not self.ended.done():
            self._killing = True
            self._runtime.spawn(self._delete())

    def shown(self, pod: Object) -> None:
        """The informer shows the pod: it will also say when it no longer does."""
        self._is_shown = True
        self.seen(pod)

    def seen(self, pod: Object) -> None:
        """The informer, the create's own answer or an answer to a question show the pod."""
        if self._pod is not None and uid_of(self._pod) != uid_of(pod):
            return
        self._pod = pod
        self._changed.set()
        if how := fate(pod) or self._runtime.estranged(pod):
            self._fail(how)

    def _fail(self, how: str) -> None:
        if not self.failed.done():
            self.failed.set_result(how)

    def vanished(self, how: str) -> None:
        """The informer no longer shows it. That is its end only where we have deleted it: it may have lost a label."""
        if self._is_deleted:
            self._vanished.set()
        else:
            self._fail(how)
            self.kill()

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
            if 400 <= error.status < 500 and not error.is_doubtful:
                self.gone(how)
                return
            self._fail(how)
            return
        else:
            runtime.slow_start.succeeded()
            # The informer may have been quicker, and know the address already.
            if self._pod is None:
                self.seen(pod)
        self._is_made = True

    async def _mind(self) -> None:
        """Until it runs: fail it where it will not."""
        clock = self._runtime.clock
        while not self.failed.done() and not self._killing:
            if self._is_shown and self._status().get("phase") == "Running":
                return
            await clock.sleep(MIND_SECONDS)
            if self._is_made and not self._is_shown:
                await self._ask()
            if how := self._patience.over(self._pod or {}, clock.monotonic()):
                self._runtime.avoid(node_of(self._pod or {}))
                self._fail(how)

    async def _ask(self) -> None:
        """It was made, and the informer does not show it: it may have come and gone while nobody watched."""
        runtime = self._runtime
        try:
            async with runtime.deletions:
                found, _ = await runtime.kube.list(
                    POD, runtime.owner.namespace, field_selector=f"metadata.name={self.name}"
                )
        except KubeError:
            return
        if found:
            self.seen(found[0])
        elif not self._is_shown:
            self.gone("the pod was deleted")

    async def _delete(self) -> None:
        """Until it is gone. The informer mostly says so first."""
        runtime, clock = self._runtime, self._runtime.clock
        while not self.ended.done():
            try:
                async with runtime.deletions:
                    if self.ended.done():
                        return
                    self._is_deleted = True
                    was_there = await runtime.kube.delete(
                        POD,
                        self.name,
                        runtime.owner.namespace,
                        uid=uid_of(self._pod) if self._pod else "",
                        grace_seconds=0,
                    )
            except KubeError as error:
                _log.warning("pod_not_deleted", pod=self.name, reason=str(error))
                await clock.sleep(DELETE_AGAIN_SECONDS)
                continue
            age = clock.monotonic() - (self._created_at or float("-inf"))
            may_arrive = self._pod is None and age < ARRIVAL_SECONDS
            if (not was_there and not may_arrive) or await self._vanishes():
                self.gone("deleted")
                return

    async def _vanishes(self) -> bool:
        """It does, within the time until it is deleted again."""
        try:
            async with asyncio.timeout(DELETE_AGAIN_SECONDS):
                return await self._vanished.wait()
        except TimeoutError:
            return False


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
        self._avoided: dict[str, float] = {}
        """Nodes that failed a pod, and when, the last one last."""
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
        avoided = self._avoid()
        manifest = pod_template.pod(spec, self._spec, self.owner, self._config, avoided=avoided)
        box = PodSandbox(self, spec.id, manifest)
        self._boxes[spec.id] = box
        return box

    def adopt(self, pod: Object) -> tuple[str, str, PodSandbox]:
        """A pod that an earlier pool manager started: its name, its image, and itself."""
        annotations = pod["metadata"].get("annotations") or {}
        box = PodSandbox(self, name_of(pod), None)
        box.template = annotations.get(TEMPLATE_HASH, "")
        self._boxes[box.name] = box
        box.shown(pod)
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
            box.shown(new)
        else:
            box.vanished(fate(old or {}) or "the pod was deleted, or lost its labels")
        return True

    def estranged(self, pod: Object) -> str:
        """Why it is no pod of this pool any more: by these labels NetworkPolicies find it. Empty: it is."""
        found = pod["metadata"].get("labels") or {}
        for name, value in labels_of(self.owner, "sandbox").items():
            if name in _FOUND_BY and found.get(name) != value:
                return f"its label {name} was changed"
        return ""

    def avoid(self, node: str) -> None:
        """It has failed a pod: a scheduler that likes its empty place would choose it again."""
        self._avoided.pop(node, None)
        if node:
            self._avoided[node] = self.clock.monotonic()

    def _avoid(self) -> list[str]:
        now = self.clock.monotonic()
        return [node for node, at in self._avoided.items() if now - at < AVOID_SECONDS][
            -MAX_AVOIDED:
        ]

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
