"""Validation runs on a ledger in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rljob.clock import SystemClock
from rljob.codec import unpack
from rljob.ids import PolicyVersion
from rljob_trainer.batch import LENGTH
from rljob_trainer.metrics import append_line, read_lines
from rljob_trainer.progress import Progress
from rljob_trainer.testing import FakeLedger, chain, job, trajectory
from rljob_trainer.validation import Validator, score


class QuickClock(SystemClock):
    """Time goes a hundred times as fast."""

    def monotonic(self) -> float:
        return super().monotonic() * 100

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 100)


async def make(
    artifacts: Path,
    ledger: FakeLedger,
    tasks: asyncio.TaskGroup,
    rows: int = 4,
    deadline: int = 900,
    **validation: Any,
) -> Validator:
    made = job(steps=8, validation={"everySteps": 2, **validation})
    lifecycle = made.spec.lifecycle.model_copy(update={"progress_deadline_seconds": deadline})
    manifest = made.model_copy(
        update={"spec": made.spec.model_copy(update={"lifecycle": lifecycle})}
    )
    incarnation = await ledger.open_trainer("boot")
    return Validator(
        manifest, artifacts, ledger, incarnation, rows, tasks.create_task, Progress(), QuickClock()
    )


def records(artifacts: Path) -> list[dict[str, Any]]:
    return read_lines(artifacts / "metrics" / "validation.jsonl")


async def test_first_and_last_are_settled_and_the_others_in_flight(tmp_path: Path) -> None:
    ledger = FakeLedger()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger, tasks)
        for step in range(9):
            await validator.open_if_due(step, PolicyVersion(1, step))
            if step % 2 == 0:
                ledger.finish_validation(step, 4)
            await validator.finished()
    assert [(line["step"], line["settled"]) for line in records(tmp_path)] == [
        (0, True), (2, False), (4, False), (6, False), (8, True),
    ]  # fmt: skip
    assert not any(run["open"] for run in ledger.validations.values())


async def test_one_that_falls_due_while_another_runs_is_left_out(tmp_path: Path) -> None:
    ledger = FakeLedger()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger, tasks)
        await validator.open_if_due(2, PolicyVersion(1, 2))
        await validator.open_if_due(4, PolicyVersion(1, 4))
        ledger.finish_validation(2, 4)
    assert [line["step"] for line in records(tmp_path)] == [2]


async def test_only_a_settled_run_holds_back_a_publication(tmp_path: Path) -> None:
    ledger = FakeLedger()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger, tasks)
        await validator.open_if_due(2, PolicyVersion(1, 2))
        await validator.settled()
        ledger.finish_validation(2, 4)
        await validator.finished()
        await validator.open_if_due(8, PolicyVersion(1, 8))
        waiting = tasks.create_task(validator.settled())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        ledger.finish_validation(8, 4)


async def test_a_run_that_stalls_is_closed_with_what_it_has(tmp_path: Path) -> None:
    ledger = FakeLedger()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger, tasks)
        await validator.open_if_due(0, PolicyVersion(1, 0))
        ledger.finish_validation(0, 3)
    (line,) = records(tmp_path)
    assert (line["score"], line["n"], line["returned"], line["asked"]) == (1.0, 3, 3, 4)


async def test_a_row_out_of_attempts_counts_as_nothing_where_the_run_stalls(tmp_path: Path) -> None:
    ledger = FakeLedger()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger, tasks, deadline=60)
        await validator.open_if_due(0, PolicyVersion(1, 0))
        ledger.finish_validation(0, 1, dead=1)
    (line,) = records(tmp_path)
    assert (line["score"], line["n"], line["returned"]) == (0.5, 2, 1)


async def test_a_run_of_which_nothing_came_back_leaves_no_score(tmp_path: Path) -> None:
    ledger = FakeLedger()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger, tasks, deadline=5)
        await validator.open_if_due(0, PolicyVersion(1, 0))
        await validator.finished()
    assert records(tmp_path) == []
    assert not ledger.validations[0]["open"]


async def test_the_first_episode_may_take_longer_than_a_short_progress_deadline(
    tmp_path: Path,
) -> None:
    ledger = FakeLedger()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger, tasks, deadline=5)
        await validator.open_if_due(0, PolicyVersion(1, 0))
        await QuickClock().sleep(40)
        ledger.finish_validation(0, 4)
    assert [line["returned"] for line in records(tmp_path)] == [4]


async def test_a_run_on_record_is_not_run_again(tmp_path: Path) -> None:
    append_line(tmp_path / "metrics" / "validation.jsonl", {"step": 2})
    async with asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger := FakeLedger(), tasks)
        assert validator.is_pending(4)
        assert not validator.is_pending(2)
        await validator.open_if_due(2, PolicyVersion(1, 2))
    assert not ledger.validations


@pytest.mark.parametrize(
    ("resumed", "step", "left_open", "opened"),
    [
        (2, 3, 2, 2),  # its trainer died while it ran, and the checkpoint is as new: go on with it
        (0, 3, None, 3),  # it scored a line that is gone: score what there is
        (2, 3, None, None),  # it was over, stalled or left out
        (0, 2, None, 2),  # it falls due just now
    ],
)
async def test_after_a_resume_validation_goes_on(
    tmp_path: Path, resumed: int, step: int, left_open: int | None, opened: int | None
) -> None:
    ledger = FakeLedger()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger, tasks)
        if left_open is not None:
            await ledger.open_validation(1, left_open, PolicyVersion(1, left_open), 4, 1, False)
        await validator.open_again(resumed, step, PolicyVersion(2, step))
        for open_step in ledger.validations:
            ledger.finish_validation(open_step, 4)
    assert [line["step"] for line in records(tmp_path)] == ([] if opened is None else [opened])


async def test_the_files_hold_every_episode_in_order(tmp_path: Path) -> None:
    ledger = FakeLedger()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        validator = await make(tmp_path, ledger, tasks, samplesPerPrompt=2)
        await validator.open_if_due(2, PolicyVersion(1, 2))
        ledger.validations[2]["todo"].reverse()
        ledger.finish_validation(2, 8, reward=0.5)
    expected = [f"v2-{row}.{member}" for row in range(4) for member in range(2)]
    assert [
        line["episode"] for line in read_lines(tmp_path / "validation" / "step-000002.jsonl")
    ] == expected
    data, found = (tmp_path / "validation" / "step-000002.bin").read_bytes(), []
    while data:
        (length,) = LENGTH.unpack_from(data)
        found.append(unpack(data[LENGTH.size : LENGTH.size + length]).episode)
        data = data[LENGTH.size + length :]
    assert found == expected


def test_a_score_counts_what_did_not_come_back_as_nothing() -> None:
    back = [
        trajectory(f"v4-{row}.{m}", float(m == 0), [chain(n=3 + row)])
        for row in range(2)
        for m in range(2)
    ]
    found = score(back, total=8, samples=2, ks=[1, 2])
    assert found["score"] == 0.25
    assert found["pass_at"] == {"1": 0.25, "2": 0.5}
    assert found["versions"] == [3, 4]
    assert 0.05 < found["ci_low"] < 0.25 < found["ci_high"] < 0.6
