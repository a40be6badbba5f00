"""One optimizer step: archived groups in, new weights (in the backend) and a record of numbers out.

    groups ─► advantages per episode ─► rows per chain ─► backend.train_step ─► record

The record holds nothing but what the batch and the arithmetic say, so a replayed step writes the same one.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rljob.api.rljob_types import RLJob
from rljob.trajectory import Trajectory
from rljob_trainer.advantage import episode_advantages
from rljob_trainer.backends.base import Backend, TrainBatch, TrainRow
from rljob_trainer.batch import Group, rows_of
from rljob_trainer.metrics import mean


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind: its line of steps.jsonl, and rows from which the next canary is chosen."""

    record: dict[str, Any]
    rows: list[TrainRow]


def train_on(backend: Backend, job: RLJob, step: int, groups: Sequence[Group]) -> StepResult:
    """Train the batch of `step`. Blocks."""
    began = time.monotonic()
    spec = job.spec
    oldest = (
        step - 1 - spec.rollout.staleness_bound if spec.rollout.stale_policy == "mask" else None
    )
    advantages = episode_advantages(backend, groups, spec.trainer.algorithm)
    rows = rows_of(groups, advantages, oldest)
    batch = TrainBatch(step=step, rows=rows, temperature=spec.rollout.sampling.temperature)
    numbers = (
        backend.train_step(batch, spec.trainer.algorithm)
        if rows
        else {"loss": 0.0, "grad_norm": 0.0}
    )
    record = {
        **describe(step, groups),
        **staleness(step, groups),
        **numbers,
        "rows": len(rows),
        "trained_tokens": batch.num_tokens,
    }
    record["seconds_training"] = round(time.monotonic() - began, 4)
    return StepResult(record, rows)


def describe(step: int, groups: Sequence[Group]) -> dict[str, Any]:
    """What a batch is made of."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in episodes]
    mixed = sum(
        len({trajectory.reward for trajectory in group.trajectories}) > 1 for group in groups
    )
    return {
        "step": step,
        "groups": len(groups),
        "mixed_groups": mixed,
        "episodes": len(episodes),
        "reward_mean": mean(rewards),
        "reward_std": statistics.pstdev(rewards) if rewards else 0.0,
        "turns_mean": mean(trajectory.turns for trajectory in episodes),
        "tokens": sum(trajectory.num_tokens for trajectory in episodes),
        "action_tokens": sum(trajectory.num_action_tokens for trajectory in episodes),
        "outcomes": dict(Counter(trajectory.outcome for trajectory in episodes)),
        "entropy": _entropy(episodes),
    }


def _entropy(episodes: Sequence[Trajectory]) -> float:
    """Of the behaviour policy per sampled token, estimated by the samples themselves."""
    return -mean(value for item in episodes for chain in item.chains for value in chain.logprobs)


def staleness(step: int, groups: Sequence[Group]) -> dict[str, float]:
    """Mean over tokens and maximum, in policy versions, against the version being trained: n = step - 1."""
    spans = [
        span
        for group in groups
        for trajectory in group.trajectories
        for chain in trajectory.chains
        for span in chain.version_spans
    ]
    tokens = sum(span.length for span in spans)
    total = sum((step - 1 - span.n) * span.length for span in spans)
    return {
        "staleness_mean": total / tokens if tokens else 0.0,
        "staleness_max": max((step - 1 - span.n for span in spans), default=0),
    }
