"""Commands that look at a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob.api.effects import resolved
from rljob.errors import MachineError, ManifestError
from rljob.ids import PolicyVersion
from rljob_operator import enter
from rljob_operator.drivers.folder import RunFolder
from rljob_operator.show import audit, export
from rljob_operator.show.runs import artifacts_of
from tests.unit.rljob_operator.conftest import make_job


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


def dead_run(root: Path, phase: str, lost: int | None) -> None:
    """A run whose driver is gone and that completed one episode, which no batch holds."""
    folder = laid(root)
    folder.write("run.json", {**folder.read("run.json"), "pid_start_time": 0})
    folder.write("status.json", {"phase": phase})
    folder.write("summary.json", {"lost": lost})
    log = root / "artifacts" / "completions" / "worker-0.jsonl"
    log.parent.mkdir()
    log.write_text(json.dumps({"episode": "t1-0.0", "answer": "accepted", "sha256": "00"}) + "\n")


def test_there_is_nothing_to_audit_without_any_record(tmp_path: Path) -> None:
    folder = laid(tmp_path / "run")
    folder.write("run.json", {**folder.read("run.json"), "pid_start_time": 0})
    with pytest.raises(MachineError, match="nothing to audit"):
        audit.main("run", tmp_path)


@pytest.mark.parametrize(("phase", "lost"), [("Running", 0), ("Stopped", None)])
def test_what_waits_in_a_store_that_is_down_is_not_called_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], phase: str, lost: int | None
) -> None:
    dead_run(tmp_path / "run", phase, lost)
    assert audit.main("run", tmp_path) == 1
    shown = capsys.readouterr().out
    assert "the store is down: completions that wait in it cannot be seen" in shown
    assert "lost" not in shown


def test_after_a_run_that_ended_well_a_missing_episode_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead_run(tmp_path / "run", "Succeeded", 0)
    assert audit.main("run", tmp_path) == 1
    assert "lost: t1-0.0" in capsys.readouterr().out


def test_runs_cannot_be_kept_in_a_file() -> None:
    with pytest.raises(MachineError, match=r"--runs-dir: /etc/passwd cannot be made"):
        RunFolder(Path("/etc/passwd/run")).claim()


@pytest.mark.parametrize("place", ["/proc/foo", "/etc/passwd"])
def test_artifacts_cannot_be_kept_where_no_folder_can_be(tmp_path: Path, place: str) -> None:
    job = make_job(store={"artifacts": f"file://{place}"})
    with pytest.raises(MachineError, match=r"spec\.store\.artifacts: .* cannot be made"):
        enter.check(RunFolder(tmp_path / "run"), job, Path(place), resume=False)


def test_an_export_to_where_nothing_can_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid(tmp_path / "run")
    monkeypatch.setattr(export.WeightStore, "list", lambda _: [PolicyVersion(1, 1)])
    with pytest.raises(MachineError, match=r"/proc/x: cannot be written"):
        export.main(Path("/proc/x"), version=None, name="run", runs_dir=tmp_path)


@pytest.mark.parametrize("known_from", ["status", "checkpoints"])
def test_a_run_is_not_resumed_to_fewer_steps_than_it_has_trained(
    tmp_path: Path, known_from: str
) -> None:
    folder = laid(tmp_path / "run")
    folder.write("job.json", resolved(make_job()))
    folder.write("status.json", {"step": 3 if known_from == "status" else 0})
    if known_from == "checkpoints":
        checkpoint = folder.root / "artifacts" / "checkpoints" / "step-000003"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").touch()
    trainer = {"backend": "simulated", "groupsPerStep": 2}
    artifacts = folder.root / "artifacts"
    enter.check(folder, make_job(trainer={**trainer, "steps": 3}), artifacts, resume=True)
    with pytest.raises(ManifestError, match=r"spec\.trainer\.steps: is 2, .* trained 3 steps"):
        enter.check(folder, make_job(trainer={**trainer, "steps": 2}), artifacts, resume=True)
