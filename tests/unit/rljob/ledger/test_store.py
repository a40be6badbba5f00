"""The store itself: restarts, full memory, wrong addresses, scripts that it forgot, keys that are left."""

import asyncio

import pytest

from rljob.errors import ManifestError, StoreError
from rljob.ids import PolicyVersion
from rljob.ledger import Ledger, Report
from rljob.ledger.connection import script_names, script_source


async def test_a_store_that_is_not_there_is_named_by_the_deadline(free_port):
    with pytest.raises(StoreError, match=r"no answer from the store within 0\.3 s"):
        await Ledger.connect(f"redis://127.0.0.1:{free_port()}/0", "j", deadline_seconds=0.3)


async def test_a_wrong_password_is_not_retried(valkey):
    with pytest.raises(StoreError, match="refused this client"):
        await Ledger.connect(valkey.url.replace(valkey.password, "wrong"), "j", deadline_seconds=60)


async def test_a_url_of_another_kind_is_bad_input():
    with pytest.raises(ManifestError, match=r"spec\.store\.redis\.url"):
        await Ledger.connect("http://127.0.0.1/", "j")


async def test_scripts_that_the_server_forgot_are_loaded_again(bench, valkey):
    await bench.start()
    valkey.command("SCRIPT", "FLUSH")
    assert len(await bench.lease(1)) == 1


async def test_every_script_uses_only_what_redis_6_2_knows():
    assert len(script_names()) >= 25
    for name in script_names():
        source = script_source(name)
        assert "#!lua" not in source
        assert "redis.setresp" not in source
        assert "error({" not in source


async def test_jobs_share_a_store_without_seeing_each_other_and_destroy_leaves_nothing(
    bench, valkey
):
    await bench.start()
    async with await Ledger.connect(valkey.url, "other-job") as other:
        assert (await other.snapshot()).step == 0
        assert (await other.policy()).version is None
        await other.report("x", Report())
        await bench.fill(2)
        await bench.train(1)
        await bench.ledger.destroy()
        await bench.ledger.destroy()
        assert valkey.command("DBSIZE") == b":1"
        await other.destroy()
    assert valkey.command("DBSIZE") == b":0"


async def test_a_finished_job_has_kept_nothing_per_episode(bench, valkey):
    await bench.start(steps=6)
    sizes = []
    for step in range(1, 7):
        await bench.fill(2, step - 1)
        await bench.train(step)
        sizes.append(valkey.command("DBSIZE"))
    assert len(set(sizes)) == 1


async def test_reports_are_read_back_with_their_age(bench):
    await bench.start()
    await bench.ledger.report(
        "worker-0", Report(waiting_for="sandbox", facts={"tokens": 2.5, "mode": "x"})
    )
    await bench.ledger.report("trainer", Report(waiting_for="x" * 100_000, facts={}))
    await asyncio.sleep(0.05)
    reports = (await bench.ledger.snapshot()).reports
    assert (reports["worker-0"].waiting_for, reports["worker-0"].facts) == (
        "sandbox",
        {"tokens": 2.5, "mode": "x"},
    )
    assert 0.04 < reports["worker-0"].age_seconds < 10
    assert len(reports["trainer"].waiting_for) == 1024


async def test_snapshot_before_and_after_work(bench):
    empty = await bench.ledger.snapshot()
    assert (empty.reward_mean, empty.policy.version, empty.counts["admitted"]) == (None, None, 0)
    await bench.start()
    before = (await bench.ledger.snapshot()).progress
    for lease in await bench.lease(4):
        await bench.complete(lease, reward=float(lease.episode.member))
    await bench.take(1)
    snapshot = await bench.ledger.snapshot()
    assert (snapshot.reward_mean, snapshot.stream_entries, snapshot.stream_pending) == (0.5, 4, 4)
    assert (snapshot.turns_recent, snapshot.counts["taken_groups"], snapshot.progress - before) == (
        3,
        2,
        5,
    )
    assert snapshot.policy.version == PolicyVersion(1, 0)


@pytest.fixture
async def small(own_valkey, job_name):
    """A ledger on a store of 12 MiB."""
    own_valkey.kill()
    own_valkey.start("--maxmemory", "12mb")
    async with await Ledger.connect(own_valkey.url, job_name, deadline_seconds=2) as ledger:
        yield ledger


async def test_new_groups_stop_at_four_fifths_of_memory_and_go_on_when_a_batch_is_archived(
    small, bench
):
    bench.ledger = small
    await bench.start(max_staleness=50, steps=60, group_size=1)
    reply = await bench.reply(1)
    while reply.leases:
        await bench.complete(reply.leases[0], payload=bytes(500_000))
        reply = await bench.reply(1)
    assert reply.reason == "memory"
    snapshot = await small.snapshot()
    assert 0.8 <= snapshot.memory_bytes / snapshot.max_memory_bytes < 0.9
    for step in (1, 2, 3):
        await bench.train(step)
    assert (await bench.reply(1, n=3)).leases


async def test_a_full_store_refuses_completions_and_everything_that_frees_it_still_works(
    small, bench
):
    bench.ledger = small
    await bench.start(max_staleness=50, steps=60, group_size=1)
    leases = await bench.lease(40)
    accepted = 0

    async def complete_all() -> None:
        nonlocal accepted
        for lease in leases:
            await bench.complete(lease, payload=bytes(500_000))
            accepted += 1

    with pytest.raises(StoreError, match="complete"):
        await complete_all()
    held = leases[accepted:]
    assert (await small.heartbeat("w", "b", bench.attempts(held)))[(held[0].episode, 1)] == "ok"
    assert await bench.fail(held[-1]) == "retry"
    await small.report("w", Report(waiting_for="memory"))
    for step in (1, 2, 3):
        await bench.train(step)
    assert await bench.complete(held[0], payload=bytes(500_000)) == "accepted"
    assert (await small.snapshot()).counts["completed"] == accepted + 1
