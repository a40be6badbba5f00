"""What live view, plain lines and `rljob status` show: one record, from ledger snapshot and component states."""

from __future__ import annotations

from collections import deque

import msgspec

from rljob.ledger.types import LedgerSnapshot

_FRESH_SECONDS = 10.0
"""A report older than that is of a component that is gone or hangs."""


class Score(msgspec.Struct, frozen=True):
    """One validation result; the interval is 95 %."""

    step: int
    score: float
    low: float | None = None
    high: float | None = None


class Facts(msgspec.Struct, kw_only=True):
    """A job at one moment. Absent values are not known yet."""

    name: str
    phase: str
    message: str = ""
    started_at: float
    """Seconds since the epoch."""
    elapsed_seconds: float = 0.0
    mode: str = "train"
    step: int = 0
    """Trained; in mode `eval` episodes that have ended, in mode `rollout` groups that are collected."""
    steps: int
    """In all; 0 while not known."""
    eta_seconds: float | None = None
    policy_version: str = ""
    reward_mean: float | None = None
    """Of the last batch; before the first, of recent completions."""
    validation: list[Score] = []
    validation_running: str = ""
    """`37/100` while a validation run is open."""
    running: int = 0
    completed: int = 0
    failed: int = 0
    """Attempts that ended in an infrastructure failure."""
    turns_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    tokens_per_second: float | None = None
    ready_groups: int = 0
    backlog: int = 0
    """Completions in the stream that are not archived yet."""
    waiting: dict[str, str] = {}
    """Component → what it says it waits for."""
    components: dict[str, str] = {}
    """Component → state."""
    restarts: dict[str, int] = {}
    conditions: list[dict[str, str | float]] = []

    @property
    def unit(self) -> str:
        """What `step` counts."""
        return {"eval": "episode", "rollout": "group"}.get(self.mode, "step")


class StepPace:
    """The pace of steps, for the ETA."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=16)

    def eta_seconds(self, now_seconds: float, step: int, steps: int) -> float | None:
        """Seconds until `steps`, by the pace of the last steps; None before two are known."""
        if not self._steps or self._steps[-1][1] != step:
            self._steps.append((now_seconds, step))
        (first_time, first), (last_time, last) = self._steps[0], self._steps[-1]
        if last <= first:
            return None
        pace = (last_time - first_time) / (last - first)
        # a step that takes longer than those before does not shorten the rest
        return (steps - step) * pace - min(now_seconds - last_time, pace) if step < steps else 0.0


def apply_snapshot(facts: Facts, snapshot: LedgerSnapshot) -> None:
    """Copy what the ledger knows into `facts`."""
    counts = snapshot.counts
    if facts.mode == "train":
        facts.step = snapshot.step
    elif (report := snapshot.reports.get("collector")) is not None:
        facts.step = int(report.facts.get("done", facts.step))
        facts.steps = int(report.facts.get("total", facts.steps))
    facts.policy_version = str(snapshot.policy.version) if snapshot.policy.version else ""
    facts.reward_mean = snapshot.reward_mean
    facts.running, facts.completed = counts.get("running", 0), counts.get("completed", 0)
    facts.failed, facts.ready_groups = counts.get("failed", 0), counts.get("ready_groups", 0)
    facts.turns_mean = snapshot.turns_recent
    facts.staleness_mean, facts.staleness_max = (
        snapshot.staleness.get("mean"),
        snapshot.staleness.get("max"),
    )
    facts.backlog = snapshot.stream_entries
    facts.tokens_per_second = _sum_of_workers(snapshot, "tokens_per_second")
    facts.waiting = {
        name: report.waiting_for
        for name, report in sorted(snapshot.reports.items())
        if report.waiting_for
    }


def _sum_of_workers(snapshot: LedgerSnapshot, fact: str) -> float | None:
    """A fact added up over the workers that reported it lately; None where none did."""
    reports = [
        r
        for name, r in snapshot.reports.items()
        if name.startswith("worker") and r.age_seconds < _FRESH_SECONDS
    ]
    values = [
        value for report in reports if isinstance(value := report.facts.get(fact), int | float)
    ]
    return float(sum(values)) if values else None


def seconds_text(seconds: float | None) -> str:
    """`1:05` or `2:03:10`; `–` where not known."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number_text(value: float | None, digits: int = 2) -> str:
    """A rounded number; `–` where not known."""
    return "–" if value is None else f"{value:.{digits}f}"
