"""`rljob trajectories`: the archived episodes of a run, as a list or one of them turn by turn."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from rljob.codec import unpack
from rljob.errors import CorruptError, MachineError
from rljob.trajectory import Trajectory
from rljob_operator.show.runs import artifacts_of, find, unknown
from rljob_operator.view.trajectory import render

_LENGTH = struct.Struct("<I")


class Place(NamedTuple):
    """Where one packed trajectory lies."""

    episode: str
    step: int
    used_for: str
    """train or validation."""
    file: Path
    offset: int
    length: int

    def load(self) -> Trajectory:
        """Read and unpack it.

        Raises:
            MachineError: the bytes are damaged.
        """
        with self.file.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.length)
        try:
            return unpack(data)
        except CorruptError as error:
            raise MachineError(
                f"{self.file} at byte {self.offset}", str(error), "the record is damaged"
            ) from None


def main(
    *, show: str | None, step: int | None, limit: int, name: str | None, runs_dir: Path
) -> None:
    """List or show."""
    folder = find(name, runs_dir)
    artifacts = artifacts_of(folder)
    places = [place for place in places_in(artifacts) if step is None or place.step == step]
    console = Console(highlight=False)
    if show is not None:
        matching = [place for place in places if place.episode == show]
        if not matching:
            raise unknown("trajectory", show, [place.episode for place in places])
        console.print(
            render(
                matching[-1].load(), artifacts / "prepared" / "model", trained_at=matching[-1].step
            )
        )
        return
    if not places:
        raise MachineError(
            folder.name,
            "has no trajectories" + (f" of step {step}" if step is not None else " yet"),
            "wait for the first step",
        )
    console.print(_table(places[-limit:]))
    if len(places) > limit:
        console.print(
            f"the last {limit} of {len(places)}; --limit shows more, --step N those of one step"
        )


def places_in(artifacts: Path) -> Iterator[Place]:
    """Every archived episode: training by step, then validation by step."""
    for manifest in sorted(artifacts.glob("batches/step-*/manifest.json")):
        batch = json.loads(manifest.read_text())
        for group in batch["groups"]:
            for episode in group["episodes"]:
                file = manifest.with_name("groups.bin")
                yield Place(
                    episode["episode"],
                    batch["step"],
                    "train",
                    file,
                    episode["offset"],
                    episode["length"],
                )
    for file in sorted(artifacts.glob("validation/step-*.bin")):
        yield from _validation(file)


def _validation(file: Path) -> Iterator[Place]:
    lines = [json.loads(line) for line in file.with_suffix(".jsonl").read_text().splitlines()]
    step, offset = int(file.stem.removeprefix("step-")), 0
    data = file.read_bytes()
    for line in lines:
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += _LENGTH.size
        yield Place(line["episode"], step, "validation", file, offset, length)
        offset += length


def _table(places: list[Place]) -> Table:
    table = Table(box=None, header_style="cyan")
    for column in (
        "episode",
        "step",
        "for",
        "task",
        "reward",
        "outcome",
        "turns",
        "tokens",
        "sampled",
        "versions",
    ):
        table.add_column(column)
    for place in places:
        record = place.load()
        low, high = record.version_range
        table.add_row(
            place.episode,
            str(place.step),
            place.used_for,
            record.task,
            f"{record.reward:.2f}",
            record.outcome,
            str(record.turns),
            str(record.num_tokens),
            str(record.num_action_tokens),
            f"{low}" if low == high else f"{low}–{high}",
        )
    return table
