"""Runs a plan as processes of this machine, until the job has ended.

    store ─► prepare (to its end) ─► sandbox-pool, engine-i, gateway-i, worker-i, trainer
                                          │ each kept up by a Supervisor
    watch_loop: ledger snapshot every second ─► facts ─► view, status.json, conditions, deadlines
    first of: trainer done │ a component fails the job │ a deadline │ a person stops it
    ─► trainer and workers end ─► engines, gateways, pool end ─► audit ─► store ends

Consumes the plan and its wiring; produces a `Verdict`. Waits for the job's end, at most `activeDeadlineSeconds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob.clock import Clock
from rljob_operator.drivers import tasks
from rljob_operator.drivers.folder import EventLog, RunFolder
from rljob_operator.drivers.observer import Observer
from rljob_operator.drivers.supervisor import ComponentFailed, Supervisor
from rljob_operator.drivers.watch import Watch
from rljob_operator.drivers.wiring import Wiring
from rljob_operator.policies.verdict import Verdict
from rljob_operator.render.component import Component, Kind

_FINISHED_SECONDS = 5.0
"""How long a trainer that ended well is given until the ledger says how."""
_NAMED_SECONDS = 60.0
"""A component that hangs is first named, when the progress deadline has passed, and so long after that killed."""


class LocalDriver:
    """One run of one job.

    Args:
        job: The manifest.
        plan: Its components, in start order.
        wiring: Fills in their placeholders.
        folder: The run's folder, laid and claimed.
        events: Where events and conditions go.
        observer: The ledger as the driver sees it.
        watch: Looks at the job every second.
        before_store_ends: Runs when every component but the store has ended (the audit).
        clock: Time.
    """

    def __init__(
        self,
        job: RLJob,
        plan: Sequence[Component],
        wiring: Wiring,
        folder: RunFolder,
        events: EventLog,
        *,
        observer: Observer,
        watch: Watch,
        before_store_ends: Callable[[], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._job, self._observer, self._watch, self._clock = job, observer, watch, clock
        self._before_store_ends = before_store_ends
        self._stop = asyncio.Event()
        self._hard = asyncio.Event()
        self.supervisors = {
            component.name: Supervisor(
                component,
                wiring,
                folder,
                events,
                backoff_limit=job.spec.lifecycle.backoff_limit,
                silence_seconds=job.spec.lifecycle.progress_deadline_seconds + _NAMED_SECONDS,
                may_end=self._job_has_ended,
                clock=clock,
            )
            for component in plan
        }

    def stop(self) -> None:
        """A person wants it to end: well at the first call, at once at the second."""
        if self._stop.is_set():
            self._hard.set()
        self._stop.set()

    async def run(self) -> Verdict:
        """Drive the job to its end and stop every process."""
        try:
            return await self._drive()
        finally:
            await self._stop_all()

    async def _drive(self) -> Verdict:
        lives = {
            name: asyncio.create_task(supervisor.run(self._dependencies(supervisor)), name=name)
            for name, supervisor in self.supervisors.items()
        }
        ends = [
            asyncio.create_task(self._watch.run(self.supervisors), name="watch"),
            asyncio.create_task(self._stop.wait(), name="stop"),
            asyncio.create_task(self._active_deadline(), name="active deadline"),
        ]
        try:
            return await self._first_end(lives, ends)
        finally:
            await tasks.end(*lives.values(), *ends)

    async def _first_end(
        self, lives: dict[str, asyncio.Task[None]], ends: Sequence[asyncio.Task[Any]]
    ) -> Verdict:
        jobs = {
            name
            for name, supervisor in self.supervisors.items()
            if supervisor.component.kind is Kind.JOB
        }
        pending: set[asyncio.Task[Any]] = {*lives.values(), *ends}
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    task.result()  # a watch that breaks is an error of ours and propagates
                except ComponentFailed as failure:
                    decision = failure.decision
                    return Verdict(
                        conditions.PHASE_FAILED,
                        decision.reason,
                        decision.message,
                        decision.exit_code,
                    )
                if task.get_name() == "stop":
                    return Verdict(
                        conditions.PHASE_STOPPED,
                        conditions.REASON_STOPPED,
                        "stopped by a person",
                        130,
                    )
                if task.get_name() == "active deadline":
                    return Verdict(
                        conditions.PHASE_FAILED,
                        conditions.REASON_ACTIVE_DEADLINE,
                        self._too_long(),
                        1,
                    )
                if task.get_name() in jobs:
                    return await self._outcome()

    async def _outcome(self) -> Verdict:
        """How the job ended, as its trainer told the ledger."""
        phase, message = await self._observer.outcome(_FINISHED_SECONDS)
        if phase == conditions.PHASE_SUCCEEDED:
            return Verdict(phase, conditions.REASON_STEPS_DONE, message, 0)
        return Verdict(
            conditions.PHASE_FAILED,
            conditions.REASON_TRAINER_FAILED,
            message or "the trainer gave up",
            1,
        )

    async def _job_has_ended(self) -> bool:
        return (await self._observer.outcome(_FINISHED_SECONDS))[0] is not None

    async def _active_deadline(self) -> None:
        seconds = self._job.spec.lifecycle.active_deadline_seconds
        await (self._clock.sleep(seconds) if seconds else asyncio.Event().wait())

    def _too_long(self) -> str:
        return f"the job ran for longer than activeDeadlineSeconds {self._job.spec.lifecycle.active_deadline_seconds}"

    def _dependencies(self, supervisor: Supervisor) -> list[Supervisor]:
        return [self.supervisors[name] for name in supervisor.component.depends]

    async def _stop_all(self) -> None:
        """Everything ends, in an order in which nobody loses what it still needs."""
        first = {"prepare", "trainer", "worker"}
        roles = [supervisor.component.role for supervisor in self.supervisors.values()]
        for wave in (first, set(roles) - first - {"store"}, {"store"}):
            if wave == {"store"} and not self._hard.is_set():
                await self._before_store_ends()
            await asyncio.gather(
                *(self._end(s) for s in self.supervisors.values() if s.component.role in wave)
            )

    async def _end(self, supervisor: Supervisor) -> None:
        """Stop well; at once as soon as the person insists."""
        well = asyncio.create_task(supervisor.stop())
        insisted = asyncio.create_task(self._hard.wait())
        await asyncio.wait({well, insisted}, return_when=asyncio.FIRST_COMPLETED)
        await tasks.end(insisted)
        if not well.done():
            await supervisor.kill()
        await well
