"""Leases, completions, batches: the straight way."""

import pytest

from rljob.errors import FencedError, StateError
from rljob.ids import GroupId, PolicyVersion


async def test_a_job_runs_to_its_last_step_and_every_row_is_trained_once(bench):
    await bench.start(steps=5, max_staleness=2)
    trained = []
    for step in range(1, 6):
        while (reply := await bench.ledger.take(1, step, 2)).groups is None:
            for lease in await bench.lease(3, step - 1):
                await bench.complete(lease, step - 1)
        trained += [group.group for group in reply.groups]
        await bench.ledger.archived(1, step)
        await bench.commit(step)
    assert trained == [GroupId("t", index, 0) for index in range(10)]
    snapshot = await bench.ledger.snapshot()
    assert (snapshot.step, snapshot.stream_entries, snapshot.counts["trained"]) == (5, 0, 20)
    assert (await bench.reply(4, 5)).reason == "all_steps_admitted"


async def test_payloads_come_back_in_member_order(bench):
    await bench.start(group_size=4, groups_per_step=1)
    leases = await bench.lease(4)
    for lease in reversed(leases):
        await bench.complete(lease, payload=bytes([lease.episode.member]) * 10)
    (group,) = (await bench.ledger.take(1, 1, 1)).groups
    assert group.payloads == [bytes([member]) * 10 for member in range(4)]


async def test_taking_again_gives_the_same_batch_until_it_is_committed(bench):
    await bench.start()
    await bench.fill(4)
    first = await bench.ledger.take(1, 1, 2)
    assert await bench.ledger.take(1, 1, 2) == first


async def test_take_says_what_is_missing(bench):
    await bench.start()
    await bench.lease(3)
    reply = await bench.ledger.take(1, 1, 2)
    assert (reply.groups, reply.reason) == (None, "groups")
    assert reply.facts == {
        "need": 2,
        "ready": 0,
        "running_groups": 2,
        "running_episodes": 3,
        "waited_seconds": 0,
    }


async def test_the_first_completion_wins_and_a_repetition_of_it_is_accepted_again(bench):
    await bench.start()
    (lease,) = await bench.lease(1)
    assert await bench.complete(lease) == "accepted"
    assert await bench.complete(lease) == "accepted"
    assert await bench.complete(lease, worker="other") == "already_done"
    assert (await bench.ledger.snapshot()).stream_entries == 1
    assert await bench.payload_keys() == 1


async def test_payloads_leave_the_store_with_their_group(bench):
    await bench.start(max_attempts=1, zero_variance="drop")
    await bench.fill(1)  # dropped: its rewards agree
    done, dying, *_ = await bench.lease(4)
    await bench.complete(done)
    assert await bench.payload_keys() == 1
    await bench.fail(dying)
    assert await bench.payload_keys() == 0


async def test_a_completion_of_a_trained_group_is_already_done(bench):
    await bench.start()
    leases = await bench.lease(4)
    for lease in leases:
        await bench.complete(lease)
    await bench.train(1)
    assert await bench.complete(leases[0]) == "already_done"


async def test_the_trainer_may_not_skip_repeat_or_undo_steps(bench):
    await bench.start()
    await bench.fill(4)
    with pytest.raises(StateError, match="before step 1 is archived"):
        await bench.ledger.take(1, 2, 2)
    with pytest.raises(StateError, match="no batch"):
        await bench.ledger.archived(1, 1)
    await bench.train(1)
    with pytest.raises(StateError, match="trained already"):
        await bench.ledger.take(1, 1, 2)
    with pytest.raises(StateError, match="after step 1"):
        await bench.commit(0)


async def test_archived_and_commit_may_be_repeated(bench):
    await bench.start()
    await bench.fill(2)
    await bench.take(1)
    for _ in range(2):
        await bench.ledger.archived(1, 1)
    for _ in range(2):
        await bench.commit(1)
    policy = await bench.ledger.policy()
    assert (policy.version, policy.digest, policy.step) == (PolicyVersion(1, 1), "digest-1", 1)


async def test_an_older_incarnation_is_fenced_from_every_call(bench):
    await bench.start()
    await bench.ledger.open_trainer("another")
    ledger, version = bench.ledger, PolicyVersion(1, 0)
    calls = [
        ledger.take(1, 1, 2), ledger.archived(1, 1), ledger.commit(1, 1, version, ""), ledger.resume(1, 0),
        ledger.finish(1, "Failed"), ledger.open_validation(1, 0, version, 1, 1, True), ledger.close_validation(1, 0),
        ledger.drain_validation(1, 0), ledger.reject(1, 1, [], ""),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(FencedError, match="incarnation 1 was replaced by 2"):
            await call


async def test_opening_the_trainer_again_under_one_boot_id_gives_the_same_incarnation(bench):
    await bench.start()
    assert [await bench.ledger.open_trainer(boot) for boot in ("trainer", "x", "x", "y")] == [
        1,
        2,
        2,
        3,
    ]
    assert await bench.ledger.open_trainer("z", at_least=7) == 8


async def test_a_batch_with_an_undecodable_record_is_filled_from_the_next_group(bench):
    await bench.start()
    await bench.fill(3)
    await bench.take(1)
    await bench.ledger.reject(1, 1, [GroupId("t", 0, 0)], "corrupt", "checksum")
    assert await bench.take(1) == [GroupId("t", 1, 0), GroupId("t", 2, 0)]
    (letter,) = await bench.ledger.dead_letters()
    assert (letter.group, letter.reason, letter.evidence) == ("t0-0", "corrupt", "checksum")


async def test_a_batch_with_places_to_fill_cannot_be_archived(bench):
    await bench.start()
    await bench.fill(2)
    await bench.take(1)
    await bench.ledger.reject(1, 1, [GroupId("t", 0, 0)], "corrupt")
    assert (await bench.ledger.take(1, 1, 2)).reason == "groups"
    with pytest.raises(StateError, match="places to fill"):
        await bench.ledger.archived(1, 1)
