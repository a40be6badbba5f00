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
from collections.abc import Callable, Mapping

import msgspec
import structlog

from rljob import telemetry
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.clock import Clock, SystemClock
from rljob.errors import SandboxError
from rljob.sandbox import ClaimAnswer, ClaimStatus, PoolStatus
from rljob_sandbox_pool import sizing
from rljob_sandbox_pool.leases import ClaimRequest, Lease, Leases, Owner
from rljob_sandbox_pool.member import Health, Member, MemberState
from rljob_sandbox_pool.members import Members
from rljob_sandbox_pool.ready_queue import ReadyQueue
from rljob_sandbox_pool.reset import Fate, fate
from rljob_sandbox_pool.runtimes.base import RunningSandbox, Runtime, Trouble

TICK_SECONDS = 1.0
"""How often expiry and idleness are looked at."""
RETRY_SECONDS = 0.1
"""How soon starts are asked for again that the runtime did not allow."""
IDLE_SECONDS = 120.0
"""A sandbox beyond `warm` that nobody wanted for so long is ended."""
CLAIM_TRIES = 4
"""Sandboxes tried for one claim before the claimer is told to come back."""
RELEASE_SECONDS = 0.5
"""How long a release waits for its reset, which mostly takes a millisecond."""

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
        self._runtime = runtime
        # in a cluster the chart's PodMonitor takes it apart into the labels namespace, job and pool
        self._title = f"{scope}/{job}/{name}" if scope else name
        self._clock = clock or SystemClock()
        self.on_state: Callable[[Member], None] = lambda member: None
        """Told about each sandbox that comes into another state. Called often: it must be quick."""
        self._leases = Leases(self._clock)
        self._changed = asyncio.Event()
        self._members = Members(
            runtime,
            pool_key,
            self._clock,
            name=name,
            scope=scope,
            title=self._title,
            on_change=self._changed.set,
            on_state=self._entered,
            on_held=self._held,
            on_end=lambda member: self._leases.remove_sandbox(member.id),
        )
        self._set_images()

    # ── claims ──

    async def claim(self, request: ClaimRequest) -> bytes:
        """Claim a sandbox; the JSON of a `ClaimAnswer`, the same for the same claim id. Raises NoSandboxError."""
        if lease := self._leases.get(request.id, request.job):
            return lease.answer
        if request.owner:
            self._release_earlier_boots(request.owner, request.job)
        began = self._clock.monotonic()
        image = request.image if request.image in self._weights else next(iter(self._weights))
        queue = self._members.queues[image]
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
        # Its job from here on, whatever becomes of the call: the guest may have taken the claim, env and all.
        member.job = member.job or request.job
        member.claim_id = request.id
        member.owner = request.owner.name if request.owner else ""
        self._members.enter(member, MemberState.CLAIMED)
        try:
            await member.claim(request)
        except SandboxError as error:
            telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="failed")
            self._members.end(member, str(error))
            return None
        except asyncio.CancelledError:
            # Whoever claimed has hung up; whether the guest took the claim is not known.
            self._members.spawn(self._members.reset(member))
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

    def _entered(self, member: Member) -> None:
        self.on_state(member)

    def _held(self, member: Member, known: Health) -> None:
        """An adopted sandbox is held by a claim that this broker has not made."""
        if (claim := known.claim) is not None:
            owner = Owner(claim.owner, claim.boot_id) if claim.owner else None
            self._lease(member, claim.id, claim.seconds_left, owner, known.job)

    def _release_earlier_boots(self, owner: Owner, job: str) -> None:
        for lease in self._leases.of_earlier_boots(owner, job):
            _log.info(
                "claim_forfeited", claim=lease.claim_id, sandbox=lease.sandbox_id, owner=owner.name
            )
            self._members.spawn(self.release(lease.claim_id, job=job))

    def claims(self, job: str = "") -> list[ClaimStatus]:
        """What a job holds."""
        now = self._clock.monotonic()
        return [
            ClaimStatus(
                claim_id=lease.claim_id,
                sandbox_id=lease.sandbox_id,
                pool=self.name,
                image=self._members.by_id[lease.sandbox_id].image,
                owner=lease.owner.name if lease.owner else "",
                seconds_left=lease.expires - now,
            )
            for lease in self._leases.of_job(job)
            if lease.sandbox_id in self._members.by_id
        ]

    def held(self, claim_id: str, *, job: str = "") -> tuple[ClaimAnswer, float] | None:
        """What opens the sandbox of a claim, and for how many seconds; None where the job has no such claim."""
        if (lease := self._leases.get(claim_id, job)) is None:
            return None
        answer = msgspec.json.decode(lease.answer, type=ClaimAnswer)
        return answer, lease.expires - self._clock.monotonic()

    async def release(self, claim_id: str, *, job: str = "", broken: bool = False) -> bool:
        """Take a claim's sandbox back; False where the job has no such claim.

        A reset is waited for, since it ends the token; one that takes long goes on by itself.
        """
        lease = self._leases.remove(claim_id, job)
        if lease is None or (member := self._members.by_id.get(lease.sandbox_id)) is None:
            return lease is not None
        if member.state is MemberState.CLAIMED:
            replace = broken or self._runtime.is_outdated(member.running)
            if fate(self.spec.recycle, uses=member.uses, broken=replace) is Fate.RESET:
                await asyncio.wait(
                    {self._members.spawn(self._members.reset(member))}, timeout=RELEASE_SECONDS
                )
            else:
                self._members.end(member, "broken" if broken else "")
        return True

    def kill(self, sandbox_id: str) -> None:
        """End a sandbox, whatever it does, as a crash of it would."""
        if member := self._members.by_id.get(sandbox_id):
            member.running.kill()

    def _no_sandbox(self) -> NoSandboxError:
        counts = self.counts()
        name = self.name
        if counts.total >= self.spec.max:
            return NoSandboxError(
                True, f"all {self.spec.max} sandboxes of pool {name} are taken", 1.0
            )
        pause = max(0.2, min(self._members.no_start_before - self._clock.monotonic(), 10.0))
        problem = f" (last failure: {self._members.last_problem})" if self._members.failures else ""
        return NoSandboxError(False, f"no sandbox of pool {name} is ready yet{problem}", pause)

    # ── the pool's size ──

    async def keep_warm_loop(self) -> None:
        """Size the pool whenever something changed, a back-off ended, and every second."""
        while True:
            wants_more = self._size()
            self._expire()
            self._publish()
            self._changed.clear()
            backoff = self._members.no_start_before - self._clock.monotonic()
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
        self._set_images()
        self._changed.set()

    def _set_images(self) -> None:
        self._weights = self._runtime.images(self.spec)
        for image in self._weights:
            self._members.queues.setdefault(image, ReadyQueue())

    def adopt(self, sandbox_id: str, image: str, running: RunningSandbox) -> None:
        """Take over a sandbox that an earlier pool manager started."""
        self._members.adopt(sandbox_id, image, running, self.spec.limits)

    def num_unheard(self) -> int:
        """Adopted sandboxes that may hold a claim which is not known yet."""
        return self._members.num_unheard()

    def counts(self) -> sizing.Counts:
        """Members by state."""
        return sum(self._members.counts_by_image().values(), sizing.Counts())

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
            quarantined=counts.quarantined,
            waiting=counts.waiting,
            started_total=self._members.num_started,
            failed_total=self._members.num_failed,
            limits=self._runtime.limits(),
        )

    def trouble(self) -> Trouble | None:
        """Why sandboxes do not come up; None: they do, or none is wanted."""
        return self._members.trouble()

    def problem(self) -> str:
        """`trouble` in a sentence; empty: nothing is wrong."""
        trouble = self.trouble()
        return f"pool {self._title}: {trouble.message}" if trouble else ""

    def _size(self) -> bool:
        """Start and end what is too few or too many; True where more should start, as soon as may be."""
        if self._members.is_closing:
            return False
        self._end_idle()
        starts = self._starts()
        allowed = self._runtime.take_starts(len(starts)) if starts else 0
        for image in starts[:allowed]:
            self._members.start(image, self.spec.limits)
        return allowed < len(starts)

    def _starts(self) -> list[str]:
        """Images of what should be started now."""
        if self._clock.monotonic() < self._members.no_start_before:
            return []
        counts = self._members.counts_by_image()
        warm = dict.fromkeys(counts, 0) | sizing.share(self.spec.warm, self._weights)
        starts = sizing.starts(
            counts,
            warm,
            maximum=self.spec.max,
            max_starting=self._runtime.max_starting,
            held=self._members.held_images(),
        )
        # After a failure one at a time, until one succeeds.
        num_starting = sum(each.starting for each in counts.values())
        return starts[: max(0, 1 - num_starting)] if self._members.failures else starts

    def _end_idle(self) -> None:
        now, counts = self._clock.monotonic(), self._members.counts_by_image()
        evictions = sizing.evictions(counts, maximum=self.spec.max)
        warm = sizing.share(self.spec.warm, self._weights)
        for image, queue in self._members.queues.items():
            ready = queue.oldest(queue.num_ready)
            outdated = [m for m in ready if self._runtime.is_outdated(m.running)]
            idle = sum(now - member.since > IDLE_SECONDS for member in ready)
            num = sizing.num_to_end(counts[image], warm=warm.get(image, 0), idle=idle)
            for member in {*outdated, *ready[: max(num, evictions.get(image, 0))]}:
                self._members.end(member, "")
        self._end_stuck(counts)

    def _end_stuck(self, counts: Mapping[str, sizing.Counts]) -> None:
        """Sandboxes that wait for room or an image, newest first, as far as nobody wants them any more."""
        total = sum(counts.values(), sizing.Counts())
        surplus = total.ready + total.starting + total.resetting - self.spec.warm - total.waiting
        surplus = max(surplus, total.total - total.ending - self.spec.max)
        starting = self._members.starting()
        outdated = [m for m in starting if self._runtime.is_outdated(m.running)]
        stuck = [m for m in reversed(starting) if m.running.trouble() and m not in outdated]
        for member in [*outdated, *stuck[: max(0, surplus - len(outdated))]]:
            self._members.end(member, "", failed=False)

    def _expire(self) -> None:
        for lease in self._leases.expired():
            self._leases.remove(lease.claim_id, lease.job)
            telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="expired")
            if member := self._members.by_id.get(lease.sandbox_id):
                self._members.end(member, "the claim's time to live is over")

    def _publish(self) -> None:
        counts = self.counts()
        for state in ("starting", "ready", "claimed", "resetting"):
            telemetry.SANDBOXES.set(getattr(counts, state), pool=self._title, state=state)

    async def close(self) -> None:
        """End every sandbox and wait until nothing of them is left."""
        await self._members.close()
        self._publish()

    async def detach(self) -> None:
        """Let go of every sandbox as it is: the next pool manager adopts them."""
        await self._members.detach()
