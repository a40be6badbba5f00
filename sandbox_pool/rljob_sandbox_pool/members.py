"""The sandboxes of one pool: started, adopted, verified, cleaned, ended. Who holds them is the pool's to know.

start, adopt ─► STARTING ─ verify ─► READY ─► CLAIMED ─► RESETTING ─► READY         each ─► ENDING ─► gone
                                                              └─ unclean ─► QUARANTINED
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from rljob import telemetry
from rljob.api.rljob_types import SandboxLimits, SandboxPoolSpec
from rljob.clock import Clock
from rljob.errors import SandboxError
from rljob_sandbox_pool import sizing
from rljob_sandbox_pool.decide import Seen
from rljob_sandbox_pool.guest.claims import sandbox_key
from rljob_sandbox_pool.leases import ClaimRequest
from rljob_sandbox_pool.member import Health, Member, MemberState, UncleanError
from rljob_sandbox_pool.ready_queue import ReadyQueue
from rljob_sandbox_pool.runtimes.base import RunningSandbox, Runtime, SandboxSpec, Trouble
from rljob_sandbox_pool.starts import Failures

END_SECONDS = 10.0
FAILURES_SHOWN = 3
"""Starts that fail in a row before the pool's health says so."""
FORGET_SECONDS = 60.0
"""Failures are forgotten where nothing was tried again for so long after the pause."""
STARTS_FAILING = "StartsFailing"
"""Reason of a trouble: sandboxes are tried and fail."""
_log = structlog.get_logger("rljob.sandbox_pool")


class Members:
    """See the picture above. Belongs to one event loop.

    Args:
        runtime: Starts the sandboxes.
        pool_key: Where the sandboxes' own keys come from.
        clock: Time.
        name: The pool's name.
        scope: What tells its sandboxes from those of pools of the same name elsewhere.
        title: The pool in metrics and log lines.
        on_change: Called whenever a sandbox comes into another state.
        on_state: Told which.
        on_held: Told about an adopted sandbox that a claim holds.
        on_end: Told about a sandbox that serves no more.
        is_wanted: Asked about a sandbox that is clean: it may serve.
    """

    def __init__(
        self,
        runtime: Runtime,
        pool_key: str,
        clock: Clock,
        *,
        name: str,
        scope: str,
        title: str,
        on_change: Callable[[], None],
        on_state: Callable[[Member], None],
        on_held: Callable[[Member, Health], None],
        on_end: Callable[[Member], object],
        is_wanted: Callable[[Member], bool],
    ) -> None:
        self.by_id: dict[str, Member] = {}
        self.queue: ReadyQueue[Member] = ReadyQueue(self._granted, self._ready)
        self.failures: dict[str, Failures] = {}
        """By image, where the last start failed."""
        self.num_started = self.num_failed = 0
        self.is_closing = False
        self.fault: BaseException | None = None
        """What something that was spawned failed of: an error of ours."""
        self._runtime, self._pool_key, self._clock = runtime, pool_key, clock
        self._name, self._scope, self._title = name, scope, title
        self._on_change, self._on_state = on_change, on_state
        self._on_held, self._on_end, self._is_wanted = on_held, on_end, is_wanted
        self._states: Counter[MemberState] = Counter()
        self._tasks: set[asyncio.Task[object]] = set()

    # ── looked at ──

    def counts(self) -> sizing.Counts:
        """Members by state."""
        states = {state.value: num for state, num in self._states.items()}
        return sizing.Counts(**states, waiting=self.queue.num_waiting)

    def seen(self) -> list[Seen]:
        """For `decide`."""
        return [self.see(member) for member in self.by_id.values()]

    def see(self, member: Member) -> Seen:
        """One of them."""
        return Seen(
            id=member.id,
            image=member.image,
            state=member.state,
            since=member.since,
            born=member.born,
            is_outdated=self._runtime.is_outdated(member.running),
            is_stuck=self._is_stuck(member),
            is_unheard=self._may_be_held(member),
            job=member.job,
            grown=member.grown,
        )

    def num_unheard(self) -> int:
        """Adopted sandboxes that may hold a claim which is not known yet."""
        return sum(map(self._may_be_held, self._starting()))

    def trouble(self) -> Trouble | None:
        """Why sandboxes do not come up; None: they do, or none is wanted."""
        for image, failures in self.failures.items():
            if failures.num >= FAILURES_SHOWN:
                of = f" of {image}" if len(self.failures) > 1 else ""
                return Trouble(STARTS_FAILING, f"starts{of} fail: {failures.problem}")
        return next(filter(None, (m.running.trouble() for m in self._starting())), None)

    def _starting(self) -> list[Member]:
        return [m for m in self.by_id.values() if m.state is MemberState.STARTING]

    def _may_be_held(self, member: Member) -> bool:
        """It was adopted, has run, and has not said yet what it is."""
        return member.is_unheard and not self._is_stuck(member)

    def _is_stuck(self, member: Member) -> bool:
        return member.state is MemberState.STARTING and member.running.trouble() is not None

    def forget_failures(self) -> None:
        """Of images that nobody wants any more: the next start would be long since."""
        now, starting = self._clock.monotonic(), {member.image for member in self._starting()}
        for image, failures in list(self.failures.items()):
            if image not in starting and now > failures.no_start_before + FORGET_SECONDS:
                del self.failures[image]

    # ── one of them ──

    def start(self, image: str, pool: SandboxPoolSpec) -> None:
        """One more."""
        used = {member.index for member in self.by_id.values()}
        index = next(i for i in range(len(used) + 1) if i not in used)
        sandbox_id = f"{self._name}-{secrets.token_hex(5)}"
        spec = SandboxSpec(
            id=sandbox_id,
            key=self._key(sandbox_id),
            index=index,
            limits=pool.limits,
            image=image,
            writable_paths=tuple(pool.writable_paths),
            canary=pool.recycle.canary,
        )
        try:
            running = self._runtime.start(spec)
        except SandboxError as error:
            self._failed(image, str(error), began=self._clock.monotonic())
            return
        self.num_started += 1
        self.spawn(self._verify(self._add(spec, running)))

    def adopt(
        self, sandbox_id: str, image: str, running: RunningSandbox, limits: SandboxLimits
    ) -> None:
        """Take over a sandbox that an earlier pool manager started: it is what its guest says it is."""
        spec = SandboxSpec(
            id=sandbox_id, key=self._key(sandbox_id), index=-1, limits=limits, image=image
        )
        member = self._add(spec, running)
        member.is_unheard = True
        self.spawn(self._verify(member, adopted=True))

    async def reset(self, member: Member) -> None:
        """CLAIMED → RESETTING → READY, QUARANTINED, or its end."""
        if self._is_let_go(member):
            return
        self._enter(member, MemberState.RESETTING)
        try:
            await member.reset()
        except UncleanError as error:
            telemetry.SANDBOX_RESETS.inc(pool=self._title, result="quarantined")
            self._quarantine(member, error.evidence)
            return
        except SandboxError as error:
            telemetry.SANDBOX_RESETS.inc(pool=self._title, result="failed")
            self.end(member, f"reset: {error}")
            return
        telemetry.SANDBOX_RESETS.inc(pool=self._title, result="verified")
        self._ready(member)

    def _enter(self, member: Member, state: MemberState) -> None:
        """It comes into a state."""
        before, member.state = member.state, state
        self._states[before] -= 1
        self._states[state] += 1
        earlier, member.since = member.since, self._clock.monotonic()
        if before is MemberState.STARTING:
            member.grown = member.since
        if state is MemberState.CLAIMED:
            self.queue.took(member.job)
            if before is MemberState.READY:
                telemetry.SANDBOX_IDLE_SECONDS.observe(member.since - earlier, pool=self._title)
        else:
            member.claim_id = member.owner = ""
        self._on_state(member)
        self._on_change()
        if before is MemberState.CLAIMED:
            self.queue.gave_back(member.job)

    def end(self, member: Member, problem: str, *, failed: bool = True) -> None:
        """Kill it; with a problem, say so. What is left of a claim on it is the client's error to see.

        Args:
            member: Which.
            problem: Why; empty: it is only not needed any more.
            failed: A start that ends counts as one that failed.
        """
        if self._is_let_go(member):
            return
        if problem:
            _log.warning(
                "sandbox_replaced", sandbox=member.id, state=member.state.value, reason=problem
            )
        if member.state is MemberState.STARTING and failed:
            self._failed(member.image, problem, began=member.since)
        self._leave(member)

    def spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Run something until it is done or the pool closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()):
            self.fault = fault
            self._on_change()

    # ── their end ──

    async def close(self) -> None:
        """End every sandbox and wait until nothing of them is left."""
        self._stop()
        members = list(self.by_id.values())
        for member in members:
            self._states[member.state] -= 1
            self._states[MemberState.ENDING] += 1
            member.state = MemberState.ENDING
            member.running.kill()
            await member.aclose()
        if members:
            await asyncio.wait([member.running.ended for member in members], timeout=END_SECONDS)

    async def detach(self) -> None:
        """Let go of every sandbox as it is."""
        self._stop()
        for member in self.by_id.values():
            await member.aclose()

    def _stop(self) -> None:
        self.is_closing = True
        for task in list(self._tasks):
            task.cancel()

    # ── behind it ──

    def _key(self, sandbox_id: str) -> bytes:
        name = f"{self._scope}/{sandbox_id}" if self._scope else sandbox_id
        return sandbox_key(self._pool_key, name)

    def _add(self, spec: SandboxSpec, running: RunningSandbox) -> Member:
        member = Member(spec, running, now=self._clock.monotonic())
        self.by_id[member.id] = member
        self._states[member.state] += 1
        running.failed.add_done_callback(lambda failed: self._lost(member, failed.result()))
        running.ended.add_done_callback(lambda ended: self._gone(member, ended.result()))
        self._on_change()
        return member

    async def _verify(self, member: Member, *, adopted: bool = False) -> None:
        try:
            heard = await member.verify(self._runtime.start_seconds)
            if heard.state != "warm" and not adopted:
                raise SandboxError(
                    f"sandbox {member.id}: its guest calls itself {heard.state[:20]}"
                )
            known = await member.ask() if adopted else heard
        except SandboxError as error:
            self.end(member, str(error))
            return
        if member.state is not MemberState.STARTING:
            return
        telemetry.SANDBOX_STARTS.inc(pool=self._title, result="adopted" if adopted else "ready")
        self.failures.pop(member.image, None)
        if adopted:
            self._resume(member, known)
        else:
            self._ready(member)

    def _resume(self, member: Member, known: Health) -> None:
        member.uses, member.job, member.is_unheard = known.uses, known.job, False
        if known.state == "claimed" and known.claim is not None:
            member.claim_id, member.owner = known.claim.id, known.claim.owner
            self._enter(member, MemberState.CLAIMED)
            self._on_held(member, known)
        elif known.state == "warm":
            self._ready(member)
        elif known.state == "dirty":
            self.spawn(self.reset(member))
        elif known.state == "quarantined":
            self._quarantine(member, UncleanError("it was put aside", known.evidence).evidence)
        else:
            self.end(member, f"its guest calls itself {known.state[:20]}", failed=False)

    def _granted(self, member: Member, request: ClaimRequest) -> None:
        """READY → CLAIMED: its guest is yet to be told."""
        # Its job from here on, whatever becomes of the call: the guest may have taken the claim, env and all.
        member.job = member.job or request.job
        member.claim_id = request.id
        member.owner = request.owner.name if request.owner else ""
        self._enter(member, MemberState.CLAIMED)

    def _ready(self, member: Member) -> None:
        if self._is_let_go(member):
            return
        if not self._is_wanted(member):
            self._leave(member)
            return
        self._enter(member, MemberState.READY)
        self.queue.put(member)

    def _quarantine(self, member: Member, evidence: list[str]) -> None:
        if self._is_let_go(member):
            return
        _log.warning("sandbox_quarantined", sandbox=member.id, job=member.job, evidence=evidence)
        member.evidence = evidence
        self._enter(member, MemberState.QUARANTINED)

    def _is_let_go(self, member: Member) -> bool:
        """It ends, or is the next pool manager's by now: nothing is to be done with it."""
        return self.is_closing or member.state is MemberState.ENDING

    def _leave(self, member: Member) -> None:
        self.queue.remove(member)
        self._on_end(member)
        self._enter(member, MemberState.ENDING)
        member.running.kill()

    def _lost(self, member: Member, how: str) -> None:
        """It serves no more; something of it may be left."""
        if self._is_let_go(member):
            return
        _log.warning("sandbox_died", sandbox=member.id, state=member.state.value, how=how)
        # One that was adopted is no start of ours: most such are on their way out.
        if member.state is MemberState.STARTING and member.index >= 0:
            self._failed(member.image, how, began=member.since)
        self._leave(member)

    def _gone(self, member: Member, how: str) -> None:
        """Nothing of it is left."""
        self._lost(member, how)
        if self.by_id.pop(member.id, None) is not None:
            self._states[member.state] -= 1
        self._on_change()
        if not self.is_closing:
            self.spawn(member.aclose())

    def _failed(self, image: str, problem: str, *, began: float) -> None:
        now = self._clock.monotonic()
        self.num_failed += 1
        telemetry.SANDBOX_STARTS.inc(pool=self._title, result="failed")
        if (failures := self.failures.get(image)) is None:
            failures = self.failures[image] = Failures(problem, now)
        else:
            failures.add(problem, began=began, now=now)
        _log.warning(
            "sandbox_did_not_start",
            pool=self._title,
            failures=failures.num,
            pause_seconds=failures.no_start_before - now,
            reason=problem,
        )
