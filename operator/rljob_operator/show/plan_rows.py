"""The rows of a job, counted by task and image: the trainer's package reads them, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from rljob.api.load import ManifestFaultsError
from rljob.api.rljob_types import RLJob
from rljob.errors import MachineError, UserError
from rljob_operator.policies.sandbox_needs import RowCount

SECONDS = 300.0
"""A source of a hub is downloaded first."""
_MODULE = "rljob_trainer.row_images"


class Split(msgspec.Struct, frozen=True):
    """Rows of one split."""

    counts: list[RowCount] = []
    unread: str = ""
    """Why its rows cannot be read here."""


class Rows(msgspec.Struct, frozen=True):
    """All of them."""

    splits: dict[str, Split]

    @property
    def counts(self) -> list[RowCount] | None:
        """Of all splits; None where one cannot be read."""
        if any(split.unread for split in self.splits.values()):
            return None
        return [count for split in self.splits.values() for count in split.counts]


def rows_of(job: RLJob, base: Path) -> Rows:
    """Count them.

    Args:
        job: The job.
        base: Folder of its manifest.

    Raises:
        ManifestFaultsError: a row is malformed.
        MachineError: nothing was told in time.
    """
    command = [sys.executable, "-m", _MODULE, str(base)]
    text = job.model_dump_json(exclude_unset=True)
    try:
        run = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"rows were not read within {SECONDS:g} s"
        raise MachineError("spec.data", problem, "copy them to a file:// source") from None
    last = (run.stderr.splitlines() or [""])[-1]
    if run.returncode == UserError.exit_code:
        raise ManifestFaultsError([last])
    if run.returncode:
        return Rows({"rows": Split(unread=f"{_MODULE} failed: {last}")})
    return Rows(msgspec.json.decode(run.stdout, type=dict[str, Split]))
