"""The operator's process, from start to end.

    configuration ─► may we do all we must? ─► stand by for the lease ─► lead ─► release the lease
                        no: exit 2                                        │
            informers ─ synced ─► kopf tells of RLJobs ─► passes ◄────────┘
            lease lost: exit 4 at once · a task or a watch dies: exit 1 · SIGTERM: exit 0 within seconds

Only the leader watches and writes. Every task here lasts until the end: one that ends by itself ends the process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, Protocol

import httpx
import structlog

from rljob.clock import Clock, SystemClock
from rljob.errors import MachineError, UserError
from rljob.kube.client import KubeClient
from rljob.kube.config import KubeConfig
from rljob.kube.errors import KubeError, NotFoundError
from rljob.kube.lease import LeaderLease, LeaseLostError
from rljob.kube.resources import RLJOB, SANDBOX_POOL, Object, Resource
from rljob_operator import operator_metrics as metrics
from rljob_operator.cluster_client import fenced_client
from rljob_operator.copies import CHILD_KINDS, OPTIONAL_KINDS, Children, Jobs, informers
from rljob_operator.decide import decide
from rljob_operator.events import EventPoster, Warnings
from rljob_operator.health import Health, HealthServer
from rljob_operator.leader import LEASE_NAME, LeaseGuard, end_now
from rljob_operator.ledgers import Ledgers
from rljob_operator.observe import Observer
from rljob_operator.observed import ClusterConfig
from rljob_operator.preflight import missing
from rljob_operator.reconcile import Reconciler
from rljob_operator.render.children import children as render
from rljob_operator.wake import Wakes
from rljob_operator.watch_audit import WatchAudit, watch_ages

START_SECONDS = 300.0
"""How long the API server may be away when the operator starts."""
SYNC_SECONDS = 120.0
"""How long the first lists may take."""
PASSES_END_SECONDS, KOPF_END_SECONDS = 4.0, 3.0
"""At the end: for passes under way, and for kopf. Together with the release below 10 s."""

_log = structlog.get_logger("rljob.operator")

Hear = Callable[[str | None, Object], None]


class JobWatch(Protocol):
    """Tells of RLJobs until it is stopped; kopf, in its own thread (`main.py`)."""

    async def run(self) -> None:
        """Until `stop`, or until it breaks. May end only then."""
        ...

    def stop(self) -> None:
        """End soon."""
        ...


class Options(NamedTuple):
    """Of the command line."""

    config: ClusterConfig
    broker_key: bytes
    identity: str
    host: str
    port: int


class OperatorProcess:
    """See the picture above.

    Args:
        options: Of the command line.
        kube: The API server.
        job_watch: Makes what tells of RLJobs.
        transport: For tests: what answers instead of the API server.
        clock: Time.
    """

    def __init__(
        self,
        options: Options,
        kube: KubeConfig,
        job_watch: Callable[[Hear], JobWatch],
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._options, self._kube, self._job_watch = options, kube, job_watch
        self._clock = clock or SystemClock()
        self._health = Health()
        self._stop = asyncio.Event()
        self._client = fenced_client(kube, lambda: self._lease.leads, transport)
        # The lease has a connection of its own: no pile of calls may keep it from being renewed.
        self._lease_client = KubeClient(
            kube, user_agent="rljob-operator-lease", transport=transport
        )
        self._lease = LeaderLease(
            self._lease_client, options.config.operator_namespace, LEASE_NAME, options.identity
        )

    async def run(self) -> int:
        """The exit code. Raises UserError for what whoever installed the operator must mend."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._client.aclose)
            stack.push_async_callback(self._lease_client.aclose)
            stack.enter_context(HealthServer(self._health, self._options.host, self._options.port))
            beat = asyncio.create_task(self._beat())
            stack.callback(beat.cancel)
            optional = await self._preflight()
            self._health.ready = True
            metrics.LEADER.set(0)
            if not await self._until_stop(self._lease.acquire()):
                return 0
            await self._lead(optional)
        return 0

    def stop(self) -> None:
        """End soon; what SIGTERM does."""
        self._stop.set()

    async def _beat(self) -> None:
        while True:
            self._health.beat()
            await self._clock.sleep(1.0)

    # ── before ──

    async def _preflight(self) -> list[Resource]:
        """Optional kinds that the cluster knows. Raises UserError: CRDs, rights or answers are missing."""
        deadline = self._clock.monotonic() + START_SECONDS
        while True:
            try:
                return await self._look_before()
            except KubeError as error:
                if self._clock.monotonic() > deadline or self._stop.is_set():
                    fix = "check the address and the operator's service account"
                    raise MachineError(self._kube.server, str(error), fix) from None
                _log.warning("api_server_not_reached", reason=str(error))
                await self._clock.sleep(2.0)

    async def _look_before(self) -> list[Resource]:
        # A review is a POST, and nobody leads yet: the lease's client has no fence.
        client, config = self._lease_client, self._options.config
        for kind in (RLJOB, SANDBOX_POOL):
            if not await is_served(client, kind):
                name = f"{kind.plural}.{kind.group}"
                raise MachineError(
                    "cluster", f"the CRD {name} is not installed", "install the chart's CRDs"
                )
        optional = [kind for kind in OPTIONAL_KINDS if await is_served(client, kind)]
        lacking = await missing(client, config.namespaces, config.operator_namespace, optional)
        if lacking:
            raise MissingRightsError([str(item) for item in lacking])
        return optional

    async def _until_stop(self, waiting: Awaitable[Any]) -> bool:
        """Whether it came to its end before we were told to stop. Raises what it raises."""
        task, stop = asyncio.ensure_future(waiting), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    # ── leading ──

    async def _lead(self, optional: Sequence[Resource]) -> None:
        """Until we are told to stop, or something that must last ends."""
        guard = LeaseGuard(self._lease)
        self._health.ready = False
        parts = Parts(self._options, self._client, optional, self._clock)
        watch = self._job_watch(parts.jobs.hear)
        hide_jobs = parts.show_jobs()
        tasks = [_task(self._hold(), "lease")]
        tasks += [_task(copy.run(), copy.resource.kind) for copy in parts.copies]
        try:
            async with asyncio.timeout(SYNC_SECONDS):
                await asyncio.gather(*(copy.synced.wait() for copy in parts.copies))
            parts.wakes.start(parts.reconciler.reconcile)
            ages = watch_ages(parts.copies, parts.audit, self._health, self._clock)
            tasks += [
                _task(watch.run(), "kopf"),
                _task(parts.audit.run(), "audit"),
                _task(ages, "watch ages"),
            ]
            self._health.ready = True
            await self._until_stop(_first_end(tasks))
        finally:
            self._health.ready = False
            _log.info("stops")
            watch.stop()
            await parts.wakes.aclose(PASSES_END_SECONDS)
            # Nothing writes from here on: the other replica need not wait for the rest.
            guard.close()
            await _end(tasks[:1])
            await self._lease.release()
            _log.info("lease_given_back")
            await _end(tasks)
            await parts.ledgers.aclose()
            hide_jobs()

    async def _hold(self) -> None:
        try:
            await self._lease.hold()
        except LeaseLostError:
            end_now()


class Parts:
    """What a leader is made of."""

    def __init__(
        self, options: Options, client: KubeClient, optional: Sequence[Resource], clock: Clock
    ) -> None:
        config = options.config
        self.wakes = Wakes(clock)
        self.jobs, self.children = Jobs(self.wakes.wake), Children(self.wakes.wake)
        self.ledgers = Ledgers(clock)
        self.copies = informers(client, self.children, (*CHILD_KINDS, *optional), config.namespaces)
        self.audit = WatchAudit(client, self.jobs, config.namespaces, clock)
        self.reconciler = Reconciler(
            client,
            config,
            options.broker_key,
            jobs=self.jobs,
            observer=Observer(client, self.children, self.ledgers, Warnings(client, clock), clock),
            ledgers=self.ledgers,
            poster=EventPoster(client, clock),
            decide=decide,
            render=render,
            crds=frozenset(f"{kind.plural}.{kind.group}" for kind in optional),
            clock=clock,
        )

    def show_jobs(self) -> Callable[[], None]:
        """Give every scrape the jobs as they are then; what is returned ends that."""
        from prometheus_client import REGISTRY

        def facts() -> list[metrics.JobFacts]:
            return [(job, self.ledgers.last(job["metadata"]["uid"])) for job in self.jobs.all()]

        collector: Any = metrics.JobCollector(facts)
        REGISTRY.register(collector)
        return lambda: REGISTRY.unregister(collector)


class MissingRightsError(UserError):
    """Verbs that the operator's role lacks; `str` gives one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("rbac", f"{len(lines)} verbs are missing", "")
        self.args = (tuple(lines),)
        self.lines = tuple(lines)

    def __str__(self) -> str:
        return "\n".join(self.lines)


async def is_served(client: KubeClient, kind: Resource) -> bool:
    """Whether the API server knows a kind. Raises KubeError."""
    try:
        answer = await client.call("GET", f"/apis/{kind.group}/{kind.version}")
    except NotFoundError:
        return False
    return any(item["name"] == kind.plural for item in answer.get("resources") or ())


async def _first_end(tasks: Sequence[asyncio.Task[None]]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    names = ", ".join(task.get_name() for task in done)
    raise RuntimeError(f"{names} ended, and may not")


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    kopf = [task for task in tasks if task.get_name() == "kopf"]
    if kopf:
        await asyncio.wait(kopf, timeout=KOPF_END_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _task(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(coroutine, name=name)
