"""Canaries and what is published with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from rljob.api.rljob_types import Algorithm, Optimizer
from rljob.ids import PolicyVersion
from rljob.weights import WeightStore
from rljob_trainer.backends.base import TrainBatch, TrainRow
from rljob_trainer.backends.simulated import SimulatedBackend
from rljob_trainer.publish import Publisher, choose_canary, first_canary


def row(length: int, advantage: float, prompt: int = 3, hole: int = 0) -> TrainRow:
    mask = np.ones(length - prompt, dtype=bool)
    mask[:hole] = False
    tokens = np.arange(length, dtype=np.int32)
    return TrainRow(
        episode="t0-0.0",
        tokens=tokens,
        prompt_length=prompt,
        mask=mask,
        logprobs=mask * 0.0,
        advantage=advantage,
    )


def test_the_canary_is_the_shortest_row_of_the_largest_advantage() -> None:
    chosen = choose_canary([row(5, 0.0), row(30, -2.0), row(12, 2.0), row(8, 1.0)])
    assert chosen
    assert len(chosen.tokens) == 12


def test_a_canary_begins_where_something_is_trained_and_stays_short() -> None:
    chosen = choose_canary([row(2000, 1.0, prompt=500, hole=7)])
    assert chosen
    assert (chosen.prompt_length, len(chosen.tokens)) == (192, 192 + 64)
    assert chosen.tokens[chosen.prompt_length] == 507


def test_without_a_prepared_model_there_is_a_canary_all_the_same(tmp_path: Path) -> None:
    assert len(first_canary(tmp_path).tokens) == 8


@pytest.fixture
def backend(tmp_path: Path) -> SimulatedBackend:
    backend = SimulatedBackend()
    backend.start(tmp_path / "model", 1, Optimizer(), 1024, seed=1)
    return backend


def test_each_version_tells_its_canary_apart_from_the_one_before(
    tmp_path: Path, backend: SimulatedBackend
) -> None:
    store = WeightStore(tmp_path)
    publisher = Publisher(backend, store, tmp_path / "scratch", first_canary(tmp_path))
    publisher.publish(PolicyVersion(1, 0), [])
    rows = [row(9, 1.0)]
    backend.train_step(TrainBatch(step=1, rows=rows, temperature=1.0), Algorithm())
    digest = publisher.publish(PolicyVersion(1, 1), rows)
    publisher.publish(PolicyVersion(1, 2), rows)
    first, second, third = (store.verify(PolicyVersion(1, n)) for n in range(3))
    assert second.digest == digest
    assert first.canary
    assert second.canary
    assert third.canary
    assert first.canary.previous_logprobs is None
    assert second.canary.previous_logprobs == pytest.approx(first.canary.logprobs)
    assert second.canary.logprobs != second.canary.previous_logprobs
    assert third.canary.prompt_ids == rows[0].tokens[:3].tolist()
    assert not list((tmp_path / "scratch").iterdir())


def test_files_of_the_prepared_model_go_along(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_text("old")
    backend = SimulatedBackend()
    backend.start(model, 1, Optimizer(), 1024, seed=1)
    backend.export_weights(tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != b"old"


def test_the_order_of_batches_shows_in_the_simulated_weights(
    tmp_path: Path, backend: SimulatedBackend
) -> None:
    batches = [
        TrainBatch(
            step=n, rows=[dataclasses.replace(row(9, 1.0), episode=f"t{n}-0.0")], temperature=1.0
        )
        for n in (1, 2)
    ]
    for batch in batches:
        backend.train_step(batch, Algorithm())
    forward = backend.weights.copy()
    backend.start(tmp_path / "model", 1, Optimizer(), 1024, seed=1)
    for batch in reversed(batches):
        backend.train_step(batch, Algorithm())
    assert (forward != backend.weights).any()


@pytest.mark.parametrize(
    ("changes", "up", "down"),
    [
        ({}, 1.207612, -0.724567),
        ({"normalize_by_std": False}, 0.625, -0.375),
        ({"advantage": "rloo"}, 0.714286, -0.428571),
    ],
)
def test_simulated_advantages_are_the_published_ones(
    changes: dict[str, object], up: float, down: float
) -> None:
    rewards = [1.0, 0, 0, 1, 1, 0, 0, 0]
    found = SimulatedBackend().advantages(rewards, ["a"] * 8, Algorithm(**changes))  # type: ignore[arg-type]
    assert found == pytest.approx([up if reward else down for reward in rewards], abs=1e-5)
