"""The sandboxes of one pool: started, adopted, verified, cleaned, ended. Who holds them is the pool's to know.

start, adopt ─► STARTING ─ verify ─► READY ⇄ CLAIMED ─► RESETTING ─► READY          each ─► ENDING ─► gone
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from rljob import telemetry
from rljob.api.rljob_types import SandboxLimits
from rljob.clock import Clock
from rljob.errors import SandboxError
from rljob_sandbox_pool import sizing
from rljob_sandbox_pool.guest.claims import sandbox_key
from rljob_sandbox_pool.member import Health, Member, MemberState
from rljob_sandbox_pool.ready_queue import ReadyQueue
from rljob_sandbox_pool.runtimes.base import RunningSandbox, Runtime, SandboxSpec, Trouble

END_SECONDS = 10.0
FAILURES_SHOWN = 3
"""Starts that fail in a row before the pool's health says so."""
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
    ) -> None:
        self.by_id: dict[str, Member] = {}
        self.queues: dict[str, ReadyQueue[Member]] = {}
        """Of ready sandboxes, by image."""
        self.failures = 0
        """Starts that failed in a row."""
        self.no_start_before = 0.0
        """Monotonic: the end of a back-off."""
        self.last_problem = ""
        self.num_started = self.num_failed = 0
        self.is_closing = False
        self._runtime, self._pool_key, self._clock = runtime, pool_key, clock
        self._name, self._scope, self._title = name, scope, title
        self._on_change, self._on_state = on_change, on_state
        self._on_held, self._on_end = on_held, on_end
        self._tasks: set[asyncio.Task[object]] = set()
        self._failed_at = float("-inf")
        """When a start last counted as one that failed."""

    # ── looked at ──

    def counts_by_image(self) -> dict[str, sizing.Counts]:
        """Members by image and state."""
        states: dict[str, Counter[str]] = {image: Counter() for image in self.queues}
        for member in self.by_id.values():
            states[member.image][member.state.value] += 1
        for image, queue in self.queues.items():
            states[image]["waiting"] = queue.num_waiting
        return {image: sizing.Counts(**each) for image, each in states.items()}

    def starting(self) -> list[Member]:
        """Those whose guests were not heard yet, oldest first."""
        return [m for m in self.by_id.values() if m.state is MemberState.STARTING]

    def num_unheard(self) -> int:
        """Adopted sandboxes that may hold a claim which is not known yet."""
        return sum(member.index < 0 for member in self.starting())

    def held_images(self) -> set[str]:
        """Images of which no more is started while one that starts has no place to go, or cannot be pulled."""
        return {m.image for m in self.starting() if m.running.trouble() is not None}

    def trouble(self) -> Trouble | None:
        """Why sandboxes do not come up; None: they do, or none is wanted."""
        if self.failures >= FAILURES_SHOWN:
            return Trouble(STARTS_FAILING, f"starts fail: {self.last_problem}")
        return next(filter(None, (member.running.trouble() for member in self.starting())), None)

    # ── one of them ──

    def start(self, image: str, limits: SandboxLimits) -> None:
        """One more."""
        used = {member.index for member in self.by_id.values()}
        index = next(i for i in range(len(used) + 1) if i not in used)
        sandbox_id = f"{self._name}-{secrets.token_hex(5)}"
        spec = SandboxSpec(
            id=sandbox_id, key=self._key(sandbox_id), index=index, limits=limits, image=image
        )
        try:
            running = self._runtime.start(spec)
        except SandboxError as error:
            self._failed(str(error), began=self._clock.monotonic())
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
        self.queues.setdefault(image, ReadyQueue())
        self.spawn(self._verify(self._add(spec, running), adopted=True))

    async def reset(self, member: Member) -> None:
        """CLAIMED → RESETTING → READY, or its end."""
        self.enter(member, MemberState.RESETTING)
        try:
            await member.reset()
        except SandboxError as error:
            telemetry.SANDBOX_RESETS.inc(pool=self._title, result="failed")
            self.end(member, f"reset: {error}")
            return
        telemetry.SANDBOX_RESETS.inc(pool=self._title, result="verified")
        if member.state is MemberState.RESETTING:
            self._ready(member)

    def enter(self, member: Member, state: MemberState) -> None:
        """It comes into a state."""
        member.state, member.since = state, self._clock.monotonic()
        if state is not MemberState.CLAIMED:
            member.claim_id = member.owner = ""
        self._on_state(member)
        self._on_change()

    def end(self, member: Member, problem: str, *, failed: bool = True) -> None:
        """Kill it; with a problem, say so. What is left of a claim on it is the client's error to see.

        Args:
            member: Which.
            problem: Why; empty: it is only not needed any more.
            failed: A start that ends counts as one that failed.
        """
        if member.state is MemberState.ENDING:
            return
        if problem:
            _log.warning(
                "sandbox_replaced", sandbox=member.id, state=member.state.value, reason=problem
            )
        if member.state is MemberState.STARTING and failed:
            self._failed(problem, began=member.since)
        self._leave(member)

    def spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Run something until it is done or the pool closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ── their end ──

    async def close(self) -> None:
        """End every sandbox and wait until nothing of them is left."""
        self._stop()
        members = list(self.by_id.values())
        for member in members:
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
        self.failures = 0
        if adopted:
            self._resume(member, known)
        else:
            self._ready(member)

    def _resume(self, member: Member, known: Health) -> None:
        member.uses, member.job = known.uses, known.job
        if known.state == "claimed":
            if known.claim is not None:
                member.claim_id, member.owner = known.claim.id, known.claim.owner
            self.enter(member, MemberState.CLAIMED)
            self._on_held(member, known)
        elif known.state == "warm":
            self._ready(member)
        elif known.state == "dirty":
            self.spawn(self.reset(member))
        else:
            self.end(member, f"its guest calls itself {known.state[:20]}", failed=False)

    def _ready(self, member: Member) -> None:
        self.enter(member, MemberState.READY)
        self.queues[member.image].put(member)

    def _leave(self, member: Member) -> None:
        self.queues[member.image].remove(member)
        self._on_end(member)
        self.enter(member, MemberState.ENDING)
        member.running.kill()

    def _lost(self, member: Member, how: str) -> None:
        """It serves no more; something of it may be left."""
        if member.state is MemberState.ENDING:
            return
        _log.warning("sandbox_died", sandbox=member.id, state=member.state.value, how=how)
        # One that was adopted is no start of ours: most such are on their way out.
        if member.state is MemberState.STARTING and member.index >= 0:
            self._failed(how, began=member.since)
        self._leave(member)

    def _gone(self, member: Member, how: str) -> None:
        """Nothing of it is left."""
        self._lost(member, how)
        self.by_id.pop(member.id, None)
        self._on_change()
        if not self.is_closing:
            self.spawn(member.aclose())

    def _failed(self, problem: str, *, began: float) -> None:
        self.num_failed += 1
        self.last_problem = problem
        # Starts that were under way together fail together: one failure in a row, not many.
        if self.failures and began < self._failed_at:
            return
        self.failures += 1
        self._failed_at = self._clock.monotonic()
        pause = sizing.backoff_seconds(self.failures)
        self.no_start_before = self._clock.monotonic() + pause
        _log.warning(
            "sandbox_did_not_start",
            pool=self._title,
            failures=self.failures,
            pause_seconds=pause,
            reason=problem,
        )
