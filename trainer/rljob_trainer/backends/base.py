"""What a training backend is: the shape of the Tinker API, so that verl, SkyRL-train and Tinker fit it alike.

    trainer loop ──► start ─► (logprobs | train_step | export_weights | save)* ─► close

Two departures from the Tinker shape: the optimizer is given at `start`, because verl builds it with the model; and the
backend names its advantage estimators, because verl's are used and not rewritten.

Legend: N rows (one per chain), T tokens of a row, P of them before the first action, R = T - P, E episodes.
Every call blocks; the loop runs them on one thread. Floats are float32 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rljob.api.rljob_types import Algorithm, Optimizer


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One chain, ready to be trained. An episode with several chains gives several rows with the same advantage."""

    episode: str
    tokens: NDArray[np.int32]
    """[T]"""
    prompt_length: int
    """P, at least 1: the first token has no logits before it."""
    mask: NDArray[np.bool_]
    """[R] True where the loss counts the token; tool output and tokens past the staleness bound are holes."""
    logprobs: NDArray[np.float32]
    """[R] the rollout's log probability of each action token, 0 elsewhere."""
    advantage: float = 0.0
    share: float = 1.0
    """This row's part of its episode's trained tokens; an episode's rows add up to 1."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """One optimizer step. Sequence means are over episodes: more chains give an episode no more weight."""

    step: int
    rows: Sequence[TrainRow]
    """[N]"""
    temperature: float
    """Of the rollout's softmax; the ratio compares tempered distributions."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the loss counts: the denominator of `token_mean`."""
        return int(sum(row.mask.sum() for row in self.rows))

    @property
    def num_episodes(self) -> int:
        """E, episodes with at least one counted token: the denominator of the sequence means."""
        return len({row.episode for row in self.rows})


class Backend(Protocol):
    """A model, its optimizer, and the arithmetic between them."""

    def start(
        self, model: Path, mesh: int, optimizer: Optimizer, micro_batch_tokens: int, seed: int
    ) -> None:
        """Load the Hugging Face directory `model` onto `mesh` processes and build the optimizer."""
        ...

    def advantages(
        self, rewards: Sequence[float], groups: Sequence[str], algorithm: Algorithm
    ) -> list[float]:
        """One advantage per episode.

        Args:
            rewards: [E] one reward per episode.
            groups: [E] the group of each.
            algorithm: Names the estimator.
        """
        ...

    def logprobs(self, rows: Sequence[TrainRow], temperature: float) -> list[NDArray[np.float32]]:
        """N arrays [R]: log probability of every response token under the present weights."""
        ...

    def train_step(self, batch: TrainBatch, algorithm: Algorithm) -> dict[str, float]:
        """One optimizer step; metrics have at least `loss`, `grad_norm` and `learning_rate`."""
        ...

    def export_weights(self, directory: Path) -> None:
        """Write a directory that vLLM serves: safetensors with Hugging Face names, config, tokenizer."""
        ...

    def save(self, directory: Path) -> None:
        """Write model, optimizer, scheduler and random state; `load` continues as if nothing had happened."""
        ...

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote. Raises CorruptError when it cannot be read."""
        ...

    def close(self) -> None:
        """Free what `start` took. May be called twice."""
        ...


def create(name: str) -> Backend:
    """The backend that `spec.trainer.backend` names. Imports only that one."""
    if name == "simulated":
        from rljob_trainer.backends.simulated import SimulatedBackend

        return SimulatedBackend()
    from rljob_trainer.backends.verl import VerlBackend

    return VerlBackend()
