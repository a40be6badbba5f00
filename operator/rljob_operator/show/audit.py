"""`rljob ledger audit`: do the workers' logs, the archived batches and the ledger agree?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rljob.api import conditions
from rljob.errors import MachineError, StoreError
from rljob_operator.drivers.folder import RunFolder
from rljob_operator.show.runs import artifacts_of, find, job_of

_CONNECT_SECONDS = 5.0
_SHOWN = 20
_ENDED = (conditions.PHASE_SUCCEEDED, conditions.PHASE_FAILED, conditions.PHASE_STOPPED)


_UNSEEN = (
    "the store is down: completions that wait in it cannot be seen; "
    "go on with the run (rljob run … --resume) or audit while it runs"
)


def main(name: str | None, runs_dir: Path) -> int:
    """Print the audit; 0 where it is clean, 1 where something is lost, trained twice or cannot be seen.

    Raises:
        MachineError: there is nothing to audit.
    """
    folder = find(name, runs_dir)
    report = asyncio.run(_audit(folder))
    if not (report.completed or report.trained):
        where = artifacts_of(folder)
        problem = f"there is nothing to audit: no completions and no batches in {where}"
        raise MachineError(folder.name, problem, "wait for the first ones, or name another run")
    unseen = bool(report.lost) and not (folder.alive or _ended_well(folder))
    console = Console(highlight=False)
    console.print(_table(folder.name, report, unseen))
    if unseen:
        console.print(_UNSEEN, soft_wrap=True)
    for what, items in _faults(report, unseen):
        for item in items[:_SHOWN]:
            console.print(f"{what}: {item}", markup=False)
        if len(items) > _SHOWN:
            console.print(f"… and {len(items) - _SHOWN} more {what}")
    return 0 if report.ok else 1


def _ended_well(folder: RunFolder) -> bool:
    """Whether the run's last driver saved the ledger's facts before it ended the store."""
    ended = folder.read("status.json").get("phase") in _ENDED
    return ended and folder.read("summary.json").get("lost") is not None


def _faults(report: Any, unseen: bool) -> list[tuple[str, list[str]]]:
    return [
        ("lost", [] if unseen else report.lost),
        ("trained twice", report.trained_twice),
        ("in no worker's log", report.unlogged),
        ("corrupt", report.corrupt),
    ]


async def _audit(folder: RunFolder) -> Any:
    from rljob.ledger import Ledger
    from rljob.ledger.audit import audit

    artifacts, url = artifacts_of(folder), folder.read("connection.json").get("redis_url")
    if not folder.alive or not url:
        return await audit(artifacts, None)
    try:
        ledger = await Ledger.connect(
            url, job_of(folder).ledger_name, deadline_seconds=_CONNECT_SECONDS
        )
    except StoreError as error:
        raise MachineError(
            folder.name, f"its store cannot be reached now ({error})", "try again"
        ) from None
    async with ledger:
        return await audit(artifacts, ledger)


def _table(name: str, report: Any, unseen: bool) -> Table:
    faults = any(items for _, items in _faults(report, unseen))
    verdict = "NOT clean" if faults else "unfinished" if unseen else "clean"
    table = Table(title=f"{name}: {verdict}", title_justify="left", show_header=False, box=None)
    table.add_column(style="cyan")
    table.add_column(justify="right")
    for field in ("leased", "completed", "trained", "evicted", "dead", "rerun"):
        table.add_row(field, str(getattr(report, field)))
    table.add_row("not seen" if unseen else "lost", str(len(report.lost)))
    table.add_row("trained twice", str(len(report.trained_twice)))
    return table
