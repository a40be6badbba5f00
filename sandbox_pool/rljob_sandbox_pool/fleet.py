"""One pool per SandboxPool object of the cluster.

    SandboxPool objects ─► added: a Pool, which adopts the pods that are there; changed: its spec; gone: its pods go
    sandbox pods ────────► their pool's runtime; a pod of ours that nobody knows is adopted
    claims ──────────────► tenant: the job's own pools by their names in the job, then those its namespace shares
    every second ────────► the status of each, written when it has changed (`fleet_status`)
    beside it ───────────► what a pool has besides pods (`surroundings`), pods' labels (`pod_marks`), orphans (`reaper`)

Lives only in the active pool manager, from the moment it leads; informers start with a fresh list then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from pydantic import ValidationError

from rljob import broker_token, labels
from rljob.api.pool_effects import pool_problems
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.api.source import dotted
from rljob.clock import Clock, SystemClock
from rljob.kube.client import KubeClient
from rljob.kube.informer import Informer, Key, key_of
from rljob.kube.resources import POD, SANDBOX_POOL, Object, uid_of
from rljob_sandbox_pool import pool_conditions
from rljob_sandbox_pool.broker import Tenant
from rljob_sandbox_pool.cluster_config import PoolManagerConfig
from rljob_sandbox_pool.fleet_status import StatusWriter
from rljob_sandbox_pool.pod_marks import PodMarks
from rljob_sandbox_pool.pool import Pool
from rljob_sandbox_pool.pool_objects import needs_policy
from rljob_sandbox_pool.reaper import Reaper
from rljob_sandbox_pool.runtimes.pod_identity import Owner, owner_of, owner_uid, selector
from rljob_sandbox_pool.runtimes.pods import PodRuntime
from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime
from rljob_sandbox_pool.starts import MAX_DELETIONS, StartBucket
from rljob_sandbox_pool.surroundings import Surroundings

STATUS_SECONDS = 1.0
"""How often every status is looked at."""
SYNC_SECONDS = 300.0
"""How long the first lists may take: whoever leads and cannot read anything gives others a try."""
ADOPT_SECONDS = 15.0
"""How long claims wait for the guests of adopted sandboxes to be heard."""
CLOSE_SECONDS = 300.0
"""How long pods of a pool that is no more are deleted, where the API server does not do so at once."""
_log = structlog.get_logger("rljob.sandbox_pool")


@dataclass
class Served:
    """One SandboxPool object and what was made of it."""

    obj: Object
    pool: Pool
    runtime: PodRuntime | SimulatedRuntime
    pods: PodRuntime
    """The same, unless the pool has no pods: then it ends those that an earlier spec has left."""
    loop: asyncio.Task[None]

    def close(self) -> None:
        """Once the pool is closed."""
        self.runtime.close()
        self.pods.close()


class Fleet:
    """See the picture above. Belongs to one event loop.

    Args:
        kube: Whom to ask.
        config: The configuration file.
        broker_key: What jobs' tokens are made with.
        pool_key: What sandboxes' keys are made with.
        host: Where simulated sandboxes listen: an address that workers reach.
        leads: Whether we may still start pods.
        clock: Time.
    """

    def __init__(
        self,
        kube: KubeClient,
        config: PoolManagerConfig,
        *,
        broker_key: str,
        pool_key: str,
        host: str = "127.0.0.1",
        leads: Callable[[], bool] = lambda: True,
        clock: Clock | None = None,
    ) -> None:
        self.served: dict[Key, Served] = {}
        self._kube, self._config, self._host, self._leads = kube, config, host, leads
        self._broker_key, self._pool_key = broker_key.encode(), pool_key
        self._clock = clock or SystemClock()
        self._bucket = StartBucket(config.starts_per_second, max(1, int(config.starts_per_second)))
        self._deletions = asyncio.Semaphore(MAX_DELETIONS)
        self._refused: dict[Key, tuple[Object, str]] = {}
        self._status = StatusWriter(kube, self._clock)
        self._marks = PodMarks(kube, self._clock)
        self._surroundings = Surroundings(kube, config, self._broker_key, self._clock)
        self._closing: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        where: list[str | None] = list(config.namespaces) or [None]
        self._pods = [
            Informer(
                kube,
                POD,
                namespace,
                label_selector=selector(),
                on_change=self._on_pod,
                trim=_trim_pod,
            )
            for namespace in where
        ]
        self._objects = [
            Informer(kube, SANDBOX_POOL, namespace, on_change=self._on_object)
            for namespace in where
        ]
        self._reaper = Reaper(
            kube,
            config.reaper,
            self._clock,
            pods=self._all_pods,
            owners=lambda: {uid_of(o) for each in self._objects for o in each.objects.values()},
            may=leads,
        )

    # ── its life ──

    async def start(self) -> None:
        """List everything, adopt what is there, hear what it holds. Raises what a loop failed of."""
        looks = self._surroundings.loop(self._with_pods), self._marks.loop()
        self._loops += [asyncio.create_task(look) for look in looks]
        # Pods first: a pool that is made later finds its own.
        for informers in (self._pods, self._objects):
            self._loops += [asyncio.create_task(informer.run()) for informer in informers]
            await self._synced(informers)
        deadline = self._clock.monotonic() + ADOPT_SECONDS
        while self._num_unheard() and self._clock.monotonic() < deadline:
            await self._clock.sleep(0.05)
        late = self._status_loop(), self._reaper.loop()
        self._loops += [asyncio.create_task(loop) for loop in late]
        _log.info("serving", pools=len(self.served))

    async def _synced(self, informers: Sequence[Informer]) -> None:
        waiting = asyncio.gather(*(informer.synced.wait() for informer in informers))
        try:
            done, _ = await asyncio.wait(
                {waiting, *self._loops},
                timeout=SYNC_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            waiting.cancel()
        for ended in done - {waiting}:
            ended.result()
        if not done:
            problems = {each.error for each in informers if not each.synced.is_set()}
            words = "; ".join(sorted(problems)) or "no answer"
            raise TimeoutError(f"{informers[0].resource.plural} were not listed: {words}")

    async def run(self) -> None:
        """For ever. A loop that ends is an error and is raised."""
        while True:
            loops = {*self._loops, *(served.loop for served in self.served.values())}
            done, _ = await asyncio.wait(
                loops, timeout=STATUS_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if not task.cancelled():
                    task.result()

    async def detach(self) -> None:
        """Stop, and leave every pod as it is."""
        for task in (*self._loops, *(served.loop for served in self.served.values())):
            task.cancel()
        for served in self.served.values():
            # What lives in this process ends with it; pods stay.
            is_pods = isinstance(served.runtime, PodRuntime)
            await (served.pool.detach() if is_pods else served.pool.close())
            served.close()
        for task in self._closing:
            task.cancel()

    def age_seconds(self) -> float:
        """Since when the most silent informer heard nothing."""
        return max(each.age_seconds() for each in (*self._pods, *self._objects))

    def _num_unheard(self) -> int:
        return sum(served.pool.num_unheard() for served in self.served.values())

    # ── who may claim ──

    def tenant(self, token: str) -> Tenant | None:
        """See `broker.Directory`."""
        if (job := broker_token.job_of(self._broker_key, token)) is None:
            return None
        shared: dict[str, Pool] = {}
        own: dict[str, Pool] = {}
        prefix = labels.pool_name(job.name, "")
        for key, served in self.served.items():
            if key.namespace != job.namespace or job.pool not in ("", key.name):
                continue
            if not served.pool.job:
                shared[key.name] = served.pool
            elif served.pool.job == job.name and key.name.startswith(prefix):
                # Without the prefix a pool of anybody could stand before one of the job's own.
                own[key.name.removeprefix(prefix)] = served.pool
        return Tenant(f"{job.namespace}/{job.name}", {**shared, **own})

    # ── objects ──

    def _on_object(self, old: Object | None, new: Object | None) -> None:
        key = key_of(new or old or {})
        self._refused.pop(key, None)
        served = self.served.get(key)
        if new is None or new["metadata"].get("deletionTimestamp"):
            self._remove(key)
            return
        if served is not None and _raw(served.obj) == _raw(new):
            served.obj = new
            return
        spec = _spec_of(new)
        if isinstance(spec, str):
            self._refused[key] = (new, spec)
            return
        if served is not None and spec.runtime == served.pool.spec.runtime:
            served.obj = new
            if isinstance(served.runtime, PodRuntime):
                self._surroundings.expect(new, spec)
                served.runtime.update(spec)
            served.pool.update(spec)
            return
        if served is not None:
            self._remove(key)
        self._add(key, new, spec)

    def _add(self, key: Key, obj: Object, spec: SandboxPoolSpec) -> None:
        owner = owner_of(obj)
        pods = self._pod_runtime(owner, spec)
        runtime = SimulatedRuntime(self._host) if spec.runtime == "simulated" else pods
        pool = Pool(
            spec,
            runtime,
            self._pool_key,
            self._clock,
            name=owner.name,
            scope=owner.namespace,
            job=owner.job,
        )
        if isinstance(runtime, PodRuntime):
            runtime.on_room = pool.wake
            pool.on_state = partial(self._marks.note, owner)
            self._surroundings.expect(obj, spec)
        loop = asyncio.get_running_loop().create_task(pool.keep_warm_loop())
        served = self.served[key] = Served(obj, pool, runtime, pods, loop)
        for pod in list(self._pods_of(owner.uid)):
            self._pod_of(served, None, pod)
        self._status.begin(obj, key)
        _log.info(
            "pool_added", namespace=key.namespace, pool=key.name, warm=spec.warm, max=spec.max
        )

    def _pod_runtime(self, owner: Owner, spec: SandboxPoolSpec) -> PodRuntime:
        return PodRuntime(
            self._kube,
            owner,
            spec,
            self._config.pods(),
            self._bucket,
            deletions=self._deletions,
            leads=lambda: self._leads() and self._surroundings.may_start(owner.uid),
            clock=self._clock,
        )

    def _remove(self, key: Key) -> None:
        self._status.forget(key)
        if (served := self.served.pop(key, None)) is None:
            return
        self._surroundings.forget(uid_of(served.obj))
        _log.info("pool_removed", namespace=key.namespace, pool=key.name)
        task = asyncio.get_running_loop().create_task(_close(served))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # ── pods ──

    def _on_pod(self, old: Object | None, new: Object | None) -> None:
        pod = new or old or {}
        (self._marks.forget if new is None else self._marks.seen)(pod)
        owner = owner_uid(pod)
        for served in self.served.values():
            if uid_of(served.obj) == owner:
                self._pod_of(served, old, new)
                return

    def _pod_of(self, served: Served, old: Object | None, new: Object | None) -> None:
        if served.pods.on_pod(old, new) or new is None:
            return
        name, image, running = served.pods.adopt(new)
        if served.pods is served.runtime:
            served.pool.adopt(name, image, running)
        else:
            running.kill()

    def _all_pods(self) -> Iterator[Object]:
        for informer in self._pods:
            yield from informer.objects.values()

    def _pods_of(self, owner: str) -> Iterator[Object]:
        return (pod for pod in self._all_pods() if owner_uid(pod) == owner)

    def _with_pods(self) -> Iterator[tuple[Object, SandboxPoolSpec]]:
        for served in self.served.values():
            if isinstance(served.runtime, PodRuntime):
                yield served.obj, served.pool.spec

    # ── status ──

    async def _status_loop(self) -> None:
        while True:
            for key in [*self.served, *self._refused]:
                await self._write_status(key)
            await self._clock.sleep(STATUS_SECONDS)

    async def _write_status(self, key: Key) -> None:
        if key in self._refused:
            obj, problem = self._refused[key]
            await self._status.write(
                key,
                lambda earlier, now: pool_conditions.refused(
                    problem, generation=_generation(obj), earlier=earlier, now=now
                ),
            )
        elif (served := self.served.get(key)) is not None:
            pool = served.pool
            trouble = self._surroundings.trouble(uid_of(served.obj)) or pool.trouble()
            await self._status.write(
                key,
                lambda earlier, now: pool_conditions.status(
                    pool.spec,
                    pool.counts(),
                    trouble,
                    generation=_generation(served.obj),
                    earlier=earlier,
                    now=now,
                ),
            )


async def _close(served: Served) -> None:
    served.loop.cancel()
    await asyncio.gather(served.loop, return_exceptions=True)
    try:
        await served.pool.close()
        if isinstance(served.runtime, PodRuntime):
            left = CLOSE_SECONDS
            while served.runtime.names() and (left := left - 1.0) > 0:
                await asyncio.sleep(1.0)
    finally:
        served.close()


def _raw(obj: Object) -> Any:
    return obj.get("spec") or {}


def _spec_of(obj: Object) -> SandboxPoolSpec | str:
    """The spec, or what is wrong with it."""
    try:
        spec = SandboxPoolSpec.model_validate(_raw(obj))
    except ValidationError as error:
        fault = error.errors()[0]
        return f"{dotted(('spec', *fault['loc']))}: {fault['msg']}"
    for problem in pool_problems(spec):
        return str(problem._replace(path=("spec", *problem.path)))
    if spec.egress == "gateway" and needs_policy(obj):
        return "spec.egress: gateway is for pools of an RLJob: no other has gateways; use another"
    return spec


def _generation(obj: Object) -> int:
    return int(obj["metadata"].get("generation", 0))


def _trim_pod(pod: Object) -> Object:
    """What is looked at: a sandbox's pod holds its guest's configuration, key included."""
    metadata = pod["metadata"]
    metadata.pop("managedFields", None)
    pod["spec"] = {"nodeName": (pod.get("spec") or {}).get("nodeName", "")}
    return pod
