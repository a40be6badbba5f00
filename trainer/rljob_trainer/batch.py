"""A batch: archived before it is trained, and turned into rows.

    take ─► packed trajectories ─► batches/step-N/ (groups.bin, manifest.json last) ─► rows of tokens, masks, logprobs

`groups.bin` is one `<u32 little-endian length><packed trajectory>` per episode, in group order. A batch that stands in
the archive is never written again: whoever trains step N, now or after a crash, trains exactly these bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rljob.codec import unpack
from rljob.errors import CorruptError
from rljob.ids import GroupId
from rljob.trajectory import Chain, Trajectory
from rljob_trainer.backends.base import TrainRow
from rljob_trainer.files import new_directory

if TYPE_CHECKING:
    from rljob.ledger import TakenGroup

LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Group:
    """A complete group: its packed episodes in member order."""

    group: GroupId
    payloads: list[bytes]
    trajectories: list[Trajectory]


def decode(taken: Sequence[TakenGroup]) -> tuple[list[Group], dict[GroupId, str]]:
    """What `take` gave, decoded; and the groups that do not decode, with the reason."""
    groups, corrupt = [], {}
    for item in taken:
        try:
            groups.append(
                Group(
                    item.group, list(item.payloads), [unpack(payload) for payload in item.payloads]
                )
            )
        except CorruptError as error:
            corrupt[item.group] = str(error)
    return groups, corrupt


def archive_path(artifacts: Path, step: int) -> Path:
    """Where the batch of `step` stands."""
    return artifacts / "batches" / f"step-{step:06d}"


def write_archive(artifacts: Path, step: int, incarnation: int, groups: Sequence[Group]) -> None:
    """Archive the batch of `step`; one that stands already is left as it is."""
    if (archive_path(artifacts, step) / "manifest.json").exists():
        return
    entries, blob = [], bytearray()
    for group in groups:
        episodes = []
        for payload, trajectory in zip(group.payloads, group.trajectories, strict=True):
            blob += LENGTH.pack(len(payload))
            digest = hashlib.sha256(payload).hexdigest()
            place = {"sha256": digest, "offset": len(blob), "length": len(payload)}
            episodes.append({"episode": trajectory.episode, "attempt": trajectory.attempt, **place})
            blob += payload
        entries.append(
            {"group": str(group.group), "row_index": group.group.row_index, "episodes": episodes}
        )
    with new_directory(archive_path(artifacts, step)) as directory:
        (directory / "groups.bin").write_bytes(blob)
        manifest = {"step": step, "incarnation": incarnation, "groups": entries}
        (directory / "manifest.json").write_text(json.dumps(manifest))


def read_archive(artifacts: Path, step: int) -> list[Group]:
    """The archived batch of `step`.

    Raises:
        CorruptError: the archive does not hold what its manifest says.
    """
    directory = archive_path(artifacts, step)
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        blob = (directory / "groups.bin").read_bytes()
        return [_read_group(entry, blob) for entry in manifest["groups"]]
    except (OSError, ValueError, KeyError, CorruptError) as error:
        raise CorruptError(f"{directory}: {error}") from None


def archived_steps(artifacts: Path, after: int) -> int:
    """The last of the unbroken row of archived steps past `after`; `after` where there is none."""
    step = after
    while (archive_path(artifacts, step + 1) / "manifest.json").exists():
        step += 1
    return step


def archived_groups(artifacts: Path, last: int, most: int) -> list[GroupId]:
    """Groups in the newest `most` archives up to step `last`."""
    groups = []
    for step in range(max(1, last - most + 1), last + 1):
        file = archive_path(artifacts, step) / "manifest.json"
        if file.exists():
            groups += [
                GroupId.parse(entry["group"]) for entry in json.loads(file.read_text())["groups"]
            ]
    return groups


def _read_group(entry: dict[str, Any], blob: bytes) -> Group:
    payloads = []
    for episode in entry["episodes"]:
        payload = blob[episode["offset"] : episode["offset"] + episode["length"]]
        if hashlib.sha256(payload).hexdigest() != episode["sha256"]:
            raise CorruptError(f"episode {episode['episode']} does not match its hash")
        payloads.append(payload)
    return Group(GroupId.parse(entry["group"]), payloads, [unpack(payload) for payload in payloads])


def rows_of(
    groups: Sequence[Group], advantages: Sequence[float], oldest_n: int | None
) -> list[TrainRow]:
    """One row per chain that has something to train.

    Args:
        groups: The batch.
        advantages: [E] one per episode, in order.
        oldest_n: Tokens of an older policy version are masked (`onStale: mask`); None masks none.
    """
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    rows = []
    for trajectory, advantage in zip(episodes, advantages, strict=True):
        rows += _episode_rows(trajectory, advantage, oldest_n)
    return rows


def _episode_rows(trajectory: Trajectory, advantage: float, oldest_n: int | None) -> list[TrainRow]:
    masks = [_loss_mask(chain, oldest_n) for chain in trajectory.chains]
    total = sum(int(mask.sum()) for mask in masks)
    rows = []
    for chain, mask in zip(trajectory.chains, masks, strict=True):
        if not mask.any():
            continue
        prompt = max(1, chain.prompt_length)
        logprobs = np.zeros(len(chain.tokens), dtype=np.float32)
        logprobs[np.asarray(chain.action_mask, dtype=bool)] = chain.logprobs
        rows.append(
            TrainRow(
                episode=trajectory.episode,
                tokens=np.asarray(chain.tokens, dtype=np.int32),
                prompt_length=prompt,
                mask=mask[prompt:],
                logprobs=logprobs[prompt:],
                advantage=advantage,
                share=int(mask.sum()) / total,
            )
        )
    return rows


def _loss_mask(chain: Chain, oldest_n: int | None) -> NDArray[np.bool_]:
    """[T] the action tokens that may be trained; the very first token of a chain never may (nothing predicts it)."""
    mask = np.asarray(chain.action_mask, dtype=bool).copy()
    mask[:1] = False
    for span in chain.version_spans:
        if oldest_n is not None and span.n < oldest_n:
            mask[span.start : span.start + span.length] = False
    return mask
