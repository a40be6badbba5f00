"""Retries, deaths, workers that vanish, leases that end, a store that restarts."""

import asyncio

import pytest

from rljob.errors import FencedError


async def until(bench, name: str, value: int) -> None:
    """Let time pass until a count has this value, with a worker that goes on calling: silence would be an outage."""
    async with asyncio.timeout(30):
        while (await bench.counts())[name] != value:
            await asyncio.sleep(0.1)
            await bench.ledger.heartbeat("other", "x", [])


async def hurry(bench, lease) -> int:
    """Make a waiting retry due now and lease it; its attempt."""
    store = bench.ledger._store
    await store.command("ZADD", store.prefix + "retry", 0, str(lease.episode))
    (again,) = await bench.lease(1)
    return again.attempt


async def test_a_failed_attempt_is_retried_and_a_hopeless_prompt_is_dead_lettered(bench):
    await bench.start(max_attempts=2)
    lease, other = await bench.lease(2)
    await bench.complete(other)
    assert await bench.fail(lease) == "retry"
    (again,) = await bench.lease(1)
    assert (again.episode, again.attempt) == (lease.episode, 2)
    assert await bench.fail(again, "engine died") == "dead"
    (letter,) = await bench.ledger.dead_letters()
    assert (letter.group, letter.episode, letter.reason, letter.evidence) == (
        "t0-0",
        "t0-0.0",
        "engine died",
        "why",
    )
    snapshot = await bench.ledger.snapshot()
    assert (snapshot.stream_entries, snapshot.counts["open"], snapshot.counts["admitted"]) == (
        0,
        0,
        0,
    )
    assert str((await bench.lease(1))[0].episode) == "t1-0.0"


async def test_back_off_doubles(bench):
    await bench.start(retry_backoff_seconds=100.0)
    (lease,) = await bench.lease(1)
    reply = await bench.ledger.fail("w", "b", lease.episode, 1, "x")
    assert reply.retry_after_seconds == 100
    assert (
        99 < (await bench.ledger.fail("w", "b", lease.episode, 1, "x")).retry_after_seconds <= 100
    )
    assert (await bench.counts())["failed"] == 1
    await bench.ledger.initialise(bench.rules(retry_backoff_seconds=100.0, max_attempts=9))
    for attempt, pause in ((2, 200), (3, 400)):
        await bench.ledger.heartbeat("w", "b", [])
        assert await hurry(bench, lease) == attempt
        assert (
            await bench.ledger.fail("w", "b", lease.episode, attempt, "x")
        ).retry_after_seconds == pause


async def test_only_the_newest_attempt_can_fail_an_episode(bench):
    await bench.start(lease_seconds=0.3)
    (lease,) = await bench.lease(1)
    await until(bench, "expired", 1)
    (again,) = await bench.lease(1, worker="other", boot="x")
    assert again.attempt == 2
    assert await bench.fail(lease) == "already_done"
    assert (await bench.counts())["failed"] == 0


async def test_a_late_completion_of_an_older_attempt_still_wins(bench):
    await bench.start(lease_seconds=0.3)
    (lease,) = await bench.lease(1)
    await until(bench, "expired", 1)
    (again,) = await bench.lease(1, worker="other", boot="x")
    assert await bench.complete(lease) == "accepted"
    assert await bench.complete(again, worker="other", boot="x") == "already_done"
    verdicts = await bench.ledger.heartbeat("other", "x", bench.attempts([again]))
    assert list(verdicts.values()) == ["already_done"]


async def test_a_heartbeat_keeps_a_lease_and_takes_back_one_that_just_ended(bench):
    await bench.start(lease_seconds=0.5)
    (lease,) = await bench.lease(1)
    for _ in range(8):
        await asyncio.sleep(0.1)
        assert set((await bench.ledger.heartbeat("w", "b", bench.attempts([lease]))).values()) == {
            "ok"
        }
    await until(bench, "running", 0)
    assert set((await bench.ledger.heartbeat("w", "b", bench.attempts([lease]))).values()) == {"ok"}
    assert (await bench.counts())["running"] == 1


async def test_a_worker_that_comes_back_under_its_name_forfeits_its_old_leases(bench):
    await bench.start()
    assert await bench.ledger.open_worker("w", "b") == []
    leases = await bench.lease(3)
    assert {(o.episode, o.attempt) for o in await bench.ledger.open_worker("w", "b")} == set(
        bench.attempts(leases)
    )
    assert await bench.ledger.open_worker("w", "b2") == []
    counts = await bench.counts()
    assert (counts["running"], counts["missing"], counts["expired"]) == (0, 4, 3)
    again = await bench.lease(3, boot="b2")
    assert [(lease.episode, lease.attempt) for lease in again] == [
        (lease.episode, 2) for lease in leases
    ]


async def test_a_replaced_boot_is_fenced_and_cannot_come_back(bench):
    await bench.start()
    for boot in ("b", "b2"):
        await bench.ledger.open_worker("w", boot)
    with pytest.raises(FencedError, match="runs under boot b2"):
        await bench.lease(1)
    with pytest.raises(FencedError):
        await bench.ledger.heartbeat("w", "b", [])
    with pytest.raises(FencedError, match="was replaced"):
        await bench.ledger.open_worker("w", "b")


async def test_the_completion_of_a_replaced_boot_is_not_wasted(bench):
    await bench.start()
    (lease,) = await bench.lease(1)
    await bench.ledger.open_worker("w", "b2")
    assert await bench.complete(lease) == "accepted"


async def test_a_prompt_that_kills_its_worker_again_and_again_dies(bench):
    await bench.start(max_attempts=1, group_size=1)
    for boot in range(4):
        await bench.ledger.open_worker("w", f"b{boot}")
        assert str((await bench.lease(1, boot=f"b{boot}"))[0].episode) == "t0-0.0"
    await bench.ledger.open_worker("w", "last")
    (letter,) = await bench.ledger.dead_letters()
    assert letter.reason == "lease_lost"


async def test_after_a_time_in_which_nobody_could_heartbeat_every_lease_gets_one_more_term(bench):
    await bench.start(lease_seconds=0.4, heartbeat_seconds=0.3)
    (lease,) = await bench.lease(1)
    await asyncio.sleep(1.0)
    # The trainer's calls end no lease, nor do they hide the silence.
    await bench.ledger.take(1, 1, 2)
    await bench.ledger.heartbeat("other", "x", [])
    counts = await bench.counts()
    assert (counts["running"], counts["expired"]) == (1, 0)
    await until(bench, "expired", 1)
    assert (await bench.lease(1, worker="other", boot="x"))[0].episode == lease.episode


async def test_groups_of_dead_prompts_never_block_the_job(bench):
    await bench.start(max_attempts=1, steps=2, max_staleness=0)
    for step in (1, 2):
        while (await bench.ledger.take(1, step, 2)).groups is None:
            for lease in await bench.lease(4, step - 1):
                if lease.row_index % 2:
                    await bench.fail(lease)
                else:
                    await bench.complete(lease, step - 1)
        await bench.ledger.archived(1, step)
        await bench.commit(step)
    assert (await bench.counts())["dead"] >= 3
