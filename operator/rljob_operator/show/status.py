"""`rljob status`: the runs, or one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from rljob_operator.drivers.folder import RunFolder
from rljob_operator.show.runs import all_runs, find
from rljob_operator.view.facts import Facts, number_text, seconds_text
from rljob_operator.view.live import panel

_ENDED = {"Succeeded", "Failed", "Stopped"}


def main(name: str | None, runs_dir: Path) -> None:
    """Print."""
    console = Console()
    if name is None and len(all_runs(runs_dir)) > 1:
        console.print(_table(all_runs(runs_dir)))
        return
    folder = find(name, runs_dir)
    facts = facts_of(folder)
    if facts is None:
        console.print(f"{folder.name}: starting")
        return
    console.print(panel(facts, []))
    console.print(f"folder {folder.root}", soft_wrap=True, markup=False, highlight=False)
    for condition in facts.conditions:
        console.print(_condition(condition), markup=False, highlight=False)


def facts_of(folder: RunFolder) -> Facts | None:
    """status.json; a run whose driver is gone without a last word is called Killed."""
    data = folder.read("status.json")
    if not data:
        return None
    facts = msgspec.convert(data, Facts)
    if facts.phase not in _ENDED and not folder.alive:
        facts.phase, facts.message = "Killed", "its driver is gone; rljob run --resume goes on"
        facts.components = dict.fromkeys(facts.components, "stopped")
    return facts


def _table(runs: list[RunFolder]) -> Table:
    table = Table(box=None, header_style="cyan")
    for column in ("run", "phase", "step", "elapsed", "to go", "reward", "validation"):
        table.add_column(column)
    for folder in runs:
        facts = facts_of(folder)
        if facts is None:
            table.add_row(folder.name, "starting")
            continue
        scores = (
            f"{number_text(facts.validation[0].score)} → {number_text(facts.validation[-1].score)}"
            if facts.validation
            else "–"
        )
        table.add_row(
            folder.name,
            facts.phase,
            f"{facts.step}/{facts.steps}",
            seconds_text(facts.elapsed_seconds),
            seconds_text(facts.eta_seconds) if facts.phase not in _ENDED else "",
            number_text(facts.reward_mean),
            scores,
        )
    return table


def _condition(condition: dict[str, Any]) -> str:
    return f"{condition['type']:16} {condition['status']:6} {condition['reason']} {condition['message']}".rstrip()
