"""Commands that look at a run's folder."""

from __future__ import annotations

from pathlib import Path

from rljob_operator.drivers.folder import RunFolder
from rljob_operator.show.runs import artifacts_of


def laid(root: Path, artifacts: str | None = None) -> RunFolder:
    """A run that was begun, by this process."""
    folder = RunFolder(root)
    folder.lay()
    folder.write("job.json", {"spec": {"store": {"artifacts": artifacts}}})
    folder.mark_running(0.0, Path(artifacts) if artifacts else root / "artifacts")
    return folder


def test_a_run_that_was_moved_aside_shows_its_own_artifacts(tmp_path: Path) -> None:
    moved = laid(tmp_path / "run").move_aside()
    laid(tmp_path / "run")
    assert moved is not None
    assert artifacts_of(RunFolder(moved)) == tmp_path / "run.1" / "artifacts"


def test_artifacts_that_the_user_placed_stay_there_when_the_folder_moves(tmp_path: Path) -> None:
    moved = laid(tmp_path / "run", artifacts="/elsewhere").move_aside()
    assert moved is not None
    assert artifacts_of(RunFolder(moved)) == Path("/elsewhere")


def test_a_copy_of_a_living_run_is_not_alive(tmp_path: Path) -> None:
    folder = laid(tmp_path / "run")
    assert folder.alive
    folder.root.rename(tmp_path / "copy")
    assert RunFolder(tmp_path / "copy").alive is None
