"""Limits by cgroup, where this machine lets us make one: pids and memory, versions 1 and 2.

A cgroup of its own bounds a whole sandbox; a resource limit bounds one process (memory) or one user (pids).
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "rljob-sandbox-"


class Hierarchy(msgspec.Struct, frozen=True):
    """A folder under which sandboxes get cgroups, and the files that hold the limits."""

    parent: Path
    pids_file: str = ""
    memory_file: str = ""

    def make(self, name: str, *, pids: int, memory_bytes: int) -> Path:
        """A cgroup of this process with limits. Raises OSError."""
        path = self.parent / f"{_PREFIX}{pid_namespace()}-{os.getpid()}-{name}"
        path.mkdir(exist_ok=True)
        if self.pids_file:
            _write(path / self.pids_file, str(pids))
        if self.memory_file:
            _write(path / self.memory_file, str(memory_bytes))
        return path


def find() -> list[Hierarchy]:
    """The hierarchies that can be used; empty where none can."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path.lstrip("/")
    candidates = [
        Hierarchy(_ROOT / "pids" / paths.get("pids", ""), pids_file="pids.max"),
        Hierarchy(_ROOT / "memory" / paths.get("memory", ""), memory_file="memory.limit_in_bytes"),
        Hierarchy(_ROOT / paths.get("", ""), pids_file="pids.max", memory_file="memory.max"),
    ]
    return [hierarchy for hierarchy in candidates if _usable(hierarchy)]


def _usable(hierarchy: Hierarchy) -> bool:
    if not (hierarchy.parent / "cgroup.procs").exists():
        return False
    with suppress(OSError):
        # Version 2: a child has the files only where its parent passes the controllers on.
        _write(hierarchy.parent / "cgroup.subtree_control", "+pids +memory")
    try:
        hierarchy.make("probe", pids=64, memory_bytes=1 << 28).rmdir()
    except OSError:
        for path in hierarchy.parent.glob(f"{_PREFIX}*-{os.getpid()}-probe"):
            _remove(path)
        return False
    return True


def pid_namespace() -> int:
    """Which pid namespace this process is in: a pid alone names nobody on a machine with containers."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _write(path: Path, text: str) -> None:
    """Into a file that is there: cgroup files are never made. Raises OSError."""
    with path.open("r+") as file:
        file.write(text)


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def remove(paths: list[Path]) -> bool:
    """Remove cgroups that have become empty; False while one has not."""
    left = [path for path in paths if not _remove(path)]
    return not left


def kill(paths: list[Path]) -> None:
    """Kill whatever is in them."""
    for path in paths:
        with suppress(OSError):
            for pid in (path / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)


def sweep(hierarchies: list[Hierarchy]) -> None:
    """Remove what pool managers that are no more have left, and end what still runs in it."""
    for hierarchy in hierarchies:
        for path in hierarchy.parent.glob(_PREFIX + "*"):
            namespace, manager, *_ = [*path.name.removeprefix(_PREFIX).split("-"), ""]
            # Of another pid namespace we cannot tell who lives.
            if namespace == str(pid_namespace()) and not Path(f"/proc/{manager}").exists():
                kill([path])
                _remove(path)
