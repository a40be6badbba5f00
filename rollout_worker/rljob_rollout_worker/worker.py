"""One rollout worker put together: pipeline, gate, heartbeats, reports, and who watches over them.

parts ──► Worker.run ──► engine agent │ engine clock │ lease loop │ heartbeat loop │ report loop
                             any of them ends ──► the worker ends
stop (SIGTERM) ──► drain ──► ends well;   stop again ──► hands everything back at once
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from rljob.api.rljob_types import RLJob, Sampling
from rljob.clock import Clock
from rljob.errors import DataError
from rljob.gateway import Session, SessionSampling
from rljob.ids import PolicyVersion
from rljob.ledger.types import Lease
from rljob.task_config import Chat, Row
from rljob_rollout_worker.claims import Broker, Claims
from rljob_rollout_worker.completions import CompletionLog
from rljob_rollout_worker.delivery import OUTAGE_SECONDS, Delivery, WorkerLedger
from rljob_rollout_worker.engine_clock import EngineClock
from rljob_rollout_worker.episode import Episode, Gateway, Ticket, World
from rljob_rollout_worker.gate import SwitchGate
from rljob_rollout_worker.pipeline import Limits, Pipeline, StageSeconds
from rljob_rollout_worker.plugins import Bench, benches
from rljob_rollout_worker.presence import Presence
from rljob_rollout_worker.prompts import Prompts

BURST = 16
"""Slots of the short stages: enough to feed the model, few enough not to swamp broker and CPU when a batch starts."""
ENGINE_GONE_SECONDS = 5.0
"""A draining worker whose engine has been away for so long hands back what it has."""

_log = structlog.get_logger("rljob.worker")


class EngineWatch(Protocol):
    """What of the engine agent the worker uses."""

    before_switch: Callable[[PolicyVersion], Awaitable[None]] | None
    """Awaited before the engine is told to switch."""

    problem: str
    """Why there is no version, for people."""

    @property
    def current(self) -> PolicyVersion | None:
        """The version that the engine names now; None while it is not ready."""
        ...

    async def run(self) -> None:
        """Follow the ledger's policy. Never ends by itself."""
        ...


class Parts(msgspec.Struct, kw_only=True):
    """What a worker is made of; tests put fakes here."""

    job: RLJob
    worker: str
    boot_id: str
    artifacts: Path
    search_path: str
    """Folder where import-path plugins are looked up first."""
    ledger: WorkerLedger
    broker: Broker
    gateway: Gateway
    chat: Callable[[Session], Chat]
    engine: EngineWatch
    clock: Clock
    outage_seconds: float = OUTAGE_SECONDS


class Worker:
    """Belongs to the running event loop. Raises UserError where manifest and rows do not fit."""

    def __init__(self, parts: Parts) -> None:
        self._parts, job, clock = parts, parts.job, parts.clock
        self._prompts = Prompts(parts.artifacts, job.spec.data.train.seed)
        self._benches: Mapping[str, Bench] = benches(job, parts.search_path)
        self._check_rows()
        self._clock = EngineClock(clock, lambda: parts.engine.current is not None)
        self.claims = Claims(parts.broker, parts.artifacts / "claims" / f"{parts.worker}.txt")
        self.log = CompletionLog(parts.artifacts / "completions" / f"{parts.worker}.jsonl")
        self._world = self._make_world()
        delivery = Delivery(
            parts.ledger, self.log, parts.worker, parts.boot_id, clock, parts.outage_seconds
        )
        deadlines, identity = job.spec.rollout.deadlines, (parts.worker, parts.boot_id)
        self.pipeline = Pipeline(
            ledger=parts.ledger,
            delivery=delivery,
            make_episode=lambda lease: Episode(self._world, self.ticket(lease)),
            current=lambda: parts.engine.current,
            limits=limits_of(job),
            seconds=StageSeconds(
                acquire=deadlines.acquire_seconds,
                setup=deadlines.setup_seconds,
                reward=deadlines.reward_seconds,
            ),
            identity=identity,
            clock=clock,
        )
        self.presence = Presence(
            self.pipeline,
            parts.ledger,
            identity,
            clock,
            parts.outage_seconds,
            lambda: parts.engine.problem,
            lambda: self._world.reward_errors,
        )
        self.pipeline.on_tokens = self.presence.rate.add
        if not job.spec.rollout.updates_in_flight:
            self.pipeline.gate = self._make_gate()
            parts.engine.before_switch = self.pipeline.gate.before_switch
        self._stops = 0
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Drain; called again: hand everything back at once. Safe as a signal handler of the loop."""
        self._stops += 1
        self._stopped.set()

    async def stopped(self) -> None:
        """Wait until somebody has called `stop`."""
        await self._stopped.wait()

    def doing(self) -> str:
        """What runs, for people: how many attempts are in which stage."""
        stages = Counter(attempt.stage for attempt in self.pipeline.attempts)
        return ", ".join(f"{stage} {number}" for stage, number in stages.items())

    def ticket(self, lease: Lease) -> Ticket:
        """What a lease is to run. Raises DataError for a row that no Task Config fits."""
        spec = self._parts.job.spec
        rows, position = self._prompts.locate(lease.row_index, validation=lease.validation)
        row = rows.row(position)
        bench = bench_of(self._benches, row)
        sampling = spec.rollout.sampling
        if lease.validation and spec.data.validation is not None:
            sampling = spec.data.validation.sampling.over(sampling)
        return Ticket(
            episode=lease.episode,
            attempt=lease.attempt,
            row=row,
            row_index=lease.row_index,
            row_hash=rows.row_hash(position),
            bench=bench,
            sampling=sampling_of(sampling),
        )

    async def run(self) -> None:
        """Work until the job is over or the worker has been told to stop.

        Raises:
            FencedError: another process runs under this name.
            RLJobError: a loop gave up, see its docstring.
            RuntimeError: a loop ended that never ends.
        """
        recovered = await self.claims.recover()
        _log.info("worker_started", boot_id=self._parts.boot_id, claims_given_back=recovered)
        tasks = [asyncio.create_task(loop, name=name) for name, loop in self._loops().items()]
        stopped = asyncio.create_task(self._stopped.wait(), name="stop")
        try:
            await asyncio.wait(
                [*tasks, stopped, self.pipeline.broken], return_when=asyncio.FIRST_COMPLETED
            )
            self._raise_if_broken(tasks)
            if self.pipeline.finished:
                _log.info("job_is_over", open=len(self.pipeline.attempts))
                await self.pipeline.conclude()
            else:
                await self._drain(tasks)
        finally:
            await self._end([*tasks, stopped])

    async def _drain(self, tasks: list[asyncio.Task[None]]) -> None:
        """Drain with one eye on the loops: heartbeats and weights go on meanwhile."""
        seconds = self._parts.job.spec.rollout.deadlines.drain_seconds
        drained = asyncio.create_task(self.pipeline.drain(seconds, self._give_up), name="drain")
        others = [task for task in tasks if task.get_name() != "lease_loop"]
        await asyncio.wait(
            [drained, *others, self.pipeline.broken], return_when=asyncio.FIRST_COMPLETED
        )
        if not drained.done():
            drained.cancel()
        self._raise_if_broken(others)
        await drained

    def _give_up(self) -> bool:
        clock = self._clock
        return self._stops > 1 or clock.away_seconds() > ENGINE_GONE_SECONDS

    def _loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "engine_agent": self._parts.engine.run(),
            "engine_clock": self._clock.tick_loop(),
            "lease_loop": self.pipeline.lease_loop(),
            "heartbeat_loop": self.presence.heartbeat_loop(),
            "report_loop": self.presence.report_loop(),
        }

    def _raise_if_broken(self, tasks: list[asyncio.Task[None]]) -> None:
        if self.pipeline.broken.done():
            self.pipeline.broken.result()
        for task in tasks:
            if task.done():
                task.result()
                if not (task.get_name() == "lease_loop" and self.pipeline.finished):
                    raise RuntimeError(f"{task.get_name()} ended, which it never should")

    async def _end(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pipeline.drop(self.pipeline.attempts)
        self.pipeline.broken.cancel()
        await self.claims.aclose()
        await self.log.aclose()

    def _check_rows(self) -> None:
        """Every row has its Task Config and passes it: a bad one ends the worker now, with its line."""
        splits = (self._prompts.train, self._prompts.validation)
        for rows in (split for split in splits if split is not None):
            for position in range(len(rows)):
                row = rows.row(position)
                try:
                    bench_of(self._benches, row).check(row)
                except DataError as error:
                    where = f"{rows.where(position)}: {error.path}"
                    raise DataError(where, error.problem, error.fix) from None

    def _make_world(self) -> World:
        parts, spec = self._parts, self._parts.job.spec
        return World(
            job=parts.job.name,
            worker=parts.worker,
            model=spec.model.source,
            max_context_tokens=spec.model.max_context_length,
            deadlines=spec.rollout.deadlines,
            clock=parts.clock,
            engine_clock=self._clock,
            claims=self.claims,
            gateway=parts.gateway,
            chat=parts.chat,
        )

    def _make_gate(self) -> SwitchGate:
        parts, pipeline = self._parts, self.pipeline
        deadlines = parts.job.spec.rollout.deadlines
        return SwitchGate(
            finishes_batch=parts.job.spec.rollout.schedule != "async",
            limit_seconds=deadlines.acquire_seconds
            + deadlines.setup_seconds
            + deadlines.run_seconds,
            clock=parts.clock,
            current=lambda: parts.engine.current,
            num_running=pipeline.num_sampling,
            hand_back=pipeline.hand_back_sampling,
        )


def limits_of(job: RLJob) -> Limits:
    """This worker's share: of the episodes, and of the sandboxes that could hold them.

    An episode that could never get a sandbox is better left in the ledger, where another worker may lease it. Where
    their number changes, the fewest that may be up could do all of it.
    """
    rollout = job.spec.rollout
    workers = rollout.min_replicas or rollout.replicas
    used = {task.sandbox.pool for task in job.spec.tasks}
    boxes = sum(pool.max for pool in job.spec.sandbox_pools if pool.name in used)
    episodes = -(-rollout.max_concurrent_episodes // workers)
    capacity = max(1, min(episodes, boxes // workers or 1))
    burst = min(capacity, BURST)
    return Limits(
        capacity=capacity, acquire=burst, setup=burst, run=capacity, reward=burst, ahead=capacity
    )


def bench_of(table: Mapping[str, Bench], row: Row) -> Bench:
    """The Task Config that a row names. Raises DataError."""
    if (bench := table.get(row.task)) is None:
        raise DataError("task", f"{row.task!r} is not configured", "add it to spec.tasks")
    return bench


def sampling_of(sampling: Sampling) -> SessionSampling:
    """What the gateway is told, and the trajectory records."""
    return SessionSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens_per_turn=sampling.max_tokens_per_turn,
    )
