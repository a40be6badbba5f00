"""The real pool and broker, in virtual time, over sandboxes that fail in every way: what must hold whatever happens.

After every step: never a sandbox above `max`; never two owners of one; no claim answered with two sandboxes that live;
no claim that waits past its deadline; nothing lost sight of; only the ways between states that there are. And when
nothing fails any more: soon as many warm as wanted, and no more.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rljob.api.rljob_types import Recycle, SandboxPoolSpec
from rljob_sandbox_pool import member as member_module
from rljob_sandbox_pool.broker import Broker, Tenant
from rljob_sandbox_pool.decide import MAX_QUARANTINED
from rljob_sandbox_pool.guest.wire import RefusedError, Request
from rljob_sandbox_pool.member import CLAIM_SECONDS, Member
from rljob_sandbox_pool.member import MemberState as S
from rljob_sandbox_pool.pool import LATE_SECONDS, Pool
from rljob_sandbox_pool.sizing import Counts, share
from tests.harness.model_sandboxes import Faults, Link, ModelRuntime, VirtualLoop, World

ADOPT_SECONDS = 15.0
CALM_SECONDS = 400.0
"""Longer than the longest time to live, back-off, idleness and quarantine together."""
FAILURES = ["die", "hang", "unclean", "impostor", "lose answers", "last breath"]
WAYS = {
    None: {S.STARTING},
    S.STARTING: {S.READY, S.CLAIMED, S.RESETTING, S.QUARANTINED, S.ENDING},
    S.READY: {S.CLAIMED, S.ENDING},
    S.CLAIMED: {S.READY, S.RESETTING, S.ENDING},
    S.RESETTING: {S.READY, S.QUARANTINED, S.ENDING},
    S.QUARANTINED: {S.ENDING},
    S.ENDING: set[S](),
}


@dataclass(eq=False)
class Claim:
    """One claim, as whoever made it knows it."""

    id: str
    job: str
    body: dict[str, Any]
    task: asyncio.Task[dict[str, str] | None] | None = None
    due: float = 0.0
    """When the broker must have answered."""
    sandbox: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    is_released: bool = False


class PoolMachine(RuleBasedStateMachine):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.world = World(self.loop)
        self.spec = SandboxPoolSpec(warm=2, max=4, recycle=Recycle(quarantine_seconds=20))
        self.revision = 0
        self.claims: list[Claim] = []
        self.states: dict[str, S] = {}
        self.jobs: dict[str, str] = {}
        """Whose claims a sandbox has served."""
        self.trespasses: list[tuple[str, S]] = []
        """What pool managers did to sandboxes that they had let go."""
        self.condemned: set[str] = set()
        """Sandboxes that cannot have verified."""
        self.patch = mock.patch.object(member_module, "HttpClient", self.client)
        self.patch.start()
        self.run(self.take_over())
        self.run(asyncio.sleep(1.0))

    def client(self, url: str, **more: Any) -> Any:
        """In place of `HttpClient`."""
        return self.link.client(url, **more)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    # ── pool managers ──

    async def take_over(self) -> None:
        """A pool manager begins, with what is there."""
        self.link = Link(self.world)
        self.runtime = ModelRuntime(self.link, self.started)
        self.runtime.revision = self.revision
        self.pool = Pool(
            self.spec, self.runtime, "pool key", self.loop, name="p", scope="ns", job=""
        )
        self.pool.on_state = partial(self.entered, self.link)
        self.states = {}
        for box in list(self.world.boxes.values()):
            self.pool.adopt(box.id, box.image, self.runtime.adopt(box))
        self.adopted = set(self.world.boxes)
        self.broker = Broker(self)
        self.sizing = self.loop.create_task(self.pool.keep_warm_loop())
        deadline = self.loop.now + ADOPT_SECONDS
        while self.pool.num_unheard() and self.loop.now < deadline:
            await asyncio.sleep(0.05)

    @rule()
    def the_pool_manager_is_killed(self) -> None:
        self.link.is_cut = True
        self.run(self.stop())
        self.run(self.take_over())

    async def stop(self) -> None:
        """Nothing that ends here reaches a sandbox any more."""
        asking = [claim.task for claim in self.claims if claim.task]
        self.sizing.cancel()
        await self.pool.detach()
        for task in asking:
            task.cancel()
        await asyncio.gather(self.sizing, *asking, return_exceptions=True)
        self.collect()

    def started(self) -> None:
        assert len(self.world.boxes) <= self.spec.max

    def entered(self, link: Link, member: Member) -> None:
        if link.is_cut:
            self.trespasses.append((member.id, member.state))
            return
        before = self.states.get(member.id, S.STARTING)
        assert member.state in WAYS[before], (before, member.state)
        self.states[member.id] = member.state
        if member.state is S.RESETTING and self.world.boxes[member.id].is_foul:
            self.condemned.add(member.id)
        assert member.state not in (S.READY, S.CLAIMED) or member.id not in self.condemned
        assert bool(member.claim_id) == (member.state is S.CLAIMED)
        assert bool(member.evidence) >= (member.state is S.QUARANTINED)
        most = self.spec.max_per_job
        if member.state is S.CLAIMED and before is S.READY:
            held = sum(
                each.state is S.CLAIMED and each.job == member.job
                for each in self.pool._members.by_id.values()
            )
            assert most is None or held <= most or self.adopted

    # ── `broker.Directory` ──

    def tenant(self, token: str) -> Tenant | None:
        return Tenant(token, {"p": self.pool})

    def standby(self) -> str:
        return ""

    def unready(self) -> str:
        return ""

    # ── who claims ──

    @rule(
        job=st.sampled_from(["ns/a", "ns/b"]),
        image=st.sampled_from([None, "a", "b"]),
        wait=st.sampled_from([0.0, 3.0, 25.0]),
        seconds=st.sampled_from([5.0, 60.0]),
        priority=st.sampled_from([0, 10]),
        num=st.integers(1, 3),
    )
    def claim(
        self, job: str, image: str | None, wait: float, seconds: float, priority: int, num: int
    ) -> None:
        for _ in range(num):
            body = {"wait_seconds": wait, "ttl_seconds": seconds, "priority": priority}
            self.ask(self.new_claim(job, image=image, **body))
        self.run(asyncio.sleep(0.01))

    def new_claim(self, job: str, **more: Any) -> Claim:
        name = f"c{len(self.claims)}"
        self.claims.append(Claim(name, job, {"request_id": name, "pool": "p", **more}))
        return self.claims[-1]

    @rule(job=st.sampled_from(["ns/a", "ns/b"]), num=st.integers(1, 3))
    def episodes(self, job: str, num: int) -> None:
        """Claimed, used, given back."""
        claims = [self.new_claim(job, wait_seconds=2.0, ttl_seconds=60.0) for _ in range(num)]
        for claim in claims:
            self.ask(claim)
        self.run(asyncio.sleep(1.0))
        self.collect()
        for claim in claims:
            self.run(self.give_back(claim))

    def ask(self, claim: Claim) -> None:
        claim.due = self.loop.now + claim.body["wait_seconds"] + LATE_SECONDS + CLAIM_SECONDS + 0.1
        claim.task = self.loop.create_task(self.answer(claim))

    async def answer(self, claim: Claim) -> dict[str, str] | None:
        try:
            response = await self.broker.handle(self.request(claim, "POST", "/v1/claims"))
        except RefusedError as refusal:
            if refusal.status not in (404, 429, 503):
                raise
            return None
        return json.loads(response.body)

    def request(self, claim: Claim, method: str, path: str) -> Request:
        headers = {"authorization": f"Bearer {claim.job}"}
        return Request(method, path, {}, headers, json.dumps(claim.body).encode())

    def collect(self) -> None:
        """What was answered meanwhile."""
        for claim in self.claims:
            if claim.task is None or not claim.task.done():
                continue
            task, claim.task = claim.task, None
            if not task.cancelled() and (answer := task.result()) is not None:
                self.granted(claim, answer)

    def granted(self, claim: Claim, answer: dict[str, str]) -> None:
        sandbox = answer["sandbox_id"]
        # One whose guest says nothing to its new pool manager cannot be known again; it ends as soon as it speaks.
        known = self.pool._members.by_id.get(claim.sandbox)
        is_mute = known is not None and known.is_unheard
        assert sandbox == claim.sandbox or not self.opens(claim) or is_mute
        assert self.jobs.setdefault(sandbox, claim.job) == claim.job
        claim.sandbox = sandbox
        claim.headers = {
            "authorization": f"Bearer {answer['token']}",
            "x-rljob-claim": claim.id,
            "x-rljob-boot": answer["boot_nonce"],
        }

    def opens(self, claim: Claim) -> bool:
        """Its sandbox is there and answers to it."""
        box = self.world.boxes.get(claim.sandbox)
        if box is None or box.dead or not claim.headers:
            return False
        return box.ask("GET", "/healthz", claim.headers, b"").status == 200

    def some(self, data: st.DataObject, claims: list[Claim]) -> Claim:
        return claims[data.draw(st.integers(0, len(claims) - 1))]

    def open_claims(self) -> list[Claim]:
        return [each for each in self.claims if not each.is_released]

    @precondition(lambda self: self.open_claims())
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """As after an answer that was lost."""
        claim = self.some(data, sorted(self.open_claims(), key=lambda each: not each.sandbox))
        if claim.task is None:
            self.ask(claim)
            self.run(asyncio.sleep(0.01))

    @precondition(lambda self: any(each.task for each in self.claims))
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        claim = self.some(data, [each for each in self.claims if each.task])
        assert claim.task
        claim.task.cancel()
        self.run(asyncio.gather(claim.task, return_exceptions=True))

    @precondition(lambda self: self.open_claims())
    @rule(data=st.data(), broken=st.booleans())
    def release(self, data: st.DataObject, broken: bool) -> None:
        claims = sorted(self.open_claims(), key=lambda each: not each.sandbox)
        self.run(self.give_back(self.some(data, claims), broken))

    async def give_back(self, claim: Claim, broken: bool = False) -> None:
        claim.is_released = True
        request = self.request(claim, "DELETE", f"/v1/claims/{claim.id}")
        query = {"broken": "1"} if broken else {}
        try:
            await self.broker.handle(request._replace(query=query))
        except RefusedError as refusal:
            if refusal.status != 404:
                raise

    # ── what goes wrong ──

    @precondition(lambda self: self.world.boxes)
    @rule(data=st.data(), seconds=st.integers(1, 40))
    def a_sandbox_fails(self, data: st.DataObject, seconds: int) -> None:
        boxes = sorted(self.world.boxes.values(), key=lambda box: box.id not in self.jobs)
        box = boxes[data.draw(st.integers(0, len(boxes) - 1))]
        how = data.draw(st.sampled_from(FAILURES))
        if how == "die":
            box.die("a crash")
        elif how == "hang":
            box.silent_until = self.loop.now + seconds
        elif how == "unclean":
            box.spoil()
        elif how == "impostor":
            box.forget_key()
        elif how == "last breath":
            box.dies_of |= {"/claim", "/reset"}
        else:
            box.lose_answers_to |= {"/claim", "/reset"}
        self.run(asyncio.sleep(0.01))

    @rule(
        faults=st.builds(
            Faults,
            start_seconds=st.sampled_from([0.1, 5.0]),
            end_seconds=st.sampled_from([0.0, 0.5, 10.0]),
            refused_starts=st.sampled_from([0, 0, 1, 4]),
            stillborn=st.sampled_from([0, 0, 1, 4]),
            no_room=st.sampled_from([False, False, True]),
            broken_images=st.sampled_from([set(), set(), {"a"}, {"b"}, {"a", "b"}]),
            starts_at_once=st.sampled_from([100, 100, 1, 0]),
        )
    )
    def starts_fail(self, faults: Faults) -> None:
        self.world.faults = faults

    @rule()
    def nothing_fails(self) -> None:
        self.world.faults = Faults()

    @rule(
        warm=st.integers(0, 3),
        more=st.integers(0, 3),
        quota=st.sampled_from([None, 1, 2]),
        images=st.sampled_from([{}, {"a": 1, "b": 1}, {"b": 3, "a": 1}]),
        seconds=st.sampled_from([0, 20]),
        strategy=st.sampled_from(["reset", "reset", "recreate"]),
        another_template=st.booleans(),
    )
    def another_spec(
        self,
        warm: int,
        more: int,
        quota: int | None,
        images: dict[str, int],
        seconds: int,
        strategy: str,
        another_template: bool,
    ) -> None:
        self.spec = SandboxPoolSpec.model_validate(
            {
                "warm": warm,
                "max": max(1, warm + more),
                "maxPerJob": quota,
                "images": [{"image": name, "weight": weight} for name, weight in images.items()],
                "recycle": {"strategy": strategy, "quarantineSeconds": seconds},
            }
        )
        self.revision += another_template
        self.runtime.revision = self.revision
        self.pool.update(self.spec)
        self.run(asyncio.sleep(0.01))

    @rule(seconds=st.sampled_from([0.05, 0.5, 2.0, 10.0, 30.0, 150.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    # ── what holds ──

    @invariant()
    def all_is_well(self) -> None:
        for _ in range(5):  # what has happened is heard of
            self.run(asyncio.sleep(0))
        self.collect()
        self.nobody_shares_a_sandbox()
        self.nothing_waits_past_its_deadline()
        assert not self.trespasses
        self.nothing_is_lost_sight_of()

    def nobody_shares_a_sandbox(self) -> None:
        owners = Counter(each.sandbox for each in self.open_claims() if self.opens(each))
        assert not owners or max(owners.values()) == 1

    def nothing_waits_past_its_deadline(self) -> None:
        assert all(each.due > self.loop.now for each in self.claims if each.task)

    def nothing_is_lost_sight_of(self) -> None:
        assert not self.sizing.done(), self.sizing
        known = self.pool._members.by_id
        assert set(self.world.boxes) == set(known)
        assert {lease.sandbox_id for lease in self.pool._leases._by_claim.values()} <= set(known)
        assert (
            sum(member.state is S.QUARANTINED for member in known.values()) <= MAX_QUARANTINED + 1
        )

    def calm(self) -> None:
        """Nothing fails any more, and nobody wants anything."""
        self.world.faults = Faults()
        for box in self.world.boxes.values():
            box.silent_until = 0.0
        for claim in self.open_claims():
            if claim.task:
                claim.task.cancel()
            self.run(self.give_back(claim))
        self.run(asyncio.sleep(CALM_SECONDS))
        counts = self.pool.counts()
        assert counts == Counts(ready=self.spec.warm)
        ready = Counter(member.image for member in self.pool._members.by_id.values())
        wanted = share(self.spec.warm, self.runtime.images(self.spec))
        assert ready == {image: num for image, num in wanted.items() if num}
        assert len(self.pool._leases) == 0
        assert self.pool.trouble() is None
        for job in ("ns/a", "ns/b"):
            for image in self.runtime.images(self.spec):
                self.serves(job, image)

    def serves(self, job: str, image: str) -> None:
        """Whoever asks gets a sandbox."""
        claim = self.new_claim(job, image=image, wait_seconds=5.0)
        self.ask(claim)
        self.run(asyncio.sleep(6.0))
        self.collect()
        assert self.opens(claim), claim
        self.run(self.give_back(claim))

    def teardown(self) -> None:
        try:
            self.calm()
            self.run(self.pool.close())
            assert not self.world.boxes
        finally:
            self.patch.stop()
            self.end_tasks()
            self.loop.close()

    def end_tasks(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.run(asyncio.gather(*tasks, return_exceptions=True))


PoolMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPoolMachine = PoolMachine.TestCase


@pytest.fixture
def machine() -> Iterator[PoolMachine]:
    made = PoolMachine()
    yield made
    made.teardown()


def test_who_asks_again_while_the_sandbox_is_mute_keeps_the_second_one(
    machine: PoolMachine,
) -> None:
    claim = machine.new_claim("ns/a", wait_seconds=2.0)
    machine.ask(claim)
    machine.run(asyncio.sleep(1.0))
    machine.all_is_well()
    first = claim.sandbox
    machine.world.boxes[first].silent_until = machine.loop.now + 30.0
    machine.the_pool_manager_is_killed()
    machine.ask(claim)
    machine.run(asyncio.sleep(1.0))
    machine.all_is_well()
    second = claim.sandbox
    assert second not in ("", first)
    machine.run(asyncio.sleep(40.0))
    assert first not in machine.world.boxes
    assert machine.opens(claim)


def test_an_image_that_never_comes_up_holds_up_no_other(machine: PoolMachine) -> None:
    machine.world.faults = Faults(stillborn_images={"b"})
    machine.another_spec(2, 2, None, {"a": 1, "b": 1}, 20, "reset", another_template=True)
    machine.run(asyncio.sleep(60.0))
    assert machine.pool.counts().ready == 1
    trouble = machine.pool.trouble()
    assert trouble
    assert trouble.reason == "StartsFailing"
    num_failed = machine.pool.status().failed_total
    for _ in range(10):
        machine.episodes("ns/a", 1)
    assert machine.pool.status().failed_total - num_failed <= 1
