"""When a new group starts: the numeric rule and its refusals."""

import pytest

from rljob.errors import ManifestError
from rljob.ids import GroupId, PolicyVersion


@pytest.mark.parametrize(
    ("eta", "version", "per_step", "accepted", "running", "most", "capacity"),
    [
        (0, 0, 4, 0, 0, 100, 4),
        (2, 0, 4, 3, 5, 100, 4),
        (2, 3, 4, 12, 4, 6, 2),
        (4, 10, 64, 640, 300, 768, 20),
    ],
)
async def test_capacity_follows_the_published_vectors(
    bench, eta, version, per_step, accepted, running, most, capacity
):
    await bench.start(
        group_size=1,
        groups_per_step=per_step,
        max_staleness=eta,
        max_concurrent_episodes=most,
        steps=1000,
    )
    await bench.ledger.resume(1, version)
    await bench.commit(version)
    for lease in await bench.lease(accepted - version * per_step, version):
        await bench.complete(lease, version)
    assert len(await bench.lease(running, version)) == running
    assert len(await bench.lease(10_000, version)) == capacity


async def test_resuming_rebuilds_admission_from_the_checkpoint(bench):
    """The fault of AReaL 1388: accepted starts at 0, the version is restored, and staleness grows without bound."""
    await bench.start(max_staleness=2)
    await bench.fill(3)
    await bench.lease(2)
    await bench.ledger.resume(1, 7)
    assert (await bench.counts())["admitted"] == 7 * 2 + 3 + 1


async def test_each_refusal_has_its_reason(bench):
    assert (await bench.reply(4)).reason == "no_policy"
    await bench.start(max_staleness=0, steps=2, max_concurrent_episodes=3)
    assert (await bench.ledger.lease("w", "b", None, 4)).reason == "no_policy"
    first = await bench.reply(4)
    assert (len(first.leases), first.reason) == (2, "at_capacity")
    await bench.ledger.drain()
    assert (await bench.reply(4)).reason == "draining"
    await bench.ledger.drain(False)
    assert (await bench.reply(4)).reason == "at_capacity"


async def test_a_new_trainer_ends_a_drain_that_nobody_lifted(bench):
    await bench.start()
    await bench.ledger.drain()
    assert (await bench.reply(2)).reason == "draining"
    await bench.ledger.open_trainer("trainer")
    assert (await bench.reply(2)).reason == "draining"
    await bench.ledger.open_trainer("its successor")
    assert len((await bench.reply(2)).leases) == 2


async def test_the_staleness_bound_moves_with_the_engine_not_with_the_policy(bench):
    await bench.start(max_staleness=0)
    await bench.fill(2)
    assert (await bench.reply(4)).reason == "staleness_bound"
    await bench.train(1)
    behind = await bench.reply(4, n=0)
    assert (behind.leases, behind.reason) == ([], "engine_behind")
    assert len(await bench.lease(9, n=1)) == 4


async def test_all_steps_admitted_and_finished(bench):
    await bench.start(steps=1, max_staleness=3)
    await bench.lease(4)
    assert (await bench.reply(1)).reason == "all_steps_admitted"
    await bench.ledger.finish(1, "Succeeded", "done")
    assert (await bench.reply(1)).reason == "finished"
    assert await bench.ledger.finished() == "Succeeded"


async def test_a_group_that_does_not_fit_into_free_slots_is_shared_out(bench):
    await bench.start(group_size=5, max_concurrent_episodes=5)
    first = await bench.lease(3)
    second = await bench.reply(10, worker="other", boot="x")
    assert [lease.episode.member for lease in (*first, *second.leases)] == [0, 1, 2, 3, 4]
    assert second.reason == "at_capacity"


async def test_started_groups_come_before_new_ones_and_due_retries_before_both(bench):
    await bench.start(group_size=3)
    first, *_ = await bench.lease(2)
    await bench.fail(first)
    names = [str(lease.episode) for lease in await bench.lease(4)]
    assert names == ["t0-0.0", "t0-0.2", "t1-0.0", "t1-0.1"]


async def test_an_engine_that_is_behind_a_groups_start_gets_none_of_its_members(bench):
    await bench.start(group_size=4, max_staleness=2)
    for lease in await bench.lease(8):
        await bench.complete(lease)
    await bench.train(1)
    await bench.lease(2, n=1)
    reply = await bench.reply(2, n=0, worker="slow")
    assert {lease.episode.group for lease in reply.leases} == {GroupId("t", 3, 0)}


async def test_a_repeated_request_gets_the_same_leases(bench):
    await bench.start()
    version = PolicyVersion(1, 0)
    once = await bench.ledger.lease("w", "b", version, 3, request_id="r1")
    assert await bench.ledger.lease("w", "b", version, 3, request_id="r1") == once
    assert (await bench.counts())["leased"] == 3


async def test_rules_that_are_fixed_may_not_change_and_others_may(bench):
    await bench.start()
    ledger = bench.ledger
    with pytest.raises(ManifestError, match=r"^spec.rollout.groupSize: '3', but .* '2'"):
        await ledger.initialise(bench.rules(group_size=3))
    with pytest.raises(ManifestError, match=r"^spec.data.train.source"):
        await ledger.initialise(bench.rules(data_hash="other"))
    await ledger.initialise(bench.rules(steps=20))
    assert (await ledger.snapshot()).steps == 20


async def test_released_attempts_go_to_the_next_worker_uncounted(bench):
    await bench.start(max_attempts=1)
    leases = await bench.lease(2)
    await bench.ledger.release("w", "b", bench.attempts(leases))
    again = await bench.lease(2, worker="other", boot="x")
    assert [(lease.episode, lease.attempt) for lease in again] == [
        (lease.episode, 2) for lease in leases
    ]
    assert (await bench.counts())["failed"] == 0
