"""Finding a run by name, or the newest; what is wrong with a name is said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from rljob.api.rljob_types import RLJob
from rljob.errors import MachineError, UserError
from rljob_operator.drivers.folder import RunFolder

_MOST_NAMES = 8


def all_runs(runs_dir: Path) -> list[RunFolder]:
    """Every run in the folder, the newest last."""
    found = [RunFolder(path.parent) for path in runs_dir.absolute().glob("*/run.json")]
    return sorted(found, key=lambda folder: folder.read("run.json").get("started_at", 0.0))


def find(name: str | None, runs_dir: Path) -> RunFolder:
    """The run of that name; without one the newest that is alive, else the newest.

    Raises:
        MachineError: there is none.
    """
    runs = all_runs(runs_dir)
    if not runs:
        raise MachineError(
            str(runs_dir),
            "there are no runs here",
            "start one (rljob run), or name the folder (--runs-dir)",
        )
    if name is None:
        return next((run for run in reversed(runs) if run.alive), runs[-1])
    for run in runs:
        if run.name == name:
            return run
    raise unknown("run", name, [run.name for run in runs])


def unknown(what: str, name: str, known: Sequence[str]) -> UserError:
    """The error for a name that nothing has."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    fix = f"did you mean {close[0]}?" if close else f"there are {_listed(known)}"
    return MachineError(name, f"there is no such {what}", fix)


def _listed(known: Sequence[str]) -> str:
    """Names for one line; of many the first and the last."""
    if len(known) <= _MOST_NAMES:
        return ", ".join(known) or "none"
    return f"{', '.join(known[: _MOST_NAMES - 1])} … {known[-1]} ({len(known)} in all)"


def job_of(folder: RunFolder) -> RLJob:
    """The resolved manifest of a run.

    Raises:
        MachineError: the folder does not hold one.
    """
    data = folder.read("job.json")
    if not data:
        raise MachineError(
            str(folder.root), "holds no job.json", "was this run laid out by rljob run?"
        )
    return RLJob.model_validate(data)


def artifacts_of(folder: RunFolder) -> Path:
    """Where the artifacts of a run lie: in its folder, wherever that is now, or where the manifest says."""
    own = folder.root / "artifacts"
    store = folder.read("job.json").get("spec", {}).get("store") or {}
    recorded = folder.read("run.json").get("artifacts")
    return Path(recorded) if store.get("artifacts") and recorded else own
