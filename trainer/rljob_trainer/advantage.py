"""Advantages are per episode; `batch.rows_of` then spreads each over its episode's chains.

One row per chain would let an episode with many chains count many times in its group's mean and standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

from rljob.api.rljob_types import Algorithm
from rljob_trainer.backends.base import Backend
from rljob_trainer.batch import Group


def episode_advantages(
    backend: Backend, groups: Sequence[Group], algorithm: Algorithm
) -> list[float]:
    """[E] one advantage per episode of the batch, in order."""
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    names = [str(group.group) for group in groups for _ in group.trajectories]
    return backend.advantages(rewards, names, algorithm)
