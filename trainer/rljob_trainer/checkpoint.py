"""Checkpoints: what a new trainer continues from.

    checkpoints/step-N/  backend files, then state.json: the step, its metrics, the sampler, and a hash of every file

A checkpoint without a state.json, or whose files do not match it, does not count; the one before it does.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_trainer.files import new_directory, sha256

_NAME = re.compile(r"step-(\d{6,})")
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint."""

    step: int
    path: Path
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one job, newest `keep` kept."""

    def __init__(self, artifacts: Path, keep: int) -> None:
        """Work below the artifact store."""
        self._directory = artifacts / "checkpoints"
        self._keep = keep

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose every file is what its state.json says, or None."""
        return next((found for found in map(_read, reversed(self._paths())) if found), None)

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Write one, atomically, and drop the oldest past `keep`.

        Args:
            step: Steps trained.
            write: Puts the backend's files into a directory.
            state: What else to keep; `step` and `files` are added.
        """
        with new_directory(self._directory / f"step-{step:06d}") as directory:
            write(directory)
            files = {
                str(file.relative_to(directory)): {
                    "bytes": file.stat().st_size,
                    "sha256": sha256(file),
                }
                for file in sorted(directory.rglob("*"))
                if file.is_file()
            }
            (directory / STATE).write_text(json.dumps({**state, "step": step, "files": files}))
        for old in self._paths()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _paths(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        found = [path for path in self._directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _read(path: Path) -> Checkpoint | None:
    try:
        state = json.loads((path / STATE).read_text())
        whole = all(_matches(path / name, entry) for name, entry in state["files"].items())
        return Checkpoint(int(state["step"]), path, state) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _matches(file: Path, entry: dict[str, Any]) -> bool:
    return (
        file.is_file() and file.stat().st_size == entry["bytes"] and sha256(file) == entry["sha256"]
    )
