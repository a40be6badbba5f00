"""Jobs without a trainer: groups are only collected, or rows only scored."""

from pathlib import Path

import pytest

from rljob.api.load import load
from rljob.ids import GroupId, PolicyVersion
from rljob.ledger.types import LedgerConfig

FIVE = {"num_groups": 5, "steps": 3, "max_staleness": 3}
MANIFEST = Path(__file__).parents[4] / "examples" / "simulated" / "rljob.yaml"


async def collect(bench, step: int) -> list[GroupId]:
    """Take, archive and commit a batch; the policy stays as it is."""
    groups = await bench.take(step)
    await bench.ledger.archived(bench.incarnation, step)
    await bench.ledger.commit(bench.incarnation, step, PolicyVersion(1, 0), "digest-0")
    return groups


async def test_the_last_batch_holds_what_is_left_and_then_there_is_nothing_more(bench):
    await bench.start(**FIVE)
    filled = await bench.fill(5)
    assert (await bench.reply(2)).reason == "all_steps_admitted"
    collected = [group for step in (1, 2, 3) for group in await collect(bench, step)]
    assert collected == filled
    reply = await bench.ledger.take(bench.incarnation, 4, 2)
    assert (reply.groups, reply.reason) == (None, "all_collected")
    snapshot = await bench.ledger.snapshot()
    assert (snapshot.step, snapshot.staleness, snapshot.counts["trained"]) == (3, {}, 10)


@pytest.mark.parametrize(("one_pass", "rows"), [(True, [0, 2, 3, 4]), (False, [0, 2, 3, 4, 5])])
async def test_in_one_pass_no_other_row_takes_the_place_of_a_dead_one(bench, one_pass, rows):
    await bench.start(**FIVE, one_pass=one_pass, max_attempts=1)
    leases = await bench.lease(10)
    assert await bench.fail(leases[2]) == "dead"
    for lease in leases:
        if lease.row_index != 1:
            await bench.complete(lease)
    for lease in await bench.lease(10):
        await bench.complete(lease)
    collected: list[GroupId] = []
    step = 1
    while (reply := await bench.ledger.take(1, step, 2)).reason != "all_collected":
        assert reply.groups
        collected += await collect(bench, step)
        step += 1
    assert [group.row_index for group in collected] == rows
    assert (await bench.reply(2)).reason == "all_steps_admitted"


async def test_a_batch_may_shrink_to_nothing_while_it_is_waited_for(bench):
    await bench.start(**FIVE, one_pass=True, max_attempts=1)
    await bench.fill(4)
    await collect(bench, 1)
    await collect(bench, 2)
    (first, _) = await bench.lease(2)
    assert (await bench.ledger.take(1, 3, 2)).reason == "groups"
    await bench.fail(first)
    assert (await bench.ledger.take(1, 3, 2)).reason == "all_collected"


async def test_a_new_collector_goes_on_with_the_same_version_and_drops_nothing(bench):
    await bench.start(**FIVE)
    await bench.fill(3)
    await collect(bench, 1)
    running = await bench.lease(2)
    second = await bench.ledger.open_trainer("second")
    await bench.ledger.resume(second, 1, archived_step=1)
    await bench.ledger.commit(second, 1, PolicyVersion(1, 0), "digest-0")
    bench.incarnation = second
    for lease in running:
        assert await bench.complete(lease) == "accepted"
    # the worker's engine serves the first incarnation's version still, and need not switch
    (one, two) = (await bench.ledger.lease("w", "b", PolicyVersion(1, 0), 2)).leases
    assert one.row_index == two.row_index == 4
    assert [group.row_index for group in await collect(bench, 2)] == [2, 3]


async def test_a_scoring_job_leases_validation_alone_and_counts_it_as_its_work(bench):
    await bench.start(group_size=1, groups_per_step=1, steps=0, max_staleness=0)
    await bench.ledger.open_validation(1, 0, PolicyVersion(1, 0), 3, 1, True)
    leases = await bench.lease(8)
    assert [str(lease.episode) for lease in leases] == ["v0-0.0", "v0-1.0", "v0-2.0"]
    assert (await bench.reply(8)).reason == "all_steps_admitted"
    assert (await bench.counts())["running"] == 3
    await bench.complete(leases[0], reward=1.0)
    snapshot = await bench.ledger.snapshot()
    assert (snapshot.counts["completed"], snapshot.reward_recent, snapshot.turns_recent) == (
        1,
        1.0,
        3.0,
    )


async def test_what_is_archived_of_a_large_validation_leaves_the_store_and_stays_scored(bench):
    await bench.start(group_size=1, groups_per_step=1, steps=0, max_staleness=0)
    version = PolicyVersion(1, 0)
    await bench.ledger.open_validation(1, 0, version, 3, 1, True)
    leases = await bench.lease(3)
    for lease in leases[:2]:
        await bench.complete(lease, reward=1.0)
    ((first, _), (second, _)) = await bench.ledger.drain_validation(1, 0)
    await bench.ledger.forget_validation(1, 0, first)
    assert [entry for entry, _ in await bench.ledger.drain_validation(1, 0)] == [second]
    await bench.ledger.forget_validation(1, 0, second)
    await bench.ledger.forget_validation(1, 0, second)
    assert await bench.payload_keys() == 0
    assert await bench.complete(leases[0], reward=1.0) == "accepted"  # its answer was lost
    assert await bench.payload_keys() == 0
    taken_over = await bench.ledger.open_trainer("second")
    await bench.ledger.open_validation(taken_over, 0, version, 3, 1, True)
    status = await bench.ledger.validation(0)
    assert (status.total, status.done, status.sum_reward) == (3, 2, 2.0)
    await bench.complete(leases[2], reward=0.0)
    await bench.ledger.close_validation(taken_over, 0)
    assert (await bench.ledger.snapshot()).validation[0] == pytest.approx(2 / 3)


def test_the_rules_of_a_mode_are_made_of_its_own_numbers() -> None:
    job = load(MANIFEST)
    spec = job.spec.model_copy(update={"mode": "eval"})
    rules = LedgerConfig.from_job(job.model_copy(update={"spec": spec}), 20, "d")
    assert (rules.steps, rules.num_rows, rules.num_groups) == (0, 20, None)
    rollout = job.spec.rollout.model_copy(update={"groups": 50})
    spec = job.spec.model_copy(update={"mode": "rollout", "rollout": rollout})
    rules = LedgerConfig.from_job(job.model_copy(update={"spec": spec}), 20, "d")
    assert (rules.groups_per_step, rules.steps, rules.num_groups) == (16, 4, 50)
    assert not rules.one_pass
    spec = job.spec.model_copy(update={"mode": "rollout"})
    rules = LedgerConfig.from_job(job.model_copy(update={"spec": spec}), 20, "d")
    assert (rules.steps, rules.num_groups, rules.one_pass) == (2, 20, True)
