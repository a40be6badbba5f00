"""Every call may be repeated: here the answer to each first try is lost on its way, after the work was done."""

import asyncio
import itertools

import pytest

from rljob.ids import GroupId, PolicyVersion


@pytest.fixture
def lossy(bench, monkeypatch):
    """The bench on a line that loses every second answer."""
    store, tries = bench.ledger._store, itertools.count()
    exchange = store._exchange

    async def lose_every_second(*commands):
        answers = await exchange(*commands)
        if next(tries) % 2 == 0:
            raise ConnectionResetError("the answer was lost")
        return answers

    monkeypatch.setattr(store, "_exchange", lose_every_second)
    return bench


async def test_a_whole_job_on_a_line_that_loses_answers_does_everything_once(lossy):
    await lossy.start(steps=2, max_staleness=0)
    for step in (1, 2):
        groups = await lossy.fill(2, step - 1)
        assert groups == [GroupId("t", 2 * step - 2, 0), GroupId("t", 2 * step - 1, 0)]
        reply = await lossy.ledger.take(1, step, 2)
        assert [payload for group in reply.groups for payload in group.payloads] == [
            f"{group}.{member}/1".encode() for group in groups for member in (0, 1)
        ]
        await lossy.ledger.archived(1, step)
        await lossy.commit(step)
    snapshot = await lossy.ledger.snapshot()
    counts = snapshot.counts
    assert (counts["leased"], counts["completed"], counts["trained"], counts["expired"]) == (
        8,
        8,
        8,
        0,
    )
    assert (snapshot.stream_entries, await lossy.payload_keys()) == (0, 0)
    assert (await lossy.ledger.policy()).version == PolicyVersion(1, 2)


async def test_a_failure_whose_answer_was_lost_counts_once(lossy):
    await lossy.start(max_attempts=2, retry_backoff_seconds=0.0)
    (lease,) = await lossy.lease(1)
    assert await lossy.fail(lease) == "retry"
    assert (await lossy.counts())["failed"] == 1


async def test_an_accepted_payload_is_not_lost_with_its_answer(lossy):
    await lossy.start(group_size=1)
    for lease in await lossy.lease(2):
        assert await lossy.complete(lease, payload=b"precious") == "accepted"
    reply = await lossy.ledger.take(1, 1, 2)
    assert [group.payloads for group in reply.groups] == [[b"precious"], [b"precious"]]
    assert await lossy.payload_keys() == 2
    store = lossy.ledger._store
    assert {await store.command("TTL", key) for key in await store.keys("b:")} == {-1}


async def test_validation_on_such_a_line_is_scored_once(lossy):
    await lossy.start()
    await lossy.ledger.open_validation(1, 0, PolicyVersion(1, 0), 2, 1, True)
    for lease in await lossy.lease(2):
        await lossy.complete(lease, reward=1.0)
    status = await lossy.ledger.validation(0)
    assert (status.done, status.sum_reward, status.complete) == (2, 2.0, True)
    assert len(await lossy.ledger.drain_validation(1, 0)) == 2


async def test_resume_and_open_on_such_a_line(lossy):
    await lossy.start()
    await lossy.fill(2)
    await lossy.train(1)
    assert await lossy.ledger.open_trainer("next") == 2
    await lossy.ledger.resume(2, 0)
    assert (await lossy.counts())["admitted"] == 2
    await lossy.lease(2, worker="x", boot="1")
    assert await lossy.ledger.open_worker("x", "2") == []


async def test_closing_while_a_call_is_under_way_leaves_no_connection_open(bench):
    await bench.start()
    calls = [asyncio.create_task(bench.ledger.policy()) for _ in range(5)]
    await asyncio.sleep(0)
    await bench.ledger.aclose()
    await asyncio.gather(*calls)
    assert bench.ledger._store._idle == []
