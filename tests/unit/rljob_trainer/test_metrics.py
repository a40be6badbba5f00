"""Statistics of scores, and the line per step."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from rljob_trainer.metrics import StepLog, append_line, pass_at, read_lines, wilson_interval


@pytest.mark.parametrize(
    ("score", "n", "low", "high"),
    [
        (0.5, 100, 0.4038, 0.5962),
        (0.0, 20, 0.0, 0.1611),
        (1.0, 20, 0.8389, 1.0),
        (0.31, 150, 0.2416, 0.3880),
    ],
)
def test_the_interval_is_wilsons(score: float, n: int, low: float, high: float) -> None:
    assert wilson_interval(score, n) == pytest.approx((low, high), abs=1e-3)


def test_without_episodes_nothing_is_known() -> None:
    assert wilson_interval(0.0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("k", "samples", "passed"), [(1, 4, 1), (2, 4, 1), (3, 5, 2), (4, 4, 0), (2, 3, 3)]
)
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(
    k: int, samples: int, passed: int
) -> None:
    draws = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at(k, samples, passed) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_rewinding_drops_what_is_trained_again_and_puts_back_what_the_checkpoint_knows(
    tmp_path: Path,
) -> None:
    log = StepLog(tmp_path)
    for step in (1, 2, 4, 5):
        log.append({"step": step})
    log.rewind(3, {"step": 3})
    assert [line["step"] for line in read_lines(tmp_path / "metrics" / "steps.jsonl")] == [1, 2, 3]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2, "re')
    append_line(file, {"step": 3})
    assert read_lines(file) == [{"step": 1}, {"step": 3}]


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    append_line(tmp_path / "lines.jsonl", {"loss": float("nan"), "norms": [1.0, float("inf")]})
    line = (tmp_path / "lines.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"loss": None, "norms": [1.0, None]}
