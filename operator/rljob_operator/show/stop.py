"""`rljob stop`: ask a run's driver to end well, and wait until it has."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from rljob.errors import MachineError
from rljob_operator.show.runs import find

_DEADLINE_SECONDS = 180.0


def main(name: str | None, runs_dir: Path) -> None:
    """Stop."""
    folder = find(name, runs_dir)
    pid = folder.alive
    if pid is None:
        raise MachineError(folder.name, "is not running", "rljob status shows the runs")
    os.kill(pid, signal.SIGTERM)
    sys.stdout.write(f"stopping {folder.name} (pid {pid})\n")
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while folder.alive == pid:
        if time.monotonic() > deadline:
            raise MachineError(
                folder.name,
                f"has not stopped within {_DEADLINE_SECONDS:.0f} s",
                f"look at rljob logs, or kill {pid}",
            )
        time.sleep(0.1)
    sys.stdout.write(f"stopped; rljob run --resume goes on with {folder.root}\n")
