"""`kill -9` of the store: nothing that was answered is lost, and clients go on by themselves."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rljob.errors import StoreError
from rljob.ids import EpisodeId, PolicyVersion
from rljob.ledger import CompletionInfo, Ledger, LedgerConfig

V0 = PolicyVersion(1, 0)
INFO = CompletionInfo(reward=0.0, outcome="completed", min_version=0, max_version=0)


@pytest.fixture
async def ledger(own_valkey, job_name) -> AsyncIterator[Ledger]:
    async with await Ledger.connect(own_valkey.url, job_name, deadline_seconds=20) as ledger:
        await ledger.initialise(
            LedgerConfig(
                job=job_name,
                group_size=4,
                groups_per_step=5,
                steps=1000,
                max_staleness=500,
                max_concurrent_episodes=10_000,
                num_rows=10,
                data_hash="x",
                lease_seconds=2.0,
                heartbeat_seconds=0.5,
            )
        )
        await ledger.open_trainer("t")
        await ledger.commit(1, 0, V0, "")
        yield ledger


async def worker_loop(
    ledger: Ledger, name: str, answered: dict[EpisodeId, bytes], stop: asyncio.Event
) -> None:
    """Lease and complete, notebook in hand: an episode is noted when its completion was answered."""
    while not stop.is_set():
        for lease in (await ledger.lease(name, name, V0, 8)).leases:
            payload = f"{lease.episode}/{lease.attempt}/{name}".encode() * 100
            if (
                await ledger.complete(name, name, lease.episode, lease.attempt, payload, INFO)
                == "accepted"
            ):
                assert lease.episode not in answered
                answered[lease.episode] = payload


async def kill_loop(store, times: int) -> None:
    for pause in range(times):
        await asyncio.sleep(0.3 + 0.11 * pause)
        await asyncio.to_thread(store.restart)


async def test_no_answered_completion_is_lost_when_the_store_is_killed_again_and_again(
    ledger, own_valkey
):
    answered: dict[EpisodeId, bytes] = {}
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for name in ("w0", "w1", "w2"):
            tasks.create_task(worker_loop(ledger, name, answered, stop))
        await kill_loop(own_valkey, 4)
        await asyncio.sleep(0.3)
        stop.set()
    assert len(answered) > 50
    stored = {EpisodeId.parse(name) for name in (await ledger.facts()).outstanding}
    assert answered.keys() <= stored
    snapshot = await ledger.snapshot()
    assert snapshot.stream_entries == len(stored) == snapshot.counts["completed"]
    taken = await ledger.take(1, 1, 5)
    for group in taken.groups:
        for member, payload in enumerate(group.payloads):
            assert answered.get(EpisodeId(group.group, member), payload) == payload


async def test_a_batch_and_a_commit_survive_a_kill(ledger, own_valkey):
    for lease in (await ledger.lease("w", "b", V0, 40)).leases:
        await ledger.complete("w", "b", lease.episode, lease.attempt, b"x", INFO)
    batch = await ledger.take(1, 1, 5)
    own_valkey.restart()
    assert await ledger.take(1, 1, 5) == batch
    await ledger.archived(1, 1)
    own_valkey.restart()
    await ledger.commit(1, 1, PolicyVersion(1, 1), "digest")
    own_valkey.restart()
    policy = await ledger.policy()
    assert (policy.version, policy.step) == (PolicyVersion(1, 1), 1)
    assert (await ledger.snapshot()).stream_entries == 20


async def test_after_a_restart_every_lease_gets_one_more_term(ledger, own_valkey):
    leases = (await ledger.lease("w", "b", V0, 4)).leases
    own_valkey.kill()
    await asyncio.sleep(2.5)
    own_valkey.start()
    other = await ledger.lease("other", "x", V0, 4)
    assert {lease.attempt for lease in other.leases} == {1}
    assert (await ledger.snapshot()).counts["expired"] == 0
    attempts = [(lease.episode, lease.attempt) for lease in leases]
    assert set((await ledger.heartbeat("w", "b", attempts)).values()) == {"ok"}


async def test_a_call_outlives_an_outage_and_ends_by_its_deadline(own_valkey, job_name):
    async with await Ledger.connect(own_valkey.url, job_name, deadline_seconds=1.0) as ledger:
        own_valkey.kill()
        with pytest.raises(StoreError, match="within 1 s"):
            await ledger.policy()
        ledger._store.deadline_seconds = 60
        call = asyncio.create_task(ledger.policy())
        await asyncio.sleep(0.2)
        await asyncio.to_thread(own_valkey.start)
        assert (await call).version is None


async def test_a_store_that_hangs_is_given_up_by_the_deadline_and_found_again(own_valkey, job_name):
    async with await Ledger.connect(own_valkey.url, job_name, deadline_seconds=0.5) as ledger:
        own_valkey.process.send_signal(19)  # SIGSTOP
        with pytest.raises(StoreError):
            await ledger.policy()
        own_valkey.process.send_signal(18)  # SIGCONT
        ledger._store.deadline_seconds = 60
        assert (await ledger.policy()).version is None
