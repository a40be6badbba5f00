"""Collected episodes for people and other programs: `export/trajectories-N.jsonl`, one line per episode.

| key | is |
| --- | --- |
| episode, group, row_index, task | which; members of a group share their row |
| row | the row itself: task, prompt, metadata |
| reward, reward_parts, outcome, turns, tool_calls | how it went |
| version, model, sampling, stage_seconds, started_at, metadata | under which circumstances |
| chains | one linear token sequence each, as below |

| key of a chain | is |
| --- | --- |
| tokens | ids, exactly as the engine saw and sampled them |
| sampled | [start, length] of each run of `tokens` that the model sampled |
| logprobs | one per sampled token, in order |
| segments | the same as text: {"sampled": true or false, "text": …} |
| agent_id, finish_reason | who spoke, and how its last turn ended |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rljob.trajectory import Chain, Trajectory
from rljob_trainer.batch import Group
from rljob_trainer.files import write_atomic

Decode = Callable[[list[int]], str]


class Exporter:
    """Writes the export of one job. Every call blocks.

    Args:
        artifacts: The artifact store, with the prepared rows and model.
    """

    def __init__(self, artifacts: Path) -> None:
        self._folder, prepared = artifacts / "export", artifacts / "prepared"
        self._decode = _decoder(prepared / "model" / "tokenizer.json")
        lines = (prepared / "train.jsonl").read_bytes().splitlines()
        # the worker names a row by the first digits of its line's hash
        self._rows = {hashlib.sha256(line).hexdigest()[:16]: line for line in lines}

    @staticmethod
    def name(step: int) -> str:
        """File of a batch."""
        return f"trajectories-{step:06d}.jsonl"

    def has(self, step: int) -> bool:
        """Whether the file of a batch stands."""
        return (self._folder / self.name(step)).exists()

    def export(self, step: int, groups: Sequence[Group]) -> None:
        """Write the file of a batch."""
        lines = [
            json.dumps(self._line(str(group.group), record), separators=(",", ":")).encode() + b"\n"
            for group in groups
            for record in group.trajectories
        ]
        write_atomic(self._folder / self.name(step), b"".join(lines))

    def _line(self, group: str, record: Trajectory) -> dict[str, Any]:
        row = self._rows.get(record.row_hash)
        names = ("reward", "reward_parts", "outcome", "turns", "tool_calls", "model", "sampling",
                 "stage_seconds", "started_at", "metadata")  # fmt: skip
        return {
            "episode": record.episode,
            "group": group,
            "row_index": record.row_index,
            "task": record.task,
            "row": json.loads(row) if row is not None else None,
            **{name: getattr(record, name) for name in names},
            "version": record.version_range[1],
            "chains": [self._chain(chain) for chain in record.chains],
        }

    def _chain(self, chain: Chain) -> dict[str, Any]:
        runs = _runs(chain.action_mask)
        return {
            "tokens": chain.tokens,
            "sampled": [[start, length] for sampled, start, length in runs if sampled],
            "logprobs": chain.logprobs,
            "segments": [
                {"sampled": sampled, "text": self._decode(chain.tokens[start : start + length])}
                for sampled, start, length in runs
            ],
            "agent_id": chain.agent_id,
            "finish_reason": chain.finish_reason,
        }


def _runs(mask: Sequence[bool]) -> list[tuple[bool, int, int]]:
    """(sampled, start, length) of each stretch of equal values."""
    runs: list[tuple[bool, int, int]] = []
    for index, sampled in enumerate(mask):
        if runs and runs[-1][0] == sampled:
            runs[-1] = (sampled, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((sampled, index, 1))
    return runs


def _decoder(file: Path) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
