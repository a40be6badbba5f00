"""Archives and rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rljob.codec import pack, unpack
from rljob.errors import CorruptError
from rljob.ids import EpisodeId, GroupId
from rljob.ledger.types import TakenGroup
from rljob.trajectory import Chain, VersionSpan
from rljob_trainer.batch import (
    Group,
    archive_path,
    archived_groups,
    archived_steps,
    decode,
    read_archive,
    rows_of,
    write_archive,
)
from rljob_trainer.testing import chain, trajectory


def group(row: int = 0, chains: list[Chain] | None = None, size: int = 2) -> Group:
    name = GroupId("t", row, 0)
    payloads = [
        pack(trajectory(str(EpisodeId(name, member)), float(member), chains))
        for member in range(size)
    ]
    return Group(name, payloads, [unpack(payload) for payload in payloads])


def test_an_archive_gives_back_what_was_written(tmp_path: Path) -> None:
    groups = [group(0), group(7)]
    write_archive(tmp_path, 3, 1, groups)
    assert read_archive(tmp_path, 3) == groups
    assert archived_steps(tmp_path, 2) == 3
    assert archived_steps(tmp_path, 3) == 3
    assert archived_groups(tmp_path, 3, 10) == [GroupId("t", 0, 0), GroupId("t", 7, 0)]


def test_an_archive_that_stands_is_never_written_again(tmp_path: Path) -> None:
    write_archive(tmp_path, 1, 1, [group(0)])
    write_archive(tmp_path, 1, 2, [group(5)])
    assert read_archive(tmp_path, 1) == [group(0)]


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    write_archive(tmp_path, 1, 1, [group(0)])
    file = archive_path(tmp_path, 1) / "groups.bin"
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"step-000001.*t0-0\.0"):
        read_archive(tmp_path, 1)


def test_an_archive_without_a_manifest_does_not_count(tmp_path: Path) -> None:
    write_archive(tmp_path, 1, 1, [group(0)])
    (archive_path(tmp_path, 1) / "manifest.json").unlink()
    assert archived_steps(tmp_path, 0) == 0


def test_groups_that_do_not_decode_are_told_apart() -> None:
    good, bad = group(0), group(1)
    taken = [
        TakenGroup(group=item.group, payloads=payloads, evictions=0)
        for item, payloads in ((good, good.payloads), (bad, [bad.payloads[0], b"nonsense"]))
    ]
    groups, corrupt = decode(taken)
    assert groups == [good]
    assert list(corrupt) == [bad.group]


def test_an_episode_of_two_chains_gives_two_rows_with_one_advantage() -> None:
    rows = rows_of(
        [group(chains=[chain(actions=6), chain(actions=2, seed=1)], size=1)], [1.5], None
    )
    assert [row.advantage for row in rows] == [1.5, 1.5]
    assert [row.share for row in rows] == [0.75, 0.25]
    assert {row.episode for row in rows} == {"t0-0.0"}


def test_tool_tokens_are_holes_and_logprobs_stand_where_their_tokens_do() -> None:
    made = chain(prompt=3, actions=4, tool=2)
    (row,) = rows_of([group(chains=[made], size=1)], [1.0], None)
    assert row.mask.tolist() == [True, True, False, False, True, True]
    assert row.logprobs[row.mask] == pytest.approx(np.array(made.logprobs, dtype=np.float32))
    assert row.logprobs[~row.mask].tolist() == [0.0, 0.0]
    assert row.tokens.tolist() == made.tokens


def test_tokens_past_the_bound_are_masked_and_their_chain_is_left_out_when_nothing_is_left() -> (
    None
):
    made = Chain(
        tokens=list(range(8)),
        prompt_length=2,
        action_mask=[False] * 2 + [True] * 6,
        logprobs=[-1.0] * 6,
        version_spans=[VersionSpan(2, 4, 1, 3), VersionSpan(6, 2, 1, 5)],
        finish_reason="stop",
    )
    groups = [group(chains=[made], size=1)]
    (row,) = rows_of(groups, [1.0], 4)
    assert row.mask.tolist() == [False] * 4 + [True] * 2
    assert rows_of(groups, [1.0], 6) == []


def test_a_chain_that_begins_with_an_action_does_not_train_its_first_token() -> None:
    made = chain(prompt=0, actions=3)
    (row,) = rows_of([group(chains=[made], size=1)], [1.0], None)
    assert (row.prompt_length, row.mask.tolist()) == (1, [True, True])
