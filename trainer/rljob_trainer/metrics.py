"""Numbers about training: the statistics of a score, the line per step, and what the trainer says it is doing.

metrics/steps.jsonl        one line per trained step, in order, each step once in the surviving line
metrics/validation.jsonl   one line per validation
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rljob_trainer.files import write_atomic

_Z95 = 1.959963984540054


def wilson_interval(score: float, n: int) -> tuple[float, float]:
    """The Wilson 95 % confidence interval of a pass rate.

    Args:
        score: Passes divided by `n`; a mean of rewards between 0 and 1 is taken as if it were one, which is too wide.
        n: Episodes.
    """
    if n == 0:
        return 0.0, 1.0
    score = min(1.0, max(0.0, score))
    centre = score + _Z95**2 / (2 * n)
    spread = _Z95 * math.sqrt(score * (1 - score) / n + _Z95**2 / (4 * n**2))
    scale = 1 + _Z95**2 / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def pass_at(k: int, samples: int, passed: int) -> float:
    """Unbiased estimate of the chance that one of `k` samples passes, from `samples` of which `passed` did."""
    if samples - passed < k:
        return 1.0
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    items = list(values)
    return math.fsum(items) / len(items) if items else 0.0


class StepLog:
    """`metrics/steps.jsonl`: append-only while a trainer lives; a resumed trainer first drops what it trains again."""

    def __init__(self, artifacts: Path) -> None:
        """Open the log below the artifact store."""
        self._path = artifacts / "metrics" / "steps.jsonl"

    def rewind(self, step: int, last: dict[str, Any] | None) -> None:
        """Keep the lines up to `step`; add `last`, the checkpoint's copy of that step's line, if missing."""
        lines = [line for line in read_lines(self._path) if line["step"] <= step]
        if last is not None and (not lines or lines[-1]["step"] < last["step"]):
            lines.append(last)
        write_atomic(self._path, b"".join(_line(line) for line in lines))

    def append(self, record: dict[str, Any]) -> None:
        """Add the line of one step."""
        append_line(self._path, record)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line; a torn last line of a writer that died is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() and _last_byte(file) != b"\n":
            file.write(b"\n")
        file.write(_line(record))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole JSON lines of a file; torn ones are left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _last_byte(file: Any) -> bytes:
    file.seek(-1, 2)
    return file.read(1)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(_finite(record), separators=(",", ":")).encode() + b"\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN: readers in other languages would refuse the whole line."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
