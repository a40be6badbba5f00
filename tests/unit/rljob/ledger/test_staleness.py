"""What happens to groups that grow too old, under each policy; and to groups that teach nothing."""

import asyncio

import pytest

from rljob.ids import GroupId


async def advance(bench, steps: int, first: int = 1) -> None:
    """Train whole steps with fresh groups."""
    for step in range(first, first + steps):
        await bench.fill(bench.per_step, step - 1)
        await bench.train(step)


async def test_a_complete_group_past_the_bound_is_evicted_and_run_again_under_its_row(bench):
    await bench.start(max_staleness=1)
    old = await bench.lease(2)
    await advance(bench, 2)
    for lease in old:
        await bench.complete(lease, n=0)
    assert (await bench.ledger.take(1, 3, 2)).reason == "groups"
    counts = await bench.counts()
    assert (counts["evicted"], counts["admitted"]) == (1, 4)
    leases = await bench.lease(2, n=2)
    assert {lease.episode.group for lease in leases} == {GroupId("t", 0, 1)}
    for lease in leases:
        await bench.complete(lease, n=2)
    await bench.fill(1, 2)
    reply = await bench.ledger.take(1, 3, 2)
    assert [(str(group.group), group.evictions) for group in reply.groups] == [
        ("t0-1", 1),
        ("t5-0", 0),
    ]


async def test_a_running_group_past_the_bound_is_hopeless_for_all_its_members(bench):
    await bench.start(max_staleness=1)
    old = await bench.lease(2)
    await advance(bench, 2)
    verdicts = await bench.ledger.heartbeat("w", "b", bench.attempts(old))
    assert list(verdicts.values()) == ["hopeless", "hopeless"]
    assert await bench.complete(old[0]) == "already_done"


async def test_a_group_left_out_of_the_last_batch_that_could_hold_it_is_hopeless_at_once(bench):
    await bench.start(max_staleness=1)
    old = await bench.lease(2)
    await advance(bench, 1)
    await bench.fill(2, 1)
    await bench.take(2)
    verdicts = await bench.ledger.heartbeat("w", "b", bench.attempts(old))
    assert set(verdicts.values()) == {"hopeless"}


async def test_a_recorded_batch_is_not_evicted_any_more(bench):
    await bench.start(max_staleness=0)
    await bench.fill(2)
    groups = await bench.take(1)
    await bench.ledger.heartbeat("w", "b", [])
    assert await bench.take(1) == groups


async def test_a_group_evicted_too_often_is_dead_lettered_as_too_slow(bench):
    await bench.start(max_staleness=1, max_evictions=1, group_size=1)
    for evictions in (0, 1):
        (slow,) = await bench.lease(1, 2 * evictions)
        assert slow.episode.group == GroupId("t", 0, evictions)
        await advance(bench, 2, first=1 + 2 * evictions)
        await bench.ledger.heartbeat("w", "b", bench.attempts([slow]))
    (letter,) = await bench.ledger.dead_letters()
    assert (letter.group, letter.reason) == ("t0-1", "too_slow")
    assert (await bench.ledger.facts()).dead_rows == {0}


async def test_the_oldest_policy_is_trained_first(bench):
    await bench.start(max_staleness=2)
    old = await bench.lease(2)
    await advance(bench, 1)
    young = await bench.fill(2, 1)
    for lease in old:
        await bench.complete(lease, n=0)
    assert await bench.take(2) == [GroupId("t", 0, 0), young[0]]


async def test_wait_holds_the_trainer_back_until_old_groups_are_complete(bench):
    await bench.start(on_stale="wait", max_staleness=1)
    old = await bench.lease(2)
    await advance(bench, 1)
    await bench.fill(2, 1)
    reply = await bench.ledger.take(1, 2, 2)
    assert (reply.groups, reply.reason) == (None, "stale_groups")
    for lease in old:
        await bench.complete(lease, n=0)
    assert (await bench.take(2))[0] == GroupId("t", 0, 0)


async def test_wait_ends_at_its_deadline_with_an_eviction(bench):
    await bench.start(on_stale="wait", max_staleness=1, wait_seconds=0.2)
    old = await bench.lease(2)
    await advance(bench, 1)
    await bench.fill(2, 1)
    assert (await bench.ledger.take(1, 2, 2)).reason == "stale_groups"
    await asyncio.sleep(0.25)
    assert len(await bench.take(2)) == 2
    verdicts = await bench.ledger.heartbeat("w", "b", bench.attempts(old))
    assert set(verdicts.values()) == {"hopeless"}


async def test_mask_trains_old_groups_while_a_token_is_young_enough(bench):
    await bench.start(on_stale="mask", max_staleness=1)
    old = await bench.lease(4)
    await advance(bench, 2)
    for lease in old:
        await bench.complete(lease, n=0, newest=0 if lease.episode.group.major == 0 else 1)
    await bench.fill(1, 2)
    assert await bench.take(3) == [GroupId("t", 1, 0), GroupId("t", 6, 0)]
    assert (await bench.counts())["evicted"] == 1


async def test_a_group_without_a_sampled_token_is_never_stale(bench):
    await bench.start(max_staleness=0, group_size=1)
    (empty,) = await bench.lease(1)
    await bench.complete(empty, n=-1)
    await bench.fill(1)
    assert GroupId("t", 0, 0) in await bench.take(1)


async def test_snapshot_tells_the_staleness_of_the_last_batch(bench):
    await bench.start(max_staleness=2)
    old = await bench.lease(2)
    await advance(bench, 1)
    await bench.fill(1, 1)
    for lease in old:
        await bench.complete(lease, n=0)
    await bench.take(2)
    assert (await bench.ledger.snapshot()).staleness == {"mean": 0.5, "max": 1}


@pytest.mark.parametrize("policy", ["keep", "drop"])
async def test_groups_whose_rewards_agree_are_dropped_only_when_asked(bench, policy):
    await bench.start(zero_variance=policy)
    same, mixed = [await bench.lease(2) for _ in range(2)]
    for lease in same:
        await bench.complete(lease, reward=1.0)
    for lease in mixed:
        await bench.complete(lease, reward=float(lease.episode.member))
    counts = await bench.counts()
    assert (counts["dropped"], counts["ready_groups"]) == ((1, 1) if policy == "drop" else (0, 2))
    assert (await bench.ledger.facts()).dropped_rows == ({0} if policy == "drop" else set())
    assert counts["admitted"] == counts["ready_groups"]
