"""One warm pool: keeps sandboxes ready, hands them out, takes them back.

    start ─► verify ─► ready queue ─► claim ─► release ─► reset + verification ─┐
      ▲                    ▲                      │                             │
      │                    └──────────────────────│─────────────────────────────┘
      └── decide ◄── died, expired, broken, worn out, did not verify

Consumes claims and releases; produces claimed sandboxes. Waits for a free place below `max`, for a start, for a
reset; what unblocks it is a release, a death or the end of a back-off. Every change wakes `keep_warm_loop`, which
does what `decide` says. Sandboxes of an earlier pool manager are adopted: what they are is what their guests say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from rljob import telemetry
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.clock import Clock, SystemClock
from rljob.errors import SandboxError
from rljob.sandbox import ClaimAnswer, ClaimStatus, PoolStatus
from rljob_sandbox_pool import refusals, sizing
from rljob_sandbox_pool.decide import Observed, decide, yields
from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.leases import ClaimRequest, Lease, Leases, Owner
from rljob_sandbox_pool.member import Health, Member, MemberState
from rljob_sandbox_pool.members import Members
from rljob_sandbox_pool.refusals import NoSandboxError
from rljob_sandbox_pool.reset import Fate, fate, quarantine_seconds
from rljob_sandbox_pool.runtimes.base import RunningSandbox, Runtime, Trouble

TICK_SECONDS = 1.0
"""How often expiry and idleness are looked at."""
REST_SECONDS = 0.01
"""Between two looks at what changed."""
RETRY_SECONDS = 0.1
"""How soon starts are asked for again that the runtime did not allow."""
CLAIM_TRIES = 4
"""Sandboxes tried for one claim before the claimer is told to come back."""
LATE_SECONDS = 1.0
"""A claim whose time is over by more is not tried with another sandbox."""
RELEASE_SECONDS = 0.5
"""How long a release waits for its reset, which mostly takes a millisecond."""

_log = structlog.get_logger("rljob.sandbox_pool")


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
            on_state=lambda member: self.on_state(member),  # noqa: PLW0108  (who listens comes later)
            on_held=self._held,
            on_end=lambda member: self._leases.remove_sandbox(member.id),
            is_wanted=self._is_wanted,
        )
        self._set_spec()

    # ── claims ──

    async def claim(self, request: ClaimRequest) -> bytes:
        """Claim a sandbox; the JSON of a `ClaimAnswer`, the same for the same claim id.

        Raises NoSandboxError, and RefusedError where there is no such image.
        """
        if lease := self._leases.get(request.id, request.job):
            return lease.answer
        if request.owner:
            self._release_earlier_boots(request.owner, request.job)
        began = self._clock.monotonic()
        image = refusals.claimed_image(self.name, self._weights, request.image)
        result = "hit"

        def on_wait() -> None:
            nonlocal result
            result = "miss"
            self._changed.set()

        for _ in range(CLAIM_TRIES):
            left = request.wait_seconds - (self._clock.monotonic() - began)
            if left < -LATE_SECONDS:
                break
            member = await self._members.queue.get(request, image, left, on_wait, since=began)
            if member is None:
                break
            granted = self._clock.monotonic()
            if answer := await self._take(member, request):
                self._observe(image, granted - began, "queue", result)
                self._observe(image, self._clock.monotonic() - granted, "accept", result)
                telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="granted")
                return answer
        raise self._no_sandbox(request, image)

    async def _take(self, member: Member, request: ClaimRequest) -> bytes | None:
        """Tell the guest of a sandbox that was granted; None where it would not."""
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
        if member.state is not MemberState.CLAIMED:  # it died meanwhile
            return None
        return self._lease(member, request.id, request.ttl_seconds, request.owner, request.job)

    def _observe(self, image: str, seconds: float, phase: str, result: str) -> None:
        shown = image if len(self._weights) > 1 else ""
        telemetry.SANDBOX_CLAIM_SECONDS.observe(
            seconds, pool=self._title, image=shown, phase=phase, result=result
        )

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

    def _held(self, member: Member, known: Health) -> None:
        """An adopted sandbox is held by a claim that this broker has not made."""
        if (claim := known.claim) is None:
            return
        if self._leases.get(claim.id, known.job):
            # Whoever claimed did not get its answer, asked again, and has another by now.
            self._members.end(member, "its claim holds another sandbox")
            return
        owner = Owner(claim.owner, claim.boot_id) if claim.owner else None
        left = min(claim.seconds_left, checks.MAX_TTL_SECONDS)
        self._lease(member, claim.id, left, owner, known.job)

    def _release_earlier_boots(self, owner: Owner, job: str) -> None:
        for lease in self._leases.of_earlier_boots(owner, job):
            _log.info(
                "claim_forfeited", claim=lease.claim_id, sandbox=lease.sandbox_id, owner=owner.name
            )
            telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="forfeited")
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
            if not broken and self._is_fit(member) and self.counts().busy <= self.spec.max:
                await asyncio.wait(
                    {self._members.spawn(self._members.reset(member))}, timeout=RELEASE_SECONDS
                )
            else:
                self._members.end(member, "broken" if broken else "")
        return True

    def _is_fit(self, member: Member) -> bool:
        """As the spec is now, it may serve another claim than those that it has served."""
        if self._runtime.is_outdated(member.running):
            return False
        # Before its first it has nothing to be reset.
        uses = member.uses
        return not uses or fate(self.spec.recycle, uses=uses, broken=False) is Fate.RESET

    def _is_wanted(self, member: Member) -> bool:
        """Of one that is clean: it is fit, and its place is not for another."""
        if not self._is_fit(member) or self.counts().busy > self.spec.max:
            return False
        box, waiting = self._members.see(member), self._members.queue.waiting()
        # Looking at all of the pool is for pools that several fight for.
        if not member.uses or not waiting or waiting[0].fits(box):
            return True
        return not yields(self._observed(), box)

    def kill(self, sandbox_id: str) -> None:
        """End a sandbox, whatever it does, as a crash of it would."""
        if member := self._members.by_id.get(sandbox_id):
            member.running.kill()

    def _no_sandbox(self, request: ClaimRequest, image: str) -> NoSandboxError:
        if self._members.queue.is_at_quota(request.job):
            telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="at_quota")
            return refusals.at_quota(self.name, self.spec.max_per_job)
        telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="exhausted")
        return refusals.exhausted(
            self.name,
            self.counts(),
            most=self.spec.max,
            failures=self._members.failures.get(image),
            now=self._clock.monotonic(),
        )

    # ── the pool's size ──

    async def keep_warm_loop(self) -> None:
        """Size the pool whenever something changed, a back-off ended, and every second."""
        while True:
            self._changed.clear()
            began = self._clock.monotonic()
            wants_more = self._size()
            self._publish()
            # Claims and resets of a busy pool change something all the time: a tenth of the time is enough for this.
            await self._clock.sleep(max(REST_SECONDS, 9.0 * (self._clock.monotonic() - began)))
            now = self._clock.monotonic()
            pauses = [each.no_start_before - now for each in self._members.failures.values()]
            pauses.append(RETRY_SECONDS if wants_more else TICK_SECONDS)
            try:
                async with asyncio.timeout(min(pause for pause in pauses if pause > 0)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def wake(self) -> None:
        """Something that it waits for may have changed."""
        self._changed.set()

    def update(self, spec: SandboxPoolSpec) -> None:
        """Another spec. What was started from an earlier one is used no more, where it matters."""
        numbers = {name: getattr(spec, name) for name in ("warm", "max", "max_per_job")}
        if self.spec.model_copy(update=numbers) != spec:
            # Starts that failed may have failed of what is another now.
            self._members.failures.clear()
        self.spec = spec
        self._set_spec()
        self._changed.set()

    def _set_spec(self) -> None:
        self._weights = self._runtime.images(self.spec)
        self._members.queue.max_per_job = self.spec.max_per_job
        for member in list(self._members.by_id.values()):
            if member.state is MemberState.READY and not self._is_fit(member):
                self._members.end(member, "")
        self._members.queue.serve_all()

    def adopt(self, sandbox_id: str, image: str, running: RunningSandbox) -> None:
        """Take over a sandbox that an earlier pool manager started."""
        self._members.adopt(sandbox_id, image, running, self.spec.limits)

    def num_unheard(self) -> int:
        """Adopted sandboxes that may hold a claim which is not known yet."""
        return self._members.num_unheard()

    def counts(self) -> sizing.Counts:
        """Members by state."""
        return self._members.counts()

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
        if self._members.fault:
            raise self._members.fault
        if self._members.is_closing:
            return False
        actions = decide(self._observed())
        for lease in actions.expire:
            self._leases.remove(lease.claim_id, lease.job)
            telemetry.SANDBOX_CLAIMS.inc(pool=self._title, result="expired")
        for box, why in actions.end:
            if member := self._members.by_id.get(box):
                self._members.end(member, why, failed=False)
        num = len(actions.start)
        allowed = self._runtime.take_starts(num) if num else 0
        for image in actions.start[:allowed]:
            self._members.start(image, self.spec)
        return allowed < num

    def _observed(self) -> Observed:
        members = self._members
        members.forget_failures()
        return Observed(
            now=self._clock.monotonic(),
            warm=self.spec.warm,
            maximum=self.spec.max,
            max_starting=self._runtime.max_starting,
            weights=self._weights,
            sandboxes=members.seen(),
            waiting=members.queue.waiting(),
            expired=self._leases.expired(),
            failing={image: each.no_start_before for image, each in members.failures.items()},
            quarantine_seconds=quarantine_seconds(self.spec.recycle),
        )

    def _publish(self) -> None:
        counts = self.counts()
        for state in MemberState:
            telemetry.SANDBOXES.set(
                getattr(counts, state.value), pool=self._title, state=state.value
            )

    async def close(self) -> None:
        """End every sandbox and wait until nothing of them is left."""
        await self._members.close()
        self._publish()

    async def detach(self) -> None:
        """Let go of every sandbox as it is: the next pool manager adopts them."""
        await self._members.detach()
