"""Mode `rollout`: groups of training rows, archived batch by batch and exported for people.

    take ─► archive ─► archived ─► export/trajectories-N.jsonl ─► steps.jsonl ─► commit ─► … ─► result.json

A batch is only what is archived at once. The policy stays version 0, so nothing gets stale and nothing is evicted. In
one pass over the rows a group that is given up leaves its place empty; where `rollout.groups` asks for a number,
another row takes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from rljob.ledger.types import LedgerConfig
from rljob_trainer.batch import Group, archived_groups, archived_steps, read_archive
from rljob_trainer.collector import Collector
from rljob_trainer.export import Exporter
from rljob_trainer.intake import Intake
from rljob_trainer.metrics import append_line, read_lines
from rljob_trainer.progress import Progress
from rljob_trainer.step import describe

_REASSERTED_BATCHES = 256
log = structlog.get_logger()


async def gather(collector: Collector) -> None:
    """Collect everything and write the result."""
    rules = LedgerConfig.from_job(collector.job, collector.num_rows, "")
    collector.progress.facts["total"] = float(rules.num_groups or 0)
    kept = await asyncio.to_thread(Kept, collector.artifacts)
    intake = Intake(
        collector.ledger,
        collector.incarnation,
        collector.artifacts,
        rules.groups_per_step,
        collector.progress,
        collector.clock,
    )
    step = await _resume(collector, kept)
    while (groups := await intake.next_batch_if_any(step + 1)) is not None:
        step += 1
        await asyncio.to_thread(kept.keep, step, groups)
        kept.tell(collector.progress)
        await collector.commit(step)
        log.info("collected", batch=step, groups=len(groups))
    dead = (await collector.ledger.snapshot()).counts["dead"]
    if not step:
        raise collector.nothing_came_back(f"{dead} groups", await collector.last_death())
    await collector.finish(kept.result(dead))


async def _resume(collector: Collector, kept: Kept) -> int:
    """Tell the ledger what stands in the archive, and export what an earlier start had not; the last batch."""
    artifacts = collector.artifacts
    last = archived_steps(artifacts, 0)
    groups = archived_groups(artifacts, last, _REASSERTED_BATCHES)
    await collector.ledger.resume(
        collector.incarnation, last, archived_step=last, archived_groups=groups
    )
    for step in range(1, last + 1):
        if not kept.has(step):
            await asyncio.to_thread(kept.keep, step, read_archive(artifacts, step))
    kept.tell(collector.progress)
    await collector.commit(last)
    return last


class Kept:
    """What was collected, as people get it: exported files, and a line of steps.jsonl per batch. Calls block.

    Args:
        artifacts: The artifact store.
    """

    def __init__(self, artifacts: Path) -> None:
        self._metrics = artifacts / "metrics" / "steps.jsonl"
        self._exporter = Exporter(artifacts)
        self._lines: dict[int, dict[str, Any]] = {
            line["step"]: line for line in read_lines(self._metrics)
        }

    def has(self, step: int) -> bool:
        """Whether a batch is exported and recorded."""
        return step in self._lines and self._exporter.has(step)

    def keep(self, step: int, groups: Sequence[Group]) -> None:
        """Export and record a batch."""
        self._exporter.export(step, groups)
        if step not in self._lines:
            self._lines[step] = describe(step, groups)
            append_line(self._metrics, self._lines[step])

    def tell(self, progress: Progress) -> None:
        """Take over the numbers so far."""
        if self._lines:
            mean_reward = self._lines[max(self._lines)]["reward_mean"]
            progress.facts.update(done=float(self._sum("groups")), reward_mean=mean_reward)

    def result(self, dead: int) -> dict[str, Any]:
        """For result.json."""
        outcomes: Counter[str] = Counter()
        for line in self._lines.values():
            outcomes.update(line["outcomes"])
        groups = self._sum("groups")
        return {
            "groups": groups,
            "groups_given_up": dead,
            "episodes": self._sum("episodes"),
            "completion_rate": groups / (groups + dead),
            "reward_mean": self._mean("reward_mean"),
            "mean_turns": self._mean("turns_mean"),
            "outcomes": dict(outcomes),
            "tokens": self._sum("tokens"),
            "action_tokens": self._sum("action_tokens"),
            "files": [f"export/{Exporter.name(step)}" for step in sorted(self._lines)],
        }

    def _sum(self, key: str) -> int:
        return sum(line[key] for line in self._lines.values())

    def _mean(self, key: str) -> float:
        """Over episodes."""
        lines = self._lines.values()
        return sum(line[key] * line["episodes"] for line in lines) / self._sum("episodes")
