"""One warm pool: keeps sandboxes ready, hands them out, takes them back.

    start ─► verify ─► ready queue ─► claim ─► release ─► reset + verification ─┐
      ▲                    ▲                      │                             │
      │                    └──────────────────────│─────────────────────────────┘
      └── sizing ◄── died, expired, broken, worn out, did not verify

Consumes claims and releases; produces claimed sandboxes. Waits for a free place below `max`, for a start, for a
reset; what unblocks it is a release, a death or the end of a back-off. Every change wakes `keep_warm_loop`, which
sizes the pool.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog

from rljob import telemetry
from rljob.api.rljob_types import SandboxPool
from rljob.clock import Clock, SystemClock
from rljob.errors import SandboxError
from rljob.ids import new_token
from rljob.sandbox import ClaimAnswer, PoolStatus
from rljob_sandbox_pool import sizing
from rljob_sandbox_pool.guest.claims import sandbox_key
from rljob_sandbox_pool.leases import ClaimRequest, Lease, Leases, Owner
from rljob_sandbox_pool.member import Member, MemberState
from rljob_sandbox_pool.ready_queue import ReadyQueue
from rljob_sandbox_pool.reset import Fate, fate
from rljob_sandbox_pool.runtimes.base import Runtime, SandboxSpec

TICK_SECONDS = 1.0
"""How often expiry and idleness are looked at."""
IDLE_SECONDS = 120.0
"""A sandbox beyond `warm` that nobody wanted for so long is ended."""
CLAIM_TRIES = 4
"""Sandboxes tried for one claim before the claimer is told to come back."""
END_SECONDS = 10.0
RELEASE_SECONDS = 0.5
"""How long a release waits for its reset, which mostly takes a millisecond."""
FAILURES_SHOWN = 3
"""Starts that fail in a row before the pool's health says so."""

_log = structlog.get_logger("rljob.sandbox_pool")


class NoSandboxError(Exception):
    """No sandbox within the time that the claim may wait.

    Args:
        at_max: All places are taken: a release helps. Otherwise a start is under way, or backs off.
        message: Why.
        retry_after_seconds: When to ask again.
    """

    def __init__(self, at_max: bool, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.at_max, self.message, self.retry_after_seconds = at_max, message, retry_after_seconds


class Pool:
    """See the picture above. Belongs to one event loop; all its sandboxes end with `close`."""

    def __init__(
        self, spec: SandboxPool, runtime: Runtime, pool_key: str, clock: Clock | None = None
    ) -> None:
        self.spec = spec
        self._runtime, self._pool_key = runtime, pool_key
        self._clock = clock or SystemClock()
        self._leases = Leases(self._clock)
        self._members: dict[str, Member] = {}
        self._queue: ReadyQueue[Member] = ReadyQueue()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()
        self._failures = 0
        self._no_start_before = 0.0
        self._last_problem = ""
        self._num_started = self._num_failed = 0
        self._closing = False

    # ── claims ──

    async def claim(self, request: ClaimRequest) -> bytes:
        """Claim a sandbox; the JSON of a `ClaimAnswer`, the same for the same claim id. Raises NoSandboxError."""
        if lease := self._leases.get(request.id):
            return lease.answer
        if request.owner:
            self._release_earlier_boots(request.owner)
        began = self._clock.monotonic()
        for _ in range(CLAIM_TRIES):
            left = request.wait_seconds - (self._clock.monotonic() - began)
            if (member := await self._queue.get(left, self._changed.set)) is None:
                break
            if answer := await self._take(member, request):
                telemetry.SANDBOX_CLAIMS.inc(pool=self.spec.name, result="granted")
                telemetry.SANDBOX_CLAIM_SECONDS.observe(
                    self._clock.monotonic() - began, pool=self.spec.name
                )
                return answer
        telemetry.SANDBOX_CLAIMS.inc(pool=self.spec.name, result="exhausted")
        raise self._no_sandbox()

    async def _take(self, member: Member, request: ClaimRequest) -> bytes | None:
        """Make a ready sandbox the claim's; None where the sandbox would not."""
        self._enter(member, MemberState.CLAIMED)
        token = new_token()
        try:
            await member.claim(request.id, token, request.env, request.ttl_seconds)
        except SandboxError as error:
            telemetry.SANDBOX_CLAIMS.inc(pool=self.spec.name, result="failed")
            self._end(member, str(error))
            return None
        except asyncio.CancelledError:
            # Whoever claimed has hung up; whether the guest took the claim is not known.
            self._spawn(self._reset(member))
            raise
        answer = ClaimAnswer(request.id, member.id, member.url, token, member.boot_nonce)
        encoded = msgspec.json.encode(answer)
        expires = self._clock.monotonic() + request.ttl_seconds
        self._leases.add(Lease(request.id, member.id, expires, encoded, request.owner))
        return encoded

    def _release_earlier_boots(self, owner: Owner) -> None:
        for lease in self._leases.of_earlier_boots(owner):
            _log.info(
                "claim_forfeited", claim=lease.claim_id, sandbox=lease.sandbox_id, owner=owner.name
            )
            self._spawn(self.release(lease.claim_id))

    async def release(self, claim_id: str, *, broken: bool = False) -> bool:
        """Take a claim's sandbox back; False where there is no such claim.

        A reset is waited for, since it ends the token; one that takes long goes on by itself.
        """
        lease = self._leases.remove(claim_id)
        if lease is None or (member := self._members.get(lease.sandbox_id)) is None:
            return lease is not None
        if member.state is MemberState.CLAIMED:
            if fate(self.spec.recycle, uses=member.uses, broken=broken) is Fate.RESET:
                await asyncio.wait({self._spawn(self._reset(member))}, timeout=RELEASE_SECONDS)
            else:
                self._end(member, "broken" if broken else "")
        return True

    def kill(self, sandbox_id: str) -> None:
        """End a sandbox, whatever it does, as a crash of it would."""
        if member := self._members.get(sandbox_id):
            member.running.kill()

    def _no_sandbox(self) -> NoSandboxError:
        counts = self.counts()
        name = self.spec.name
        if counts.total >= self.spec.max:
            return NoSandboxError(
                True, f"all {self.spec.max} sandboxes of pool {name} are taken", 1.0
            )
        pause = max(0.2, min(self._no_start_before - self._clock.monotonic(), 10.0))
        problem = f" (last failure: {self._last_problem})" if self._failures else ""
        return NoSandboxError(False, f"no sandbox of pool {name} is ready yet{problem}", pause)

    # ── the pool's size ──

    async def keep_warm_loop(self) -> None:
        """Size the pool whenever something changed, a back-off ended, and every second."""
        while True:
            self._size()
            self._expire()
            self._publish()
            self._changed.clear()
            pause = self._no_start_before - self._clock.monotonic()
            try:
                async with asyncio.timeout(min(TICK_SECONDS, pause) if pause > 0 else TICK_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def counts(self) -> sizing.Counts:
        """Members by state."""
        states = [member.state for member in self._members.values()]
        return sizing.Counts(
            **{state.value: states.count(state) for state in MemberState},
            waiting=self._queue.num_waiting,
        )

    def status(self) -> PoolStatus:
        """For `GET /v1/pools`."""
        counts = self.counts()
        return PoolStatus(
            name=self.spec.name,
            runtime=self._runtime.name,
            warm=self.spec.warm,
            max=self.spec.max,
            ready=counts.ready,
            claimed=counts.claimed,
            starting=counts.starting,
            resetting=counts.resetting,
            started_total=self._num_started,
            failed_total=self._num_failed,
            limits=self._runtime.limits(),
        )

    def problem(self) -> str:
        """Why no sandbox can be had now, though places are free; empty: nothing is wrong."""
        if self._failures < FAILURES_SHOWN:
            return ""
        return f"pool {self.spec.name}: {self._failures} starts failed in a row, the last: {self._last_problem}"

    def _size(self) -> None:
        counts, now = self.counts(), self._clock.monotonic()
        if now >= self._no_start_before and not self._closing:
            # After a failure one at a time, until one succeeds.
            num = sizing.num_to_start(counts, warm=self.spec.warm, maximum=self.spec.max)
            for _ in range(min(num, 1) if self._failures else num):
                self._start()
        idle = [
            member
            for member in self._queue.oldest(counts.ready)
            if now - member.since > IDLE_SECONDS
        ]
        for member in idle[: sizing.num_to_end(counts, warm=self.spec.warm, idle=len(idle))]:
            self._queue.remove(member)
            self._end(member, "")

    def _expire(self) -> None:
        for lease in self._leases.expired():
            self._leases.remove(lease.claim_id)
            telemetry.SANDBOX_CLAIMS.inc(pool=self.spec.name, result="expired")
            if member := self._members.get(lease.sandbox_id):
                self._end(member, "the claim's time to live is over")

    def _publish(self) -> None:
        counts = self.counts()
        for state in ("starting", "ready", "claimed", "resetting"):
            telemetry.SANDBOXES.set(getattr(counts, state), pool=self.spec.name, state=state)

    # ── one member ──

    def _start(self) -> None:
        used = {member.index for member in self._members.values()}
        index = next(i for i in range(self.spec.max + 1) if i not in used)
        sandbox_id = f"{self.spec.name}-{index}-{secrets.token_hex(4)}"
        key = sandbox_key(self._pool_key, sandbox_id)
        spec = SandboxSpec(id=sandbox_id, key=key, index=index, limits=self.spec.limits)
        try:
            running = self._runtime.start(spec)
        except SandboxError as error:
            self._failed(str(error))
            return
        member = Member(spec, running, now=self._clock.monotonic())
        self._members[member.id] = member
        self._num_started += 1
        running.ended.add_done_callback(lambda ended: self._gone(member, ended.result()))
        self._spawn(self._verify(member))

    async def _verify(self, member: Member) -> None:
        try:
            await member.verify()
        except SandboxError as error:
            self._end(member, str(error))
            return
        if member.state is MemberState.STARTING:
            self._failures = 0
            self._ready(member)

    async def _reset(self, member: Member) -> None:
        self._enter(member, MemberState.RESETTING)
        try:
            await member.reset()
        except SandboxError as error:
            telemetry.SANDBOX_RESETS.inc(pool=self.spec.name, result="failed")
            self._end(member, f"reset: {error}")
            return
        telemetry.SANDBOX_RESETS.inc(pool=self.spec.name, result="verified")
        if member.state is MemberState.RESETTING:
            self._ready(member)

    def _ready(self, member: Member) -> None:
        self._enter(member, MemberState.READY)
        self._queue.put(member)

    def _enter(self, member: Member, state: MemberState) -> None:
        member.state, member.since = state, self._clock.monotonic()
        self._changed.set()

    def _end(self, member: Member, problem: str) -> None:
        """Kill it; with a problem, say so. What is left of a claim on it is the client's error to see."""
        if member.state is MemberState.ENDING:
            return
        if problem:
            _log.warning(
                "sandbox_replaced", sandbox=member.id, state=member.state.value, reason=problem
            )
        if member.state is MemberState.STARTING:
            self._failed(problem)
        self._leases.remove_sandbox(member.id)
        self._enter(member, MemberState.ENDING)
        member.running.kill()

    def _gone(self, member: Member, how: str) -> None:
        """Nothing of it is left."""
        if member.state is not MemberState.ENDING:
            _log.warning("sandbox_died", sandbox=member.id, state=member.state.value, how=how)
            if member.state is MemberState.STARTING:
                self._failed(how)
            self._queue.remove(member)
            self._leases.remove_sandbox(member.id)
        member.state = MemberState.ENDING
        self._members.pop(member.id, None)
        self._changed.set()
        if not self._closing:
            self._spawn(member.aclose())

    def _failed(self, problem: str) -> None:
        self._failures += 1
        self._num_failed += 1
        self._last_problem = problem
        pause = sizing.backoff_seconds(self._failures)
        self._no_start_before = self._clock.monotonic() + pause
        _log.warning(
            "sandbox_did_not_start",
            pool=self.spec.name,
            failures=self._failures,
            pause_seconds=pause,
            reason=problem,
        )

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End every sandbox and wait until nothing of them is left."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        members = list(self._members.values())
        for member in members:
            member.state = MemberState.ENDING
            member.running.kill()
            await member.aclose()
        if members:
            await asyncio.wait([member.running.ended for member in members], timeout=END_SECONDS)
