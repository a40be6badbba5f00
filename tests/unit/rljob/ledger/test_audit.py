"""The audit sees a planted loss and a planted duplicate, and explains everything else."""

import hashlib
import json
import shutil

import pytest

from rljob.errors import CorruptError
from rljob.ledger.audit import audit


class Records:
    """Writes the two other records as worker and trainer do."""

    def __init__(self, artifacts) -> None:
        self.artifacts = artifacts

    def log(self, episode, attempt, payload, answer) -> None:
        folder = self.artifacts / "completions"
        folder.mkdir(exist_ok=True)
        line = {
            "time": 1.0,
            "episode": str(episode),
            "attempt": attempt,
            "answer": answer,
            "reward": 0.0,
        }
        line |= {"outcome": "completed", "sha256": hashlib.sha256(payload).hexdigest()}
        with (folder / "worker-0.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def archive(self, step, groups) -> None:
        folder = self.artifacts / f"batches/step-{step:06d}"
        folder.mkdir(parents=True)
        blob, entries = b"", []
        for group in groups:
            episodes = []
            for member, payload in enumerate(group.payloads):
                blob += b"\0\0\0\0"
                place = {
                    "offset": len(blob),
                    "length": len(payload),
                    "sha256": hashlib.sha256(payload).hexdigest(),
                }
                episodes.append({"episode": f"{group.group}.{member}", "attempt": 1, **place})
                blob += payload
            entries.append(
                {
                    "group": str(group.group),
                    "row_index": group.group.row_index,
                    "episodes": episodes,
                }
            )
        (folder / "groups.bin").write_bytes(blob)
        (folder / "manifest.json").write_text(
            json.dumps({"step": step, "incarnation": 1, "groups": entries})
        )


@pytest.fixture
def records(artifacts):
    return Records(artifacts)


async def work(bench, records, slots, n=0, until=None):
    """Lease and complete as a worker does, with its log."""
    for lease in await bench.lease(slots, n):
        payload = f"{lease.episode}/{lease.attempt}".encode()
        records.log(lease.episode, lease.attempt, payload, "sent")
        answer = await bench.complete(lease, n, payload=payload)
        records.log(lease.episode, lease.attempt, payload, answer)


async def train(bench, records, step):
    reply = await bench.ledger.take(1, step, 2)
    records.archive(step, reply.groups)
    await bench.ledger.archived(1, step)
    await bench.commit(step)


@pytest.fixture
async def job(bench, records, artifacts):
    """Two trained steps and one group outstanding."""
    await bench.start(max_staleness=2)
    await work(bench, records, 10)
    await train(bench, records, 1)
    await train(bench, records, 2)
    return bench


async def test_a_sound_job_is_clean_with_the_ledger_and_after_it(job, artifacts):
    report = await audit(artifacts, job.ledger)
    assert report.ok, report
    assert (report.leased, report.completed, report.trained, report.outstanding) == (10, 10, 8, 2)
    await job.ledger.destroy()
    assert await audit(str(artifacts), None) == report


async def test_a_planted_loss_is_found(job, records, artifacts):
    records.log("t2-0.1", 1, b"another worker's", "accepted")
    records.log("t77-0.0", 1, b"gone", "accepted")
    report = await audit(artifacts, job.ledger)
    assert (report.lost, report.rerun, report.ok) == (["t77-0.0"], 1, False)


async def test_a_payload_deleted_behind_the_ledgers_back_is_not_trained_and_the_prompt_is_replaced(
    job,
):
    store = job.ledger._store
    ((_, fields),) = await store.read_stream("stream", "", 1)
    await store.command("DEL", store.prefix + fields[b"k"].decode())
    await job.fill(1, 2)
    reply = await job.ledger.take(1, 3, 2)
    assert reply.reason == "groups"
    assert (await job.ledger.dead_letters())[0].reason == "payload_missing"


async def test_a_planted_duplicate_is_found(job, artifacts):
    shutil.copytree(artifacts / "batches/step-000001", artifacts / "batches/step-000000")
    report = await audit(artifacts, job.ledger)
    assert report.trained_twice == [
        f"row {row}: t{row}-0 in step 1, t{row}-0 in step 1" for row in (0, 1)
    ]
    assert not report.ok


async def test_a_lost_batch_is_found(job, artifacts):
    shutil.rmtree(artifacts / "batches/step-000002")
    report = await audit(artifacts, job.ledger)
    assert report.lost == ["t2-0.0", "t2-0.1", "t3-0.0", "t3-0.1"]


async def test_batches_of_a_line_left_behind_do_not_count(job, artifacts):
    step = json.loads((artifacts / "batches/step-000001/manifest.json").read_text())
    folder = artifacts / "batches/step-000009"
    shutil.copytree(artifacts / "batches/step-000001", folder)
    (folder / "manifest.json").write_text(json.dumps({**step, "step": 9}))
    assert (await audit(artifacts, job.ledger)).ok


async def test_a_record_that_nobody_sent_and_a_record_that_rotted_are_found(job, artifacts):
    log = artifacts / "completions/worker-0.jsonl"
    log.write_text(
        "".join(
            line for line in log.read_text().splitlines(keepends=True) if '"t0-0.1"' not in line
        )
        + '{"episode": "t3-'
    )
    blob = artifacts / "batches/step-000002/groups.bin"
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    report = await audit(artifacts, job.ledger)
    assert (report.unlogged, report.corrupt, report.ok) == (["t0-0.1"], ["t3-0.1 in step 2"], False)


async def test_a_manifest_that_does_not_decode_is_named(job, artifacts):
    (artifacts / "batches/step-000001/manifest.json").write_text("{")
    with pytest.raises(CorruptError, match="step-000001"):
        await audit(artifacts, job.ledger)


async def test_deaths_drops_evictions_and_validation_are_explained(bench, records, artifacts):
    await bench.start(max_attempts=1, zero_variance="drop", max_staleness=1)
    await bench.ledger.open_validation(1, 0, (await bench.ledger.policy()).version, 1, 1, True)
    await work(bench, records, 3)  # one of validation, two of a group that is dropped
    done, dying = await bench.lease(2)
    payload = b"sibling of a death"
    records.log(done.episode, 1, payload, await bench.complete(done, payload=payload))
    await bench.fail(dying)
    slow, stuck = await bench.lease(2)
    records.log(slow.episode, 1, payload, await bench.complete(slow, payload=payload))
    for step in (1, 2):
        for lease in await bench.lease(4, step - 1):
            data = str(lease.episode).encode()
            answer = await bench.complete(
                lease, step - 1, payload=data, reward=lease.episode.member
            )
            records.log(lease.episode, 1, data, answer)
        await train(bench, records, step)
    await bench.ledger.heartbeat("w", "b", bench.attempts([stuck]))
    report = await audit(artifacts, bench.ledger)
    assert report.ok, report
    assert (report.dropped, report.dead, report.evicted, report.trained) == (2, 1, 1, 8)
    assert report.completed == 12
