"""Scored episodes on disk, while a scoring job runs and when it has ended.

    validation/parts/part-N.bin      as drained: written before the ledger may forget the payloads
    validation/step-000000.bin       all of them, as in groups.bin of a batch
    validation/step-000000.jsonl     a line for each, in the same order

Only what a score needs stays in memory, so that a job may score any number of rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from rljob.codec import unpack
from rljob.errors import CorruptError
from rljob.trajectory import Trajectory
from rljob_trainer.batch import LENGTH
from rljob_trainer.files import write_atomic, write_pieces

log = structlog.get_logger()


class ScoredEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """What a score needs of an episode, and where its record lies."""

    episode: str
    task: str
    row_index: int
    reward: float
    outcome: str
    turns: int
    tool_calls: int
    num_tokens: int
    num_action_tokens: int
    version_range: tuple[int, int]
    part: Path
    offset: int
    length: int

    @classmethod
    def of(cls, record: Trajectory, part: Path, offset: int, length: int) -> ScoredEpisode:
        """From its record at a place."""
        names = set(cls.__struct_fields__) - {"part", "offset", "length"}
        known = {name: getattr(record, name) for name in names}
        return cls(**known, part=part, offset=offset, length=length)

    def line(self) -> dict[str, Any]:
        """Its line of step-N.jsonl."""
        names = ("episode", "task", "row_index", "reward", "outcome", "turns", "tool_calls")
        known = {name: getattr(self, name) for name in names}
        return {**known, "tokens": self.num_tokens, "versions": list(self.version_range)}


class Scored:
    """The episodes of one scoring job. Every call blocks.

    Args:
        artifacts: The artifact store.
        fresh: Nothing was scored before: what lies there is of a ledger that is no more.
    """

    def __init__(self, artifacts: Path, *, fresh: bool) -> None:
        self._folder = artifacts / "validation"
        self._parts = self._folder / "parts"
        if fresh:
            shutil.rmtree(self._parts, ignore_errors=True)
        self._by_episode: dict[str, ScoredEpisode] = {}
        self._count = 0
        for part in sorted(self._parts.glob("part-*.bin")):
            self._count = int(part.stem.removeprefix("part-"))
            self._read(part)

    @property
    def episodes(self) -> Sequence[ScoredEpisode]:
        """All of them."""
        return list(self._by_episode.values())

    def add(self, payloads: Sequence[bytes]) -> None:
        """Write drained payloads to a part of their own, durably."""
        self._count += 1
        part = self._parts / f"part-{self._count:06d}.bin"
        blob = b"".join(LENGTH.pack(len(payload)) + payload for payload in payloads)
        write_atomic(part, blob)
        self._read(part)

    def write(self) -> None:
        """Write step-000000.bin and its lines."""
        episodes = self.episodes
        write_pieces(self._folder / "step-000000.bin", self._records(episodes))
        lines = (json.dumps(episode.line()).encode() + b"\n" for episode in episodes)
        write_pieces(self._folder / "step-000000.jsonl", lines)

    def clean(self) -> None:
        """The parts are in step-000000.bin now."""
        shutil.rmtree(self._parts, ignore_errors=True)

    def _read(self, part: Path) -> None:
        data, offset = part.read_bytes(), 0
        while offset < len(data):
            (length,) = LENGTH.unpack_from(data, offset)
            offset += LENGTH.size
            try:
                record = unpack(data[offset : offset + length])
            except CorruptError as error:  # counts as not come back
                log.warning("scored record left out", part=part.name, error=str(error))
            else:
                known = ScoredEpisode.of(record, part, offset, length)
                self._by_episode[record.episode] = known
            offset += length

    @staticmethod
    def _records(episodes: Sequence[ScoredEpisode]) -> Iterator[bytes]:
        for episode in episodes:
            with episode.part.open("rb") as file:
                file.seek(episode.offset)
                yield LENGTH.pack(episode.length) + file.read(episode.length)
