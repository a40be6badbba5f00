"""Which checkpoint counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_trainer.checkpoint import Checkpoints


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(
        step, lambda folder: (folder / "weights").write_text(f"w{step}"), {"incarnation": 4}
    )  # type: ignore[arg-type, return-value]


def test_the_newest_is_found_with_its_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    save(checkpoints, 2)
    save(checkpoints, 10)
    found = checkpoints.newest()
    assert found
    assert (found.step, found.state["incarnation"], (found.path / "weights").read_text()) == (
        10,
        4,
        "w10",
    )


@pytest.mark.parametrize("damage", ["weights", "state.json"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    save(checkpoints, 2)
    save(checkpoints, 10)
    (tmp_path / "checkpoints" / "step-000010" / damage).write_text("w11")
    found = checkpoints.newest()
    assert found
    assert found.step == 2


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000003",
        "step-000004",
    ]


def test_one_that_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, fail, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    save(checkpoints, 1)
    assert checkpoints.newest() is not None
