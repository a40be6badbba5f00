"""A backend without arithmetic: for tests of scheduling and of failures, and for `backend: simulated`.

Its model is one small vector that every step moves by a pure function of the batch, so that two runs that
train the same batches in the same order end with the same bytes, and any other order or repetition shows.
`RLJOB_SIM_STEP_SECONDS` is how long a step takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rljob.api.rljob_types import Algorithm, Optimizer
from rljob.errors import CorruptError
from rljob_trainer.backends.base import TrainBatch, TrainRow

WIDTH = 16
_STATE = "simulated.json"
_EPSILON = 1e-6


class SimulatedBackend:
    """See the module. `history` lists the episodes of every step that led to the present weights."""

    def __init__(self) -> None:
        """Nothing is read before `start`."""
        self.weights: NDArray[np.float32] = np.zeros(WIDTH, dtype=np.float32)
        self.history: list[list[str]] = []
        self._model: Path | None = None
        self._seconds = float(os.environ.get("RLJOB_SIM_STEP_SECONDS", "0"))

    def start(
        self, model: Path, mesh: int, optimizer: Optimizer, micro_batch_tokens: int, seed: int
    ) -> None:
        """See `Backend.start`; the directory may be absent."""
        self._model = model if model.is_dir() else None
        self.weights = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
        self.history = []

    def advantages(
        self, rewards: Sequence[float], groups: Sequence[str], algorithm: Algorithm
    ) -> list[float]:
        """See `Backend.advantages`: the formulas of GRPO and RLOO, in plain Python."""
        members: dict[str, list[float]] = defaultdict(list)
        for reward, group in zip(rewards, groups, strict=True):
            members[group].append(reward)
        return [
            _advantage(reward, members[group], algorithm)
            for reward, group in zip(rewards, groups, strict=True)
        ]

    def logprobs(self, rows: Sequence[TrainRow], temperature: float) -> list[NDArray[np.float32]]:
        """See `Backend.logprobs`: made up, but another answer for other weights."""
        level = -1.0 - abs(float(np.tanh(self.weights.sum())))
        return [
            np.full(len(row.tokens) - row.prompt_length, level, dtype=np.float32) for row in rows
        ]

    def train_step(self, batch: TrainBatch, algorithm: Algorithm) -> dict[str, float]:
        """See `Backend.train_step`."""
        time.sleep(self._seconds)
        episodes = sorted({row.episode for row in batch.rows})
        seed = hashlib.sha256(json.dumps([batch.step, episodes]).encode()).digest()[:8]
        change = (
            np.random.default_rng(int.from_bytes(seed, "little"))
            .standard_normal(WIDTH)
            .astype(np.float32)
        )
        self.weights = (0.9 * self.weights + 0.1 * change).astype(np.float32)
        self.history.append(episodes)
        return {
            "loss": float(change[0]),
            "grad_norm": float(np.linalg.norm(change)),
            "learning_rate": 0.0,
        }

    def export_weights(self, directory: Path) -> None:
        """See `Backend.export_weights`."""
        from safetensors.numpy import save_file

        directory.mkdir(parents=True, exist_ok=True)
        for file in self._model.iterdir() if self._model else ():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copy2(file, directory / file.name)
        if not (directory / "config.json").exists():
            (directory / "config.json").write_text(
                json.dumps({"model_type": "simulated", "hidden_size": WIDTH})
            )
        save_file(
            {"simulated.weight": self.weights},
            directory / "model.safetensors",
            metadata={"format": "pt"},
        )

    def save(self, directory: Path) -> None:
        """See `Backend.save`."""
        state = {"weights": [float(value) for value in self.weights], "history": self.history}
        (directory / _STATE).write_text(json.dumps(state))

    def load(self, directory: Path) -> None:
        """See `Backend.load`."""
        try:
            state = json.loads((directory / _STATE).read_text())
            self.weights = np.array(state["weights"], dtype=np.float32)
            self.history = state["history"]
        except (OSError, ValueError, KeyError) as error:
            raise CorruptError(f"{directory / _STATE}: {error}") from None

    def close(self) -> None:
        """See `Backend.close`."""


def _advantage(reward: float, group: list[float], algorithm: Algorithm) -> float:
    if len(group) == 1:
        return reward
    difference = reward - statistics.fmean(group)
    if algorithm.advantage == "rloo":
        return difference * len(group) / (len(group) - 1)
    return (
        difference
        if algorithm.normalize_by_std is False
        else difference / (statistics.stdev(group) + _EPSILON)
    )
