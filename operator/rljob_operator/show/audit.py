"""`rljob ledger audit`: do the workers' logs, the archived batches and the ledger agree?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rljob.errors import MachineError, StoreError
from rljob_operator.drivers.folder import RunFolder
from rljob_operator.show.runs import artifacts_of, find, job_of

_CONNECT_SECONDS = 5.0
_SHOWN = 20


def main(name: str | None, runs_dir: Path) -> int:
    """Print the audit; 0 where it is clean, 1 where something is lost or trained twice."""
    folder = find(name, runs_dir)
    report = asyncio.run(_audit(folder))
    console = Console(highlight=False)
    console.print(_table(folder.name, report))
    for what, items in (("lost", report.lost), ("trained twice", report.trained_twice)):
        for item in items[:_SHOWN]:
            console.print(f"{what}: {item}", markup=False)
        if len(items) > _SHOWN:
            console.print(f"… and {len(items) - _SHOWN} more {what}")
    return 0 if report.ok else 1


async def _audit(folder: RunFolder) -> Any:
    from rljob.ledger import Ledger
    from rljob.ledger.audit import audit

    artifacts, url = artifacts_of(folder), folder.read("connection.json").get("redis_url")
    if not folder.alive or not url:
        return await audit(artifacts, None)
    try:
        ledger = await Ledger.connect(url, job_of(folder).name, deadline_seconds=_CONNECT_SECONDS)
    except StoreError as error:
        raise MachineError(
            folder.name, f"its store cannot be reached now ({error})", "try again"
        ) from None
    async with ledger:
        return await audit(artifacts, ledger)


def _table(name: str, report: Any) -> Table:
    table = Table(
        title=f"{name}: {'clean' if report.ok else 'NOT clean'}",
        title_justify="left",
        show_header=False,
        box=None,
    )
    table.add_column(style="cyan")
    table.add_column(justify="right")
    for field in ("leased", "completed", "trained", "evicted", "dead", "rerun"):
        table.add_row(field, str(getattr(report, field)))
    table.add_row("lost", str(len(report.lost)))
    table.add_row("trained twice", str(len(report.trained_twice)))
    return table
