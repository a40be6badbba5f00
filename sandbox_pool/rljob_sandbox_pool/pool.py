"""One warm pool: keeps sandboxes ready, hands them out, takes them back.

    start ─► verify ─► ready queue ─► claim ─► release ─► reset + verification ─┐
      ▲                    ▲                      │                             │
      │                    └──────────────────────│─────────────────────────────┘
      └── sizing ◄── died, expired, broken, worn out, did not verify

Consumes claims and releases; produces claimed sandboxes. Waits for a free place below `max`, for a start, for a
reset; what unblocks it is a release, a death or the end of a back-off. Every change wakes `keep_warm_loop`, which
sizes the pool. Sandboxes of an earlier pool manager are adopted: what they are is what their guests say.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec
import structlog

from rljob import telemetry
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.clock import Clock, SystemClock
from rljob.errors import SandboxError
from rljob.sandbox import ClaimAnswer, PoolStatus
from rljob_sandbox_pool import sizing
from rljob_sandbox_pool.guest.claims import sandbox_key
from rljob_sandbox_pool.leases import ClaimRequest, Lease, Leases, Owner
from rljob_sandbox_pool.member import Health, Member, MemberState
from rljob_sandbox_pool.ready_queue import ReadyQueue
from rljob_sandbox_pool.reset import Fate, fate
from rljob_sandbox_pool.runtimes.base import RunningSandbox, Runtime, SandboxSpec, Trouble

TICK_SECONDS = 1.0
"""How often expiry and idleness are looked at."""
RETRY_SECONDS = 0.1
"""How soon starts are asked for again that the runtime did not allow."""
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
    """See the picture above. Belongs to one event loop; all its sandboxes end with `close`.

    Args:
        spec: What is wanted.
        runtime: Starts the sandboxes.
        pool_key: Where the sandboxes' own keys come from.
        clock: Time.
        name: Its name.
        scope: What tells its sandboxes from those of pools of the same name elsewhere: a namespace.
        job: The one job that it serves; empty: whoever may claim, each reusing only its own.
    """

    def __init__(
        self,
        spec: SandboxPoolSpec,
        runtime: Runtime,
        pool_key: str,
        clock: Clock | None = None,
        *,
        name: str,
        scope: str = "",
        job: str = "",
    ) -> None:
        self.spec, self.name, self.job = spec, name, job
        self._runtime, self._pool_key, self._scope = runtime, pool_key, scope
        self._title = f"{scope}/{name}" if scope else name
        self._clock = clock or SystemClock()
        self._leases = Leases(self._clock)
        self._members: dict[str, Member] = {}
        self._weights = runtime.images(spec)
        self._queues: dict[str, ReadyQueue[Member]] = {
            image: ReadyQueue() for image in self._weights
        }
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
        if (lease := self._leases.get(request.id)) and lease.job == request.job:
            return lease.answer
        if request.owner:
            self._release_earlier_boots(request.owner, request.job)
        began = self._clock.monotonic()
        queue = self._queues.get(request.image) or next(iter(self._queues.values()))
        for _ in range(CLAIM_TRIES):
            left = request.wait_seconds - (self._clock.monotonic() - began)
            member = await queue.get(
                left, self._changed.set, lambda member: member.job in ("", request.job)
            )
            if member is None:
                break
            if answer := await self._take(member, request):
                telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="granted")
                telemetry.SANDBOX_CLAIM_SECONDS.observe(
                    self._clock.monotonic() - began, pool=self._title
                )
                return answer
        telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="exhausted")
        raise self._no_sandbox()

    async def _take(self, member: Member, request: ClaimRequest) -> bytes | None:
        """Make a ready sandbox the claim's; None where the sandbox would not."""
        self._enter(member, MemberState.CLAIMED)
        try:
            await member.claim(request)
        except SandboxError as error:
            telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="failed")
            self._end(member, str(error))
            return None
        except asyncio.CancelledError:
            # Whoever claimed has hung up; whether the guest took the claim is not known.
            self._spawn(self._reset(member))
            raise
        return self._lease(member, request.id, request.ttl_seconds, request.owner, request.job)

    def _lease(
        self, member: Member, claim_id: str, seconds: float, owner: Owner | None, job: str
    ) -> bytes:
        """Note that the claim holds the sandbox; what the claim is answered with."""
        token = member.token(claim_id)
        answer = ClaimAnswer(claim_id, member.id, member.url, token, member.boot_nonce)
        encoded = msgspec.json.encode(answer)
        expires = self._clock.monotonic() + seconds
        self._leases.add(Lease(claim_id, member.id, expires, encoded, owner, job))
        return encoded

    def _release_earlier_boots(self, owner: Owner, job: str) -> None:
        for lease in self._leases.of_earlier_boots(owner, job):
            _log.info(
                "claim_forfeited", claim=lease.claim_id, sandbox=lease.sandbox_id, owner=owner.name
            )
            self._spawn(self.release(lease.claim_id, job=job))

    async def release(self, claim_id: str, *, job: str = "", broken: bool = False) -> bool:
        """Take a claim's sandbox back; False where the job has no such claim.

        A reset is waited for, since it ends the token; one that takes long goes on by itself.
        """
        if (known := self._leases.get(claim_id)) is not None and known.job != job:
            return False
        lease = self._leases.remove(claim_id)
        if lease is None or (member := self._members.get(lease.sandbox_id)) is None:
            return lease is not None
        if member.state is MemberState.CLAIMED:
            replace = broken or self._runtime.is_outdated(member.running)
            if fate(self.spec.recycle, uses=member.uses, broken=replace) is Fate.RESET:
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
        name = self.name
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
            wants_more = self._size()
            self._expire()
            self._publish()
            self._changed.clear()
            backoff = self._no_start_before - self._clock.monotonic()
            pause = RETRY_SECONDS if wants_more else TICK_SECONDS
            try:
                async with asyncio.timeout(min(pause, backoff) if backoff > 0 else pause):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def wake(self) -> None:
        """Something that it waits for may have changed."""
        self._changed.set()

    def update(self, spec: SandboxPoolSpec) -> None:
        """Another spec. What was started from an earlier one is used no more, where it matters."""
        self.spec = spec
        self._weights = self._runtime.images(spec)
        for image in self._weights:
            self._queues.setdefault(image, ReadyQueue())
        self._changed.set()

    def counts_by_image(self) -> dict[str, sizing.Counts]:
        """Members by image and state."""
        states: dict[str, Counter[str]] = {image: Counter() for image in self._queues}
        for member in self._members.values():
            states.setdefault(member.image, Counter())[member.state.value] += 1
        for image, queue in self._queues.items():
            states[image]["waiting"] = queue.num_waiting
        return {image: sizing.Counts(**each) for image, each in states.items()}

    def counts(self) -> sizing.Counts:
        """Members by state."""
        return sum(self.counts_by_image().values(), sizing.Counts())

    def status(self) -> PoolStatus:
        """For `GET /v1/pools`."""
        counts = self.counts()
        return PoolStatus(
            name=self.name,
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

    def trouble(self) -> Trouble | None:
        """Why sandboxes do not come up; None: they do, or none is wanted."""
        if self._failures >= FAILURES_SHOWN:
            words = f"{self._failures} starts failed in a row, the last: {self._last_problem}"
            return Trouble("StartsFailing", words)
        return next(filter(None, (member.running.trouble() for member in self._starting())), None)

    def problem(self) -> str:
        """`trouble` in a sentence; empty: nothing is wrong."""
        trouble = self.trouble()
        return f"pool {self._title}: {trouble.message}" if trouble else ""

    def _size(self) -> bool:
        """Start and end what is too few or too many; True where more should start, as soon as may be."""
        if self._closing:
            return False
        self._end_idle()
        starts = self._starts()
        allowed = self._runtime.take_starts(len(starts)) if starts else 0
        for image in starts[:allowed]:
            self._start(image)
        return allowed < len(starts)

    def _starts(self) -> list[str]:
        """Images of what should be started now."""
        if self._clock.monotonic() < self._no_start_before:
            return []
        counts = self.counts_by_image()
        warm = dict.fromkeys(counts, 0) | sizing.share(self.spec.warm, self._weights)
        starts = sizing.starts(
            counts,
            warm,
            maximum=self.spec.max,
            max_starting=self._runtime.max_starting,
            held=self._held_images(),
        )
        # After a failure one at a time, until one succeeds.
        num_starting = sum(each.starting for each in counts.values())
        return starts[: max(0, 1 - num_starting)] if self._failures else starts

    def _held_images(self) -> set[str]:
        """Images of which no more is started while one that starts has no place to go, or cannot be pulled."""
        stuck = [m for m in self._starting() if m.running.trouble() is not None]
        return {member.image for member in stuck}

    def _starting(self) -> list[Member]:
        return [m for m in self._members.values() if m.state is MemberState.STARTING]

    def _end_idle(self) -> None:
        now, counts = self._clock.monotonic(), self.counts_by_image()
        evictions = sizing.evictions(counts, maximum=self.spec.max)
        warm = sizing.share(self.spec.warm, self._weights)
        for image, queue in self._queues.items():
            ready = queue.oldest(queue.num_ready)
            outdated = [m for m in ready if self._runtime.is_outdated(m.running)]
            idle = sum(now - member.since > IDLE_SECONDS for member in ready)
            num = sizing.num_to_end(counts[image], warm=warm.get(image, 0), idle=idle)
            for member in {*outdated, *ready[: max(num, evictions.get(image, 0))]}:
                queue.remove(member)
                self._end(member, "")
        self._end_stuck(counts)

    def _end_stuck(self, counts: Mapping[str, sizing.Counts]) -> None:
        """Sandboxes that wait for room or an image, newest first, as far as nobody wants them any more."""
        total = sum(counts.values(), sizing.Counts())
        surplus = total.ready + total.starting + total.resetting - self.spec.warm - total.waiting
        surplus = max(surplus, total.total - total.ending - self.spec.max)
        starting = self._starting()
        outdated = [m for m in starting if self._runtime.is_outdated(m.running)]
        stuck = [m for m in reversed(starting) if m.running.trouble() and m not in outdated]
        for member in [*outdated, *stuck[: max(0, surplus - len(outdated))]]:
            self._end(member, "", failed=False)

    def _expire(self) -> None:
        for lease in self._leases.expired():
            self._leases.remove(lease.claim_id)
            telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="expired")
            if member := self._members.get(lease.sandbox_id):
                self._end(member, "the claim's time to live is over")

    def _publish(self) -> None:
        counts = self.counts()
        for state in ("starting", "ready", "claimed", "resetting"):
            telemetry.SANDBOXES.set(getattr(counts, state), pool=self._title, state=state)

    # ── one member ──

    def _start(self, image: str) -> None:
        used = {member.index for member in self._members.values()}
        index = next(i for i in range(self.spec.max + 1) if i not in used)
        sandbox_id = f"{self.name}-{secrets.token_hex(5)}"
        spec = SandboxSpec(
            id=sandbox_id,
            key=self._key(sandbox_id),
            index=index,
            limits=self.spec.limits,
            image=image,
        )
        try:
            running = self._runtime.start(spec)
        except SandboxError as error:
            self._failed(str(error))
            return
        self._num_started += 1
        self._spawn(self._verify(self._add(spec, running)))

    def adopt(self, sandbox_id: str, image: str, running: RunningSandbox) -> None:
        """Take over a sandbox that an earlier pool manager started."""
        spec = SandboxSpec(
            id=sandbox_id, key=self._key(sandbox_id), index=-1, limits=self.spec.limits, image=image
        )
        self._queues.setdefault(image, ReadyQueue())
        self._spawn(self._verify(self._add(spec, running), adopted=True))

    def num_unheard(self) -> int:
        """Adopted sandboxes that may hold a claim which is not known yet."""
        return sum(
            member.index < 0 and member.state is MemberState.STARTING
            for member in self._members.values()
        )

    def _key(self, sandbox_id: str) -> bytes:
        return sandbox_key(
            self._pool_key, f"{self._scope}/{sandbox_id}" if self._scope else sandbox_id
        )

    def _add(self, spec: SandboxSpec, running: RunningSandbox) -> Member:
        member = Member(spec, running, now=self._clock.monotonic())
        self._members[member.id] = member
        running.failed.add_done_callback(lambda failed: self._lost(member, failed.result()))
        running.ended.add_done_callback(lambda ended: self._gone(member, ended.result()))
        self._changed.set()
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
            self._end(member, str(error))
            return
        if member.state is not MemberState.STARTING:
            return
        self._failures = 0
        if adopted:
            self._resume(member, known)
        else:
            self._ready(member)

    def _resume(self, member: Member, known: Health) -> None:
        """An adopted sandbox goes on as what its guest says it is."""
        member.uses, member.job = known.uses, known.job
        if known.state == "claimed" and (claim := known.claim) is not None:
            self._enter(member, MemberState.CLAIMED)
            owner = Owner(claim.owner, claim.boot_id) if claim.owner else None
            self._lease(member, claim.id, claim.seconds_left, owner, known.job)
        elif known.state == "warm":
            self._ready(member)
        elif known.state == "dirty":
            self._spawn(self._reset(member))
        else:
            self._end(member, f"its guest calls itself {known.state[:20]}")

    async def _reset(self, member: Member) -> None:
        self._enter(member, MemberState.RESETTING)
        try:
            await member.reset()
        except SandboxError as error:
            telemetry.SANDBOX_RESETS.inc(pool=self._title, result="failed")
            self._end(member, f"reset: {error}")
            return
        telemetry.SANDBOX_RESETS.inc(pool=self._title, result="verified")
        if member.state is MemberState.RESETTING:
            self._ready(member)

    def _ready(self, member: Member) -> None:
        self._enter(member, MemberState.READY)
        self._queues[member.image].put(member)

    def _enter(self, member: Member, state: MemberState) -> None:
        member.state, member.since = state, self._clock.monotonic()
        self._changed.set()

    def _end(self, member: Member, problem: str, *, failed: bool = True) -> None:
        """Kill it; with a problem, say so. What is left of a claim on it is the client's error to see."""
        if member.state is MemberState.ENDING:
            return
        if problem:
            _log.warning(
                "sandbox_replaced", sandbox=member.id, state=member.state.value, reason=problem
            )
        if member.state is MemberState.STARTING and failed:
            self._failed(problem)
        self._leases.remove_sandbox(member.id)
        self._enter(member, MemberState.ENDING)
        member.running.kill()

    def _lost(self, member: Member, how: str) -> None:
        """It serves no more; something of it may be left."""
        if member.state is MemberState.ENDING:
            return
        _log.warning("sandbox_died", sandbox=member.id, state=member.state.value, how=how)
        if member.state is MemberState.STARTING:
            self._failed(how)
        self._queues[member.image].remove(member)
        self._leases.remove_sandbox(member.id)
        self._enter(member, MemberState.ENDING)
        member.running.kill()

    def _gone(self, member: Member, how: str) -> None:
        """Nothing of it is left."""
        self._lost(member, how)
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
            pool=self._title,
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
        self._stop()
        members = list(self._members.values())
        for member in members:
            member.state = MemberState.ENDING
            member.running.kill()
            await member.aclose()
        if members:
            await asyncio.wait([member.running.ended for member in members], timeout=END_SECONDS)

    async def detach(self) -> None:
        """Let go of every sandbox as it is: the next pool manager adopts them."""
        self._stop()
        for member in self._members.values():
            await member.aclose()

    def _stop(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
