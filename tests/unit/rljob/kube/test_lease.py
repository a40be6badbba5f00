"""One leader at a time: take-over after a death, at once after a release, never of a leader that renews."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rljob.kube import calls
from rljob.kube import lease as module
from rljob.kube.lease import LeaderLease, LeaseLostError
from rljob.testing.kube import FakeKube


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(module, "RENEW_DEADLINE_SECONDS", 0.25)
    monkeypatch.setattr(module, "CALL_SECONDS", 0.05)
    monkeypatch.setattr(module, "DURATION_SECONDS", 0.5)
    monkeypatch.setattr(calls, "FIRST_PAUSE_SECONDS", 0.005)


@pytest.fixture
def fake() -> FakeKube:
    return FakeKube()


@pytest.fixture
async def tasks() -> AsyncIterator[list[asyncio.Task[None]]]:
    running: list[asyncio.Task[None]] = []
    yield running
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def candidate(fake: FakeKube, identity: str) -> LeaderLease:
    return LeaderLease(fake.client(), "ns", "the-lease", identity)


async def test_the_first_leads_and_the_second_waits_as_long_as_it_renews(
    fake: FakeKube, tasks: list[asyncio.Task[None]]
) -> None:
    first, second = candidate(fake, "first"), candidate(fake, "second")
    await first.acquire()
    tasks += [asyncio.create_task(first.hold()), asyncio.create_task(second.acquire())]
    await asyncio.sleep(1.0)
    assert (first.leads, second.leads, second.holder) == (True, False, "first")


async def test_a_dead_leader_is_succeeded_after_the_duration(fake: FakeKube) -> None:
    await candidate(fake, "dead").acquire()
    began = asyncio.get_running_loop().time()
    second = candidate(fake, "second")
    await second.acquire()
    assert asyncio.get_running_loop().time() - began >= 0.5
    lease = fake.get("Lease", "the-lease")
    assert lease["spec"]["holderIdentity"] == "second"
    assert lease["spec"]["leaseTransitions"] == 1


async def test_a_released_lease_is_free_at_once(fake: FakeKube) -> None:
    first, second = candidate(fake, "first"), candidate(fake, "second")
    await first.acquire()
    await first.release()
    assert not first.leads
    async with asyncio.timeout(0.4):
        await second.acquire()


async def test_a_leader_that_cannot_renew_stops_before_anybody_may_follow(fake: FakeKube) -> None:
    leader = candidate(fake, "leader")
    await leader.acquire()
    began = asyncio.get_running_loop().time()
    fake.down = True
    with pytest.raises(LeaseLostError, match="was not renewed"):
        await leader.hold()
    assert asyncio.get_running_loop().time() - began < 0.5
    assert not leader.leads


async def test_a_leader_whose_lease_another_holds_stops(fake: FakeKube) -> None:
    leader = candidate(fake, "leader")
    await leader.acquire()
    lease = fake.get("Lease", "the-lease")
    fake.put({**lease, "spec": {**lease["spec"], "holderIdentity": "usurper"}})
    with pytest.raises(LeaseLostError, match="held by usurper"):
        await leader.hold()


async def test_a_lease_that_somebody_annotated_is_still_ours(
    fake: FakeKube, tasks: list[asyncio.Task[None]]
) -> None:
    leader = candidate(fake, "leader")
    await leader.acquire()
    tasks.append(asyncio.create_task(leader.hold()))
    lease = fake.get("Lease", "the-lease")
    fake.put({**lease, "metadata": {**lease["metadata"], "annotations": {"seen": "yes"}}})
    await asyncio.sleep(0.4)
    assert leader.leads
    assert not tasks[0].done()


async def test_of_many_candidates_one_leads(
    fake: FakeKube, tasks: list[asyncio.Task[None]]
) -> None:
    candidates = [candidate(fake, f"c{n}") for n in range(8)]
    tasks += [asyncio.create_task(each.acquire()) for each in candidates]
    await asyncio.sleep(0.2)
    assert sum(task.done() for task in tasks) == 1


async def test_an_api_server_that_is_away_is_waited_for(
    fake: FakeKube, tasks: list[asyncio.Task[None]]
) -> None:
    leader = candidate(fake, "leader")
    fake.down = True
    tasks.append(asyncio.create_task(leader.acquire()))
    await asyncio.sleep(0.2)
    fake.down = False
    async with asyncio.timeout(2):
        await tasks[0]
