"""The trainer's loop on a ledger in memory and the simulated backend."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rljob.clock import SystemClock
from rljob.errors import FencedError, StoreError
from rljob.ids import GroupId, PolicyVersion
from rljob.ledger.types import Report, TakenGroup
from rljob_trainer.backends.simulated import SimulatedBackend
from rljob_trainer.batch import archived_groups
from rljob_trainer.loop import Trainer, train
from rljob_trainer.metrics import read_lines
from rljob_trainer.progress import Progress
from rljob_trainer.testing import FakeLedger, FakeStore, job


async def make_trainer(artifacts: Path, ledger: FakeLedger, rows: int = 0, **spec: Any) -> Trainer:
    return Trainer(
        job=job(**spec),
        artifacts=artifacts,
        scratch=artifacts / "scratch",
        ledger=ledger,
        incarnation=await ledger.open_trainer("boot"),
        backend=SimulatedBackend(),
        store=FakeStore(artifacts),
        progress=Progress(),
        clock=SystemClock(),
        num_validation_rows=rows,
    )


async def test_every_step_is_archived_trained_published_and_committed(tmp_path: Path) -> None:
    ledger = FakeLedger()
    trainer = await make_trainer(tmp_path, ledger)
    await train(trainer)
    assert [(step, version) for step, version, _ in ledger.commits] == [
        (step, PolicyVersion(1, step)) for step in range(5)
    ]
    assert ledger.archived_steps == [1, 2, 3, 4]
    assert [line["step"] for line in read_lines(tmp_path / "metrics" / "steps.jsonl")] == [
        1,
        2,
        3,
        4,
    ]
    assert [path.name for path in sorted((tmp_path / "batches").iterdir())] == [
        f"step-{step:06d}" for step in range(1, 5)
    ]


async def test_a_new_trainer_continues_from_checkpoint_and_archive_to_the_same_weights(
    tmp_path: Path,
) -> None:
    whole = await make_trainer(
        tmp_path / "whole", FakeLedger(), steps=6, checkpoint={"everySteps": 2}
    )
    await train(whole)
    ledger = FakeLedger()
    first = await make_trainer(tmp_path / "cut", ledger, steps=6, checkpoint={"everySteps": 2})
    ledger.fail_at = ("commit", 5)
    with pytest.raises(ExceptionGroup):
        await train(first)
    second = await make_trainer(tmp_path / "cut", ledger, steps=6, checkpoint={"everySteps": 2})
    await train(second)
    assert ledger.resumed == [(0, 0), (4, 5)]
    assert second.backend.history == whole.backend.history
    assert (second.backend.weights == whole.backend.weights).all()
    assert second.version == PolicyVersion(2, 6)
    assert [line["step"] for line in read_lines(tmp_path / "cut" / "metrics" / "steps.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


async def test_a_group_that_does_not_decode_is_rejected_and_replaced(tmp_path: Path) -> None:
    ledger = FakeLedger()
    bad = TakenGroup(group=GroupId("t", 50, 0), payloads=[b"nonsense", b""], evictions=0)
    trainer = await make_trainer(tmp_path, ledger, steps=1)
    ledger.taken[1] = [bad, ledger.make_group()]
    await train(trainer)
    assert ledger.rejected == [bad.group]
    assert len(archived_groups(tmp_path, 1, 1)) == 2


async def test_weights_published_every_second_step_are_committed_for_both(tmp_path: Path) -> None:
    ledger = FakeLedger()
    await train(await make_trainer(tmp_path, ledger, weights={"publishEverySteps": 2}, steps=5))
    assert [(step, version.n) for step, version, _ in ledger.commits] == [
        (0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (5, 5),
    ]  # fmt: skip


async def test_a_failing_report_does_not_stop_the_training_but_a_failing_commit_does(
    tmp_path: Path,
) -> None:
    ledger = FakeLedger()

    async def report(component: str, report: Report) -> None:
        raise StoreError("away")

    ledger.report = report
    await train(await make_trainer(tmp_path / "a", ledger, steps=2))
    assert ledger.phase == "Succeeded"
    failing = FakeLedger()
    failing.fail_at = ("commit", 1)
    with pytest.raises(ExceptionGroup) as caught:
        await train(await make_trainer(tmp_path / "b", failing, steps=2))
    assert caught.group_contains(StoreError)


async def test_masked_tokens_are_those_past_the_bound(tmp_path: Path) -> None:
    ledger = FakeLedger()
    ledger.sampled_n = 0
    rollout = {"schedule": "async", "maxStaleness": 1, "onStale": "mask"}
    await train(await make_trainer(tmp_path, ledger, steps=3, rollout=rollout))
    lines = read_lines(tmp_path / "metrics" / "steps.jsonl")
    assert [(line["trained_tokens"], line["staleness_max"]) for line in lines] == [
        (16, 0),
        (16, 1),
        (0, 2),
    ]


async def test_a_fenced_trainer_ends_with_the_fence(tmp_path: Path) -> None:
    ledger = FakeLedger()
    trainer = await make_trainer(tmp_path, ledger)
    await ledger.open_trainer("another")
    with pytest.raises(ExceptionGroup) as caught:
        await train(trainer)
    assert caught.group_contains(FencedError)


async def test_the_trainer_says_what_it_waits_for(tmp_path: Path) -> None:
    ledger = FakeLedger()
    ledger.empty_takes = 120
    trainer = await make_trainer(tmp_path, ledger, steps=1)
    await train(trainer)
    assert "groups: 1 of 2 ready" in [report.waiting_for for report in ledger.reports]


async def test_nothing_is_published_before_a_settled_validation_is_done(tmp_path: Path) -> None:
    ledger = FakeLedger()
    trainer = await make_trainer(tmp_path, ledger, rows=3, steps=2, validation={"everySteps": 100})
    task = asyncio.create_task(train(trainer))
    await wait_for(lambda: 1 in ledger.taken)
    await asyncio.sleep(0.1)
    assert [step for step, _, _ in ledger.commits] == [0]
    await wait_for(
        lambda: "validation: 0 of 3" in [report.waiting_for for report in ledger.reports]
    )
    ledger.finish_validation(0, 3)
    await wait_for(lambda: 2 in ledger.validations)
    ledger.finish_validation(2, 2, reward=0.5, dead=1)
    await asyncio.wait_for(task, 5)
    first, last = read_lines(tmp_path / "metrics" / "validation.jsonl")
    assert (first["score"], first["settled"], first["version"]) == (1.0, True, "1-0")
    assert (last["score"], last["n"], last["returned"]) == (pytest.approx(1 / 3), 3, 2)
    assert len((tmp_path / "validation" / "step-000002.jsonl").read_text().splitlines()) == 2


async def wait_for(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
