"""Validation is a class of its own: own quota, own stream, own end."""

from rljob.ids import PolicyVersion


async def open_run(bench, step=0, rows=2, samples=2, settled=True, n=0):
    await bench.ledger.open_validation(
        bench.incarnation, step, PolicyVersion(bench.incarnation, n), rows, samples, settled
    )


async def test_validation_comes_first_and_counts_for_no_admission(bench):
    await bench.start(max_concurrent_episodes=2, max_running_validation=10)
    await open_run(bench)
    leases = await bench.lease(6)
    assert [str(lease.episode) for lease in leases] == [
        "v0-0.0",
        "v0-0.1",
        "v0-1.0",
        "v0-1.1",
        "t0-0.0",
        "t0-0.1",
    ]
    assert [lease.row_index for lease in leases[:4]] == [0, 0, 1, 1]
    assert all(lease.validation for lease in leases[:4])
    counts = await bench.counts()
    assert (counts["admitted"], counts["running"], counts["validation_running"]) == (1, 2, 4)


async def test_a_run_is_scored_to_its_end_and_leaves_only_its_score(bench):
    await bench.start()
    await open_run(bench)
    for index, lease in enumerate(await bench.lease(4)):
        await bench.complete(lease, reward=index % 2, payload=bytes([index]))
    status = await bench.ledger.validation(0)
    assert (status.total, status.done, status.sum_reward, status.complete, status.score) == (
        4,
        4,
        2.0,
        True,
        0.5,
    )
    drained = await bench.ledger.drain_validation(1, 0)
    assert [payload for _, payload in drained] == [bytes([index]) for index in range(4)]
    assert await bench.ledger.drain_validation(1, 0, after=drained[2][0]) == drained[3:]
    await bench.ledger.close_validation(1, 0)
    await bench.ledger.close_validation(1, 0)
    assert (await bench.ledger.snapshot()).validation == {0: 0.5}
    assert not (await bench.ledger.validation(0)).open


async def test_a_settled_run_is_leased_only_to_engines_on_its_version(bench):
    await bench.start(max_staleness=3)
    await open_run(bench)
    other = await bench.ledger.lease("x", "y", PolicyVersion(1, 1), 2)
    assert not [lease for lease in other.leases if lease.validation]
    assert all(lease.validation for lease in await bench.lease(2))


async def test_an_unsettled_run_records_the_span_of_versions(bench):
    await bench.start()
    await open_run(bench, settled=False, rows=1)
    first, second = await bench.lease(2)
    await bench.complete(first, n=0)
    await bench.complete(second, n=1, newest=3)
    assert (await bench.ledger.validation(0)).versions == (0, 3)


async def test_an_episode_out_of_attempts_counts_zero(bench):
    await bench.start(max_attempts=2)
    await open_run(bench, rows=1)
    first, second = await bench.lease(2)
    await bench.complete(first, reward=1.0)
    assert await bench.fail(second) == "retry"
    (again,) = [lease for lease in await bench.lease(1) if lease.validation]
    assert await bench.fail(again) == "dead"
    status = await bench.ledger.validation(0)
    assert (status.done, status.dead, status.score, status.complete) == (1, 1, 0.5, True)
    assert (await bench.ledger.dead_letters())[0].episode == "v0-0.1"


async def test_its_quota_is_its_own(bench):
    await bench.start(max_running_validation=3)
    await open_run(bench, rows=4)
    leases = await bench.lease(5)
    assert [lease.validation for lease in leases] == [True, True, True, False, False]


async def test_an_interrupted_run_goes_on_under_the_next_trainer(bench):
    await bench.start()
    await open_run(bench, settled=False)
    await bench.complete((await bench.lease(1))[0])
    bench.incarnation = await bench.ledger.open_trainer("again")
    await bench.ledger.resume(2, 0)
    await bench.commit(0)
    assert not (await bench.lease(1))[0].validation
    await open_run(bench, settled=False)
    assert str((await bench.lease(1))[0].episode) == "v0-0.1"
    assert (await bench.ledger.validation(0)).done == 1


async def test_a_settled_run_starts_afresh_on_another_version(bench):
    await bench.start()
    await open_run(bench)
    late, _ = await bench.lease(2)
    await bench.complete(late)
    bench.incarnation = await bench.ledger.open_trainer("again")
    await bench.commit(0)
    await open_run(bench)
    status = await bench.ledger.validation(0)
    assert (status.done, status.running) == (0, 0)


async def test_runs_nobody_follows_end_with_the_next_one_and_with_a_resume_behind_them(bench):
    await bench.start()
    await open_run(bench, settled=False)
    bench.incarnation = await bench.ledger.open_trainer("again")
    await open_run(bench, step=2, settled=False)
    assert not (await bench.ledger.validation(0)).open
    await bench.ledger.resume(2, 1)
    assert not (await bench.ledger.validation(2)).open


async def test_late_completions_of_a_closed_run_are_already_done(bench):
    await bench.start()
    await open_run(bench)
    leases = await bench.lease(2)
    await bench.ledger.close_validation(1, 0)
    assert await bench.complete(leases[0]) == "already_done"
    assert await bench.fail(leases[1]) == "already_done"
    verdicts = await bench.ledger.heartbeat("w", "b", bench.attempts(leases))
    assert set(verdicts.values()) == {"already_done"}


async def test_versions_that_are_held_leased_scored_or_newest_are_kept(bench):
    await bench.start(max_staleness=3)
    await bench.lease(1, n=0)
    await bench.ledger.hold_version("w", "b", PolicyVersion(1, 5))
    await open_run(bench, n=7)
    await bench.ledger.commit(1, 0, PolicyVersion(1, 9), "")
    held = await bench.ledger.held_versions()
    assert held == {PolicyVersion(1, n) for n in (0, 5, 7, 9)}
    await bench.ledger.open_worker("w", "next")
    assert PolicyVersion(1, 5) not in await bench.ledger.held_versions()
