"""What the trainer wrote under metrics/, read while it is still being written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_operator.view.facts import Score


def read_scores(artifacts: Path, from_ledger: Mapping[int, float]) -> list[Score]:
    """Validation scores, with intervals where the trainer has written them."""
    scores = {step: Score(step, score) for step, score in from_ledger.items()}
    for line in read_lines(artifacts / "metrics" / "validation.jsonl"):
        scores[line["step"]] = Score(
            line["step"], line["score"], line.get("ci_low"), line.get("ci_high")
        )
    return [scores[step] for step in sorted(scores)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole JSON lines of a file that is still being written; [] where there is none."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [
        json.loads(line)
        for line in text.splitlines(keepends=True)
        if line.endswith("\n") and line.strip()
    ]
