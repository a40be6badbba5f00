"""A run's folder: one place that holds everything about it, and the proof of who is running it.

    runs/<name>/
      run.json        pid and start time of the driver, and when the run began
      rljob.yaml      the manifest as resolved; job.json the same for components
      status.json     what is going on (rewritten every second); events.jsonl what happened
      summary.json  reward.png  metrics/         written at the end
      logs/           one file per component
      artifacts/      prepared model and rows, weights, checkpoints, batches (trajectories), validation, metrics
      store/          the append-only file of the job's own Valkey
      work/           scratch of each component

A finished run of the same name is moved to `<name>.1`, `<name>.2`, … so that `runs/<name>` is always the newest.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from rljob.errors import MachineError


class RunFolder:
    """Paths of one run, and its small state files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: int | None = None

    @property
    def name(self) -> str:
        """Of the run: its folder's name."""
        return self.root.name

    @property
    def logs(self) -> Path:
        """One file per component."""
        return self.root / "logs"

    @property
    def job_file(self) -> Path:
        """The resolved manifest as JSON."""
        return self.root / "job.json"

    @property
    def store(self) -> Path:
        """The append-only file of the job's own Valkey."""
        return self.root / "store"

    def log(self, component: str) -> Path:
        """The log of one component."""
        return self.logs / f"{component}.log"

    def read(self, name: str) -> dict[str, Any]:
        """A small JSON file of the run; {} where it is absent or half-written by a killed driver."""
        try:
            return json.loads((self.root / name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def write(self, name: str, value: Any) -> None:
        """Replace a small JSON file at once."""
        write_text(self.root / name, json.dumps(value, indent=1) + "\n")

    def claim(self) -> None:
        """Become the one driver of this run.

        Raises:
            MachineError: another driver has it, or runs cannot be kept there.
        """
        writable(self.root.parent, "--runs-dir")
        # the lock stands beside the folder, since the folder itself may be moved aside
        self._lock = os.open(self.root.parent / f".{self.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = self.read("run.json").get("pid")
            raise MachineError(
                str(self.root),
                f"a run of this name is alive (pid {pid})",
                f"rljob stop {self.name}, or change metadata.name",
            ) from None

    def release(self) -> None:
        """Let another driver have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def lay(self) -> None:
        """Make the folders, for their owner alone: a manifest may hold passwords."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        for folder in (self.logs, self.store, self.root / "work", self.root / "artifacts"):
            folder.mkdir(parents=True, exist_ok=True)

    def mark_running(self, started_at: float, artifacts: Path) -> None:
        """Write run.json for this process."""
        me = {"pid": os.getpid(), "pid_start_time": pid_start_time(os.getpid())}
        self.write(
            "run.json",
            {"name": self.name, **me, "started_at": started_at, "artifacts": str(artifacts)},
        )

    @property
    def alive(self) -> int | None:
        """The driver's pid while it lives."""
        run = self.read("run.json")
        pid = run.get("pid")
        if run.get("name", self.name) != self.name:
            return None  # a copy of a run; the driver is the original's
        # the start time tells our driver from a stranger that got its pid later
        return pid if pid and pid_start_time(pid) == run.get("pid_start_time") else None

    def move_aside(self) -> Path | None:
        """Rename a finished run; where it went, or None where there was none."""
        if not self.root.exists():
            return None
        number = 1
        while (target := self.root.with_name(f"{self.name}.{number}")).exists():
            number += 1
        self.root.rename(target)
        return target


def writable(folder: Path, where: str) -> None:
    """Make a folder.

    Raises:
        MachineError: it cannot be made or written; `where` is what to call it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{folder} cannot be made ({error.strerror})"
        raise MachineError(where, problem, "name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise MachineError(where, f"{folder} cannot be written", "name another folder")


def pid_start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot: with the pid its identity. None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def write_text(path: Path, text: str) -> None:
    """Replace a file at once: readers see the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


class EventLog:
    """What happened, one JSON line each, and the job's conditions."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.root / "events.jsonl"
        self.conditions: dict[str, dict[str, Any]] = {}

    def event(self, kind: str, component: str, message: str) -> None:
        """Record one event."""
        with self._file.open("a") as file:
            file.write(
                json.dumps(
                    {"time": time.time(), "event": kind, "component": component, "message": message}
                )
                + "\n"
            )

    def condition(self, kind: str, status: bool, reason: str, message: str = "") -> bool:
        """Set a condition; whether status or reason changed."""
        old = self.conditions.get(kind, {})
        if old.get("status") == str(status) and old.get("reason") == reason:
            old["message"] = message
            return False
        self.conditions[kind] = {
            "type": kind,
            "status": str(status),
            "reason": reason,
            "message": message,
            "lastTransitionTime": time.time(),
        }
        self.event("condition", kind, f"{status} {reason} {message}".rstrip())
        return True
