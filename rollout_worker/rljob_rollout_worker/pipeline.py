"""(1)-(4) The staged dispatcher.

                    ┌─ ahead of the model: `ahead` ─┐
    ledger ──lease──► acquire ─────► setup ───────────► run ───────────► reward ─────► deliver ──► ledger
                      slots          slots              slots            slots         until answered
                      deadline       deadline           run deadline     deadline
                      ▲                                  │ export, release │
                      └──── a fresh sandbox ◄────────────┘ (freshSandbox)  │
    heartbeat ─ already_done, hopeless ─► cancel ─► close ◄────────────────┴─ failure ─► fail ─► ledger

Consumes leases, only while the engine names a version; produces completions. Each attempt is one
task that walks through the stages; each stage has slots of its own, a queue in order of urgency
(validation, then the oldest group, so that no group waits long for its last member) and a deadline
that starts with the slot.

No stage can block another for ever, because waiting goes one way only:

    place ahead ──► acquire slot ──► sandbox ──► setup, run or reward slot ──► engine

Who waits holds only what stands to the left; nobody waits for a sandbox while it holds one, and no
setup, run or reward slot is held by anyone who waits for a sandbox. So a queue empties within (its
length / its slots) × its deadline. `ahead` bounds the sandboxes that are made ready before the
model has room for them.

What unblocks the loops: an attempt that ends wakes `lease_loop` at once; else it asks again after
what the ledger says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog

from rljob import telemetry
from rljob.clock import Clock
from rljob.errors import CorruptError, DeadlineError, InfraError, StoreError, TaskError, UserError
from rljob.ids import EpisodeId, PolicyVersion
from rljob.ledger.types import Lease
from rljob.trajectory import Trajectory
from rljob_rollout_worker.delivery import Delivery, WorkerLedger
from rljob_rollout_worker.episode import Episode
from rljob_rollout_worker.gate import SwitchGate
from rljob_rollout_worker.slots import Priority, Slots

LONGEST_NAP_SECONDS = 2.0
LOOK_SECONDS = 0.2
"""How soon an idle worker sees that its engine has another version."""
CLOSE_SECONDS = 60.0
"""Bound of giving back what a cancelled attempt holds; the calls have shorter deadlines of their own."""
CONCLUDE_SECONDS = 5.0
"""What answers that are under way when the job ends may take to reach the completion log."""
STAGES = ("acquire", "setup", "run", "reward", "deliver")

_log = structlog.get_logger("rljob.pipeline")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How many attempts at once. `capacity` bounds all that are open."""

    capacity: int
    acquire: int
    setup: int
    run: int
    reward: int
    ahead: int


class StageSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of the stages; run has its own clock (`EngineClock`)."""

    acquire: float
    setup: float
    reward: float


class Attempt(msgspec.Struct, kw_only=True, eq=False):
    """One open lease."""

    lease: Lease
    stage: str = "acquire"
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> tuple[EpisodeId, int]:
        """What the ledger calls it."""
        return self.lease.episode, self.lease.attempt

    @property
    def priority(self) -> Priority:
        """Validation first, then the oldest group."""
        return (0 if self.lease.validation else 1, self.lease.row_index)

    @property
    def may_sample(self) -> bool:
        """Whether the model has not finished with it."""
        return self.stage in ("acquire", "setup", "run")


class Pipeline:
    """Runs leases.

    Args:
        ledger: Where leases come from.
        delivery: Where results go.
        make_episode: Makes the episode of a lease; raises UserError for a row that cannot be run.
        current: The version that the engine names now; None: lease nothing.
        limits: Concurrency.
        seconds: Deadlines.
        identity: (worker, boot id).
        clock: Time.
    """

    def __init__(
        self,
        *,
        ledger: WorkerLedger,
        delivery: Delivery,
        make_episode: Callable[[Lease], Episode],
        current: Callable[[], PolicyVersion | None],
        limits: Limits,
        seconds: StageSeconds,
        identity: tuple[str, str],
        clock: Clock,
        gate: SwitchGate | None = None,
    ) -> None:
        self._ledger, self._delivery, self._make_episode = ledger, delivery, make_episode
        self._current, self._limits, self._identity, self._clock = current, limits, identity, clock
        self._slots = {
            name: Slots(getattr(limits, name)) for name in ("acquire", "setup", "run", "reward")
        }
        self._ahead = Slots(limits.ahead)
        self._seconds = {name: getattr(seconds, name) for name in seconds.__struct_fields__}
        self._open: dict[tuple[EpisodeId, int], Attempt] = {}
        self._changed = asyncio.Event()
        self._store_lost_since: float | None = None
        self.gate = gate
        self.stopping = False
        self.finished = False
        """The ledger said that the job is over."""
        self.waiting_for = "engine"
        """Why the lease loop has nothing to start."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the first error that is no attempt's own; the worker ends with it."""
        self.completed = self.failed = 0
        self.on_tokens: Callable[[int], None] = lambda _tokens: None

    @property
    def attempts(self) -> list[Attempt]:
        """Open attempts."""
        return list(self._open.values())

    def num_sampling(self) -> int:
        """Training attempts that the model has not finished with."""
        return sum(a.may_sample and not a.lease.validation for a in self._open.values())

    # ── leases ──

    async def lease_loop(self) -> None:
        """Ask for work while there is room. Ends when the worker stops or the job is over."""
        while not (self.stopping or self.finished):
            self._changed.clear()
            began, ran = self._clock.monotonic(), len(self._open)
            nap = await self._lease_once()
            await self._nap(nap)
            if ran < self._limits.capacity and nap:
                waited = self._clock.monotonic() - began
                telemetry.ROLLOUT_WAITING_SECONDS.inc(waited, reason=self.waiting_for or "none")

    async def _lease_once(self) -> float:
        """One request; how long to wait before the next."""
        free, version = self._limits.capacity - len(self._open), self._current()
        if version is None or free <= 0:
            self.waiting_for = "engine" if version is None else "slots"
            return LOOK_SECONDS if version is None else LONGEST_NAP_SECONDS
        if self.gate is not None and not self.gate.leases_may_start:
            self.waiting_for = "weights"
            return LOOK_SECONDS / 4
        try:
            reply = await self._ledger.lease(*self._identity, version, free)
        except StoreError as error:
            return self._store_lost(error)
        self._store_lost_since = None
        for lease in reply.leases:
            self._start(lease)
        self.waiting_for = "" if reply.leases else reply.reason or ""
        self.finished = reply.reason == "finished"
        if self.gate is not None:
            self.gate.exhausted = None if reply.leases else version
        return (
            0.0 if reply.leases else min(max(reply.retry_after_seconds, 0.02), LONGEST_NAP_SECONDS)
        )

    def _store_lost(self, error: StoreError) -> float:
        now = self._clock.monotonic()
        self._store_lost_since = self._store_lost_since or now
        if now - self._store_lost_since > self._delivery.outage_seconds:
            raise error
        self.waiting_for = "store"
        return 0.5

    async def _nap(self, seconds: float) -> None:
        """Until an attempt ends or the engine has another version, at most so long."""
        version, end = self._current(), self._clock.monotonic() + seconds
        while (left := end - self._clock.monotonic()) > 0:
            if self._changed.is_set() or self._current() != version:
                return
            await self._wait(min(left, LOOK_SECONDS))

    async def _wait(self, seconds: float) -> None:
        waiter = asyncio.ensure_future(self._changed.wait())
        sleeper = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({waiter, sleeper}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            sleeper.cancel()

    def _start(self, lease: Lease) -> None:
        attempt = Attempt(lease=lease)
        if attempt.key in self._open:  # the answer to a repeated request
            return
        self._open[attempt.key] = attempt
        telemetry.ATTEMPTS.inc(answer="leased")
        attempt.task = asyncio.create_task(
            self._flow(attempt), name=f"episode-{lease.episode}.{lease.attempt}"
        )
        attempt.task.add_done_callback(lambda task: self._ended(attempt, task))

    def _ended(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        self._open.pop(attempt.key, None)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) and not self.broken.done():
            self.broken.set_exception(error)

    # ── one attempt ──

    async def _flow(self, attempt: Attempt) -> None:
        """Walk through the stages; what went wrong is told to the ledger."""
        episode: Episode | None = None
        task, evidence = "", ""
        try:
            episode = self._make_episode(attempt.lease)
            task = episode.task_name
            try:
                trajectory = await self._stages(attempt, episode)
            finally:
                evidence = episode.evidence
                await episode.close()
        except (InfraError, TaskError, UserError, CorruptError) as error:  # boundary: stages
            reason = f"{attempt.stage}: {type(error).__name__}: {error}"
            telemetry.FAILURES.inc(stage=attempt.stage, error=type(error).__name__)
            attempt.stage = "deliver"
            self.failed += 1
            await self._delivery.fail(*attempt.key, reason, evidence or reason, task)
        else:
            attempt.stage = "deliver"
            self.on_tokens(trajectory.num_action_tokens)
            answer = await self._delivery.complete(*attempt.key, trajectory)
            self.completed += answer == "accepted"

    async def _stages(self, attempt: Attempt, episode: Episode) -> Trajectory:
        urgency = attempt.priority
        async with self._ahead.slot(urgency):
            await self._stage("acquire", attempt, episode, urgency, episode.acquire)
            await self._stage("setup", attempt, episode, urgency, episode.setup)
            await self._slots["run"].enter(urgency)
        try:
            attempt.stage = "run"
            await self._timed("run", episode, episode.run())
            await self._bounded("reward", episode.export())
        finally:
            self._slots["run"].leave()
        attempt.stage = "reward"
        if episode.wants_fresh_sandbox:
            # most urgent of all: a group waits for this last step
            await self._stage(
                "acquire", attempt, episode, (-1, urgency[1]), episode.acquire, name="reward"
            )
        await self._stage("reward", attempt, episode, urgency, episode.reward)
        return episode.trajectory()

    async def _stage(
        self,
        stage: str,
        attempt: Attempt,
        episode: Episode,
        urgency: Priority,
        work: Callable[[], Awaitable[None]],
        *,
        name: str = "",
    ) -> None:
        attempt.stage = name or stage
        async with self._slots[stage].slot(urgency):
            await self._timed(stage, episode, self._bounded(stage, work()))

    async def _bounded(self, stage: str, work: Awaitable[None]) -> None:
        limit = self._seconds[stage]
        deadline = asyncio.timeout(limit)
        try:
            async with deadline:
                await work
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineError(f"{stage} was not done within {limit:g} s") from None

    async def _timed(self, stage: str, episode: Episode, work: Awaitable[None]) -> None:
        began = self._clock.monotonic()
        try:
            await work
        finally:
            seconds = self._clock.monotonic() - began
            episode.stage_seconds[stage] = episode.stage_seconds.get(stage, 0.0) + seconds
            telemetry.STAGE_SECONDS.observe(seconds, stage=stage)

    # ── endings ──

    def cancel(self, attempts: Iterable[Attempt]) -> list[asyncio.Task[None]]:
        """Begin to end attempts without telling the ledger; the tasks end when they hold nothing."""
        tasks = [attempt.task for attempt in attempts if attempt.task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def drop(self, attempts: Iterable[Attempt]) -> None:
        """`cancel`, and wait for it."""
        if tasks := self.cancel(attempts):
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    async def hand_back(self, attempts: Iterable[Attempt]) -> None:
        """End attempts and give their leases back, uncounted."""
        chosen = list(attempts)
        await self.drop(chosen)
        try:
            await self._delivery.release([attempt.key for attempt in chosen])
        except StoreError as error:  # then the leases end by themselves, at their time
            _log.warning("leases_not_released", reason=str(error))

    async def hand_back_sampling(self) -> None:
        """Hand back the training attempts that the model has not finished with."""
        await self.hand_back(a for a in self.attempts if a.may_sample and not a.lease.validation)

    async def conclude(self) -> None:
        """The job is over: end what runs; what is being delivered may still be written down."""
        delivering = [a for a in self.attempts if a.stage == "deliver"]
        await self.drop(a for a in self.attempts if a.stage != "deliver")
        if tasks := [a.task for a in delivering if a.task is not None]:
            await asyncio.wait(tasks, timeout=CONCLUDE_SECONDS)

    async def drain(self, seconds: float, is_hopeless: Callable[[], bool]) -> None:
        """Lease no more, finish what ends within `seconds` (while it is not hopeless), hand back the rest."""
        self.stopping = True
        self._changed.set()
        end = self._clock.monotonic() + seconds
        while self._open and self._clock.monotonic() < end and not is_hopeless():
            await self._nap(0.25)
            self._changed.clear()
        left = self.attempts
        _log.info("drained", handed_back=len(left))
        await self.hand_back(left)
