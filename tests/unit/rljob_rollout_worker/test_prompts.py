"""Rows by index: a pure function, a full permutation per epoch, checked hashes."""

import hashlib
import json
from pathlib import Path

import pytest

from rljob.errors import DataError
from rljob_rollout_worker.prompts import Prompts, load_manifest, train_position

FROZEN = [4, 6, 2, 5, 7, 0, 8, 3, 1, 9, 4, 7]


def prepare(artifacts: Path, **change: object) -> None:
    folder = artifacts / "prepared"
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"task": "t", "prompt": f"p{i}"}) + "\n" for i in range(5))
    split = {"rows": 5, "sha256": hashlib.sha256(lines.encode()).hexdigest()} | change
    (folder / "train.jsonl").write_text(lines)
    (folder / "validation.jsonl").write_text(lines)
    (folder / "manifest.json").write_text(json.dumps({"train": split, "validation": split}))


def test_every_epoch_is_a_full_permutation_of_its_own() -> None:
    epochs = [[train_position(7, "hash", 50, 50 * e + i) for i in range(50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_hangs_on_seed_data_and_index_alone() -> None:
    # frozen: another order would break the resume of a running job
    assert [train_position(7, "hash", 10, i) for i in range(12)] == FROZEN
    assert [train_position(8, "hash", 10, i) for i in range(12)] != FROZEN
    assert [train_position(7, "other", 10, i) for i in range(12)] != FROZEN


def test_validation_rows_stand_in_their_own_order(artifacts: Path) -> None:
    prepare(artifacts)
    prompts = Prompts(artifacts, seed=1)
    found = [prompts.locate(i, validation=True) for i in range(5)]
    assert [rows.row(position).prompt for rows, position in found] == [f"p{i}" for i in range(5)]
    with pytest.raises(DataError, match="has no row 5"):
        prompts.locate(5, validation=True)


def test_a_row_has_the_hash_of_its_line(artifacts: Path) -> None:
    prepare(artifacts)
    rows, position = Prompts(artifacts, seed=1).locate(3, validation=False)
    assert len({rows.row_hash(i) for i in range(5)}) == 5
    assert len(rows.row_hash(position)) == 16


def test_changed_rows_are_refused(artifacts: Path) -> None:
    prepare(artifacts)
    with (artifacts / "prepared/train.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match="never change"):
        Prompts(artifacts, seed=1)


def test_a_wrong_number_of_rows_is_refused(artifacts: Path) -> None:
    prepare(artifacts, rows=6)
    with pytest.raises(DataError, match="has 5 rows, prepared were 6"):
        Prompts(artifacts, seed=1)


def test_nothing_prepared_is_said_so(artifacts: Path) -> None:
    with pytest.raises(DataError, match="nothing was prepared"):
        load_manifest(artifacts)
