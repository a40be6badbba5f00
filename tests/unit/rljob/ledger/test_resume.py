"""A trainer that starts again: the checkpoint is the authority, nothing outstanding is dropped."""

import pytest

from rljob.errors import StateError
from rljob.ids import GroupId, PolicyVersion


async def restart(bench, step: int, boot: str = "again", **known: object) -> None:
    bench.incarnation = await bench.ledger.open_trainer(boot)
    await bench.ledger.resume(bench.incarnation, step, **known)


async def run_steps(bench, steps: int) -> None:
    for step in range(1, steps + 1):
        await bench.fill(2, step - 1)
        await bench.train(step)


async def test_what_is_outstanding_survives_a_resume(bench):
    await bench.start(max_staleness=2)
    await bench.fill(3)
    await bench.lease(1)
    before = await bench.counts()
    await restart(bench, 0)
    assert await bench.counts() == before


async def test_archived_batches_past_the_checkpoint_count_until_they_are_replayed(bench):
    await bench.start()
    await run_steps(bench, 3)
    await bench.fill(1, 3)
    await restart(bench, 1)
    counts = await bench.counts()
    assert counts["admitted"] == 3 * 2 + 1
    for step in (2, 3):
        await bench.ledger.archived(2, step)
        await bench.commit(step)
    assert (await bench.counts())["admitted"] == 3 * 2 + 1
    await bench.fill(1, 3)
    assert len(await bench.take(4)) == 2


async def test_replayed_steps_may_be_committed_at_once(bench):
    await bench.start()
    await run_steps(bench, 3)
    await restart(bench, 1)
    await bench.commit(3)
    assert (await bench.ledger.policy()).version == PolicyVersion(2, 3)


async def test_a_recorded_batch_is_the_same_for_the_next_incarnation(bench):
    await bench.start()
    await bench.fill(4)
    groups = await bench.take(1)
    await restart(bench, 0)
    assert await bench.take(1) == groups


async def test_a_batch_archived_just_before_the_crash_is_acknowledged_by_its_replay(bench):
    await bench.start()
    await bench.fill(4)
    await bench.take(1)
    await restart(bench, 0)
    await bench.ledger.archived(2, 1)
    await bench.commit(1)
    assert (await bench.ledger.snapshot()).stream_entries == 4
    assert await bench.take(2) == [GroupId("t", 2, 0), GroupId("t", 3, 0)]


async def test_a_lost_archive_is_made_good_with_new_groups(bench):
    await bench.start()
    await run_steps(bench, 3)
    await restart(bench, 1)
    await bench.commit(1)
    assert (await bench.ledger.take(2, 2, 2)).reason == "groups"
    counts = await bench.counts()
    assert (counts["rerun"], counts["admitted"]) == (8, 2)
    await bench.fill(2, 1)
    assert await bench.take(2) == [GroupId("t", 6, 0), GroupId("t", 7, 0)]


async def test_a_recorded_batch_goes_back_when_an_earlier_archive_is_lost(bench):
    await bench.start()
    await run_steps(bench, 2)
    await bench.fill(2, 2)
    await bench.take(3)
    await restart(bench, 1)
    await bench.commit(1)
    assert await bench.take(2) == [GroupId("t", 4, 0), GroupId("t", 5, 0)]
    await bench.ledger.archived(2, 2)
    await bench.commit(2)
    assert (await bench.counts())["admitted"] == 4


async def test_engines_of_the_line_left_behind_get_no_work(bench):
    await bench.start()
    await run_steps(bench, 2)
    await restart(bench, 1)
    await bench.commit(1)
    reply = await bench.ledger.lease("w", "b", PolicyVersion(1, 2), 4)
    assert (reply.leases, reply.reason) == ([], "engine_behind")


async def test_members_started_under_a_later_version_are_leased_after_it_went_back(bench):
    await bench.start(group_size=3)
    await run_steps(bench, 2)
    await bench.lease(1, n=2)
    await restart(bench, 1, archived_step=1)
    await bench.commit(1)
    names = [str(lease.episode) for lease in await bench.lease(2, n=1)]
    assert names == ["t4-0.1", "t4-0.2"]


async def test_a_store_that_lost_everything_trains_no_row_again(bench):
    await bench.start()
    await run_steps(bench, 2)
    archived = [GroupId("t", index, 0) for index in (0, 1, 2, 9)]
    await bench.ledger.destroy()
    await bench.ledger.initialise(bench.rules())
    bench.incarnation = await bench.ledger.open_trainer("again", at_least=1)
    await bench.ledger.resume(2, 2, archived_step=2, archived_groups=archived)
    await bench.commit(2)
    assert await bench.fill(2, 2) == [GroupId("t", 10, 0), GroupId("t", 11, 0)]
    assert len(await bench.train(3)) == 2


async def test_a_store_that_lost_the_acknowledgement_of_a_batch_does_not_train_it_again(bench):
    await bench.start()
    await bench.fill(4)
    await restart(
        bench, 0, archived_step=1, archived_groups=[GroupId("t", 0, 0), GroupId("t", 1, 0)]
    )
    await bench.commit(1)
    assert await bench.take(2) == [GroupId("t", 2, 0), GroupId("t", 3, 0)]


async def test_a_trainer_whose_store_lost_its_batch_must_start_again(bench):
    await bench.start()
    await bench.fill(4)
    await bench.train(1)
    await bench.ledger.destroy()
    await bench.ledger.initialise(bench.rules())
    with pytest.raises(StateError, match="unknown"):
        await bench.ledger.take(1, 2, 2)


async def test_a_failed_job_is_taken_up_and_a_finished_one_is_not(bench):
    await bench.start(steps=1)
    await bench.ledger.finish(None, "Failed", "no progress")
    await restart(bench, 0)
    assert await bench.ledger.finished() is None
    await bench.commit(0)
    await bench.fill(2)
    await bench.train(1)
    await bench.ledger.finish(2, "Succeeded")
    await restart(bench, 1, boot="third")
    assert await bench.ledger.finished() == "Succeeded"
