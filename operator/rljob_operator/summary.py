"""The end of a run: summary.json, the table that is printed, and what the reward curve is drawn from.

verdict, last snapshot, metrics/*.jsonl, audit ─► Summary ─► summary.json, table
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table

from rljob.ledger import LedgerSnapshot
from rljob_operator.policies.verdict import Verdict
from rljob_operator.view.facts import Score, number_text, seconds_text
from rljob_operator.view.metrics import read_lines, read_scores


class AuditNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """What the audit found: all zero and empty is clean."""

    lost: int
    trained_twice: int
    rerun: int = 0
    ok: bool = True


class Summary(msgspec.Struct, kw_only=True):
    """summary.json. null where the run did not get so far."""

    name: str
    mode: str
    phase: str
    reason: str
    message: str
    steps: int
    """Trained and committed; in mode `rollout` batches that were archived, in mode `eval` 0."""
    steps_wanted: int
    result: dict[str, Any] | None
    """result.json of modes `eval` and `rollout`."""
    validation_first: float | None
    validation_first_interval: tuple[float, float] | None
    """95 %."""
    validation_last: float | None
    validation_last_interval: tuple[float, float] | None
    validation_last_step: int | None
    episodes_completed: int
    episodes_failed: int
    """Attempts that ended in an infrastructure failure."""
    completion_rate: float | None
    """Completed ÷ (completed + failed)."""
    mean_turns: float | None
    reward_first: float | None
    reward_last: float | None
    """Mean reward of the first and the last batch."""
    lost: int | None
    trained_twice: int | None
    rerun: int | None
    max_staleness: int | None
    wall_seconds: float
    trainer_seconds: float
    """Spent by the last trainer process on training, publishing and checkpoints."""
    waiting_for_rollouts_seconds: float
    """Spent by the last trainer process on waiting for episodes."""
    starting_seconds: float | None
    """From the start of the run to the first committed weights."""
    restarts: dict[str, int]
    folder: str


def build(
    verdict: Verdict,
    *,
    name: str,
    mode: str,
    steps_wanted: int,
    folder: Path,
    artifacts: Path,
    snapshot: LedgerSnapshot | None,
    audit: AuditNumbers | None,
    wall_seconds: float,
    starting_seconds: float | None,
    restarts: dict[str, int],
) -> Summary:
    """Everything known at the end."""
    steps = read_lines(artifacts / "metrics" / "steps.jsonl")
    scores = read_scores(artifacts, snapshot.validation if snapshot else {})
    first, last = (scores[0], scores[-1]) if scores else (None, None)
    result = _result(artifacts) if mode != "train" else None
    staleness = [int(line["staleness_max"]) for line in steps if "staleness_max" in line]
    return Summary(
        name=name,
        mode=mode,
        phase=verdict.phase,
        reason=verdict.reason,
        message=verdict.message,
        steps=snapshot.step if snapshot else len(steps),
        steps_wanted=steps_wanted,
        result=result,
        validation_first=first.score if first else None,
        validation_first_interval=_interval(first),
        validation_last=last.score if last else None,
        validation_last_interval=_interval(last),
        validation_last_step=last.step if last else None,
        **_episodes(snapshot),
        mean_turns=result["mean_turns"] if result else _mean(steps, "turns_mean"),
        reward_first=steps[0]["reward_mean"] if steps else None,
        reward_last=steps[-1]["reward_mean"] if steps else None,
        **_audited(audit),
        max_staleness=max(staleness, default=None),
        wall_seconds=round(wall_seconds, 1),
        **_trainer_times(snapshot),
        starting_seconds=None if starting_seconds is None else round(starting_seconds, 1),
        restarts=restarts,
        folder=str(folder),
    )


def _result(artifacts: Path) -> dict[str, Any] | None:
    file = artifacts / "result.json"
    return json.loads(file.read_text()) if file.exists() else None


def _interval(score: Score | None) -> tuple[float, float] | None:
    return (
        (score.low, score.high)
        if score and score.low is not None and score.high is not None
        else None
    )


def _audited(audit: AuditNumbers | None) -> dict[str, Any]:
    names = ("lost", "trained_twice", "rerun")
    return {name: getattr(audit, name) if audit else None for name in names}


def _episodes(snapshot: LedgerSnapshot | None) -> dict[str, Any]:
    counts = snapshot.counts if snapshot else {}
    completed, failed = counts.get("completed", 0), counts.get("failed", 0)
    rate = completed / (completed + failed) if completed + failed else None
    return {"episodes_completed": completed, "episodes_failed": failed, "completion_rate": rate}


def _trainer_times(snapshot: LedgerSnapshot | None) -> dict[str, Any]:
    """From what the trainer reports as `seconds_…`."""
    report = snapshot.reports.get("trainer") if snapshot else None
    facts = report.facts if report else {}
    busy = sum(
        float(facts.get(f"seconds_{what}", 0.0))
        for what in ("training", "publishing", "checkpoint")
    )
    waiting = float(facts.get("seconds_waiting", 0.0))
    return {"trainer_seconds": round(busy, 1), "waiting_for_rollouts_seconds": round(waiting, 1)}


def _mean(lines: Sequence[dict[str, float]], key: str) -> float | None:
    """Mean of a per-step value, weighted by the step's episodes."""
    weight = sum(line["episodes"] for line in lines)
    return sum(line[key] * line["episodes"] for line in lines) / weight if weight else None


def table(summary: Summary) -> RenderableType:
    """The summary for people."""
    grid = Table(
        title=f"{summary.name}: {summary.phase}",
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2),
    )
    grid.add_column(style="cyan")
    grid.add_column()
    for key, value in rows(summary):
        grid.add_row(key, value)
    return grid


def rows(summary: Summary) -> list[tuple[str, str]]:
    """The lines of the table."""
    found = [] if summary.mode != "train" else _trained(summary)
    if summary.message and summary.phase != "Succeeded":
        found.append(("why", summary.message))
    found += _of_mode(summary)
    episodes = f"{summary.episodes_completed} completed, {summary.episodes_failed} failed attempts"
    rate = "–" if summary.completion_rate is None else f"{summary.completion_rate:.1%}"
    found += [
        ("episodes", episodes),
        ("completion rate", rate),
        ("mean turns", number_text(summary.mean_turns, 1)),
    ]
    if summary.mode == "train":
        found.append(("staleness, max", number_text(summary.max_staleness, 0)))
    if summary.mode != "eval":  # scored episodes are in no batch
        twice = "trained twice" if summary.mode == "train" else "collected twice"
        faults = f"{_count(summary.lost)} / {_count(summary.trained_twice)}"
        found.append((f"lost / {twice}", faults))
    found.append(("time", _times(summary)))
    if summary.restarts:
        found.append(
            ("restarts", ", ".join(f"{name} {count}" for name, count in summary.restarts.items()))
        )
    return [*found, ("folder", summary.folder)]


def _trained(summary: Summary) -> list[tuple[str, str]]:
    return [("steps", f"{summary.steps} of {summary.steps_wanted}")]


def _of_mode(summary: Summary) -> list[tuple[str, str]]:
    """What the job was run for."""
    if summary.mode == "train":
        first, last = summary.validation_first, summary.validation_last
        reward = f"{number_text(summary.reward_first)} → {number_text(summary.reward_last)}"
        return [
            ("validation, first", _score(first, summary.validation_first_interval)),
            ("validation, last", _score(last, summary.validation_last_interval)),
            ("reward", reward),
        ]
    if (result := summary.result) is None:
        return []
    if summary.mode == "eval":
        pass_at = ", ".join(f"pass@{k} {value:.2f}" for k, value in result["pass_at"].items())
        score = _score(result["score"], (result["ci_low"], result["ci_high"]))
        return [("score", score), ("pass@k", pass_at or "–")]
    given_up = result["groups_given_up"]
    return [
        ("groups", f"{result['groups']} collected, {given_up} given up"),
        ("reward", number_text(result["reward_mean"])),
        ("exported", f"{len(result['files'])} files in artifacts/export"),
    ]


def _score(score: float | None, interval: tuple[float, float] | None) -> str:
    return number_text(score) + (
        f" (95 %: {interval[0]:.2f} – {interval[1]:.2f})" if interval else ""
    )


def _count(value: int | None) -> str:
    return "not audited" if value is None else str(value)


def _times(summary: Summary) -> str:
    wall, start = seconds_text(summary.wall_seconds), seconds_text(summary.starting_seconds)
    busy, waiting = (
        seconds_text(summary.trainer_seconds),
        seconds_text(summary.waiting_for_rollouts_seconds),
    )
    if summary.mode != "train":
        return f"{wall} in all: {start} until the first weights"
    return f"{wall} in all: {start} until the first weights, trainer busy {busy}, waiting for rollouts {waiting}"
