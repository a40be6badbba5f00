"""Weights out: backend ─► a directory vLLM serves ─► weight store (hash per tensor, canary) ─► the ledger's commit.

The canary is a short sequence with its log probabilities under the new weights and under the ones published before: an
engine that scores it after a switch can tell new weights from old ones, whatever any label says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljob.ids import PolicyVersion
from rljob.weights import Canary, WeightStore
from rljob_trainer.backends.base import Backend, TrainRow

_CANARY_PROMPT_TOKENS = 192
_CANARY_SCORED_TOKENS = 64


class Publisher:
    """Publishes versions and chooses canaries. Every call blocks."""

    def __init__(
        self, backend: Backend, store: WeightStore, scratch: Path, canary: TrainRow
    ) -> None:
        self._backend, self._store, self._scratch = backend, store, scratch
        self._canary = canary
        self._previous: list[float] | None = None

    def publish(self, version: PolicyVersion, rows: Sequence[TrainRow]) -> str:
        """Write `weights/{version}`, and choose the canary of the next version from `rows`. Gives the digest."""
        tokens, prompt = self._canary.tokens.tolist(), self._canary.prompt_length
        canary = Canary(
            prompt_ids=tokens[:prompt],
            token_ids=tokens[prompt:],
            logprobs=self._score(),
            previous_logprobs=self._previous,
        )
        export = self._scratch / f"export-{version}"
        shutil.rmtree(export, ignore_errors=True)
        try:
            self._backend.export_weights(export)
            digest = self._store.publish(version, export, canary)
        finally:
            shutil.rmtree(export, ignore_errors=True)
        self._canary = choose_canary(rows) or self._canary
        self._previous = self._score()
        return digest

    def _score(self) -> list[float]:
        """Untempered, as an engine's `prompt_logprobs` are."""
        return [float(value) for value in self._backend.logprobs([self._canary], 1.0)[0]]


def choose_canary(rows: Sequence[TrainRow]) -> TrainRow | None:
    """The start of the shortest row with the largest advantage: what training moves most, cheap to score."""
    row = max(rows, key=lambda row: (abs(row.advantage), -len(row.tokens)), default=None)
    if row is None:
        return None
    first = int(np.flatnonzero(row.mask)[0]) + row.prompt_length
    return canary_row(
        row.tokens[max(0, first - _CANARY_PROMPT_TOKENS) : first + _CANARY_SCORED_TOKENS],
        min(first, _CANARY_PROMPT_TOKENS),
    )


def first_canary(prepared: Path) -> TrainRow:
    """A canary before anything was sampled: the first training row's prompt, its later half scored."""
    ids = _prompt_ids(prepared)[:_CANARY_SCORED_TOKENS]
    ids = ids if len(ids) >= 2 else [1, 2, 3, 4, 5, 6, 7, 8]
    return canary_row(np.asarray(ids, dtype=np.int32), max(1, len(ids) // 2))


def canary_row(tokens: Any, prompt_length: int) -> TrainRow:
    """Tokens as a row whose every later token is scored."""
    scored = len(tokens) - prompt_length
    return TrainRow(
        episode="canary",
        tokens=np.asarray(tokens, dtype=np.int32),
        prompt_length=prompt_length,
        mask=np.ones(scored, dtype=bool),
        logprobs=np.zeros(scored, dtype=np.float32),
    )


def _prompt_ids(prepared: Path) -> list[int]:
    tokenizer = prepared / "model" / "tokenizer.json"
    splits = [prepared / f"{split}.jsonl" for split in ("train", "validation")]
    rows = next((file for file in splits if file.exists()), None)
    if rows is None or not tokenizer.exists():
        return []
    from tokenizers import Tokenizer

    with rows.open(encoding="utf-8") as lines:
        text = json.dumps(json.loads(next(lines))["prompt"])
    return Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids
