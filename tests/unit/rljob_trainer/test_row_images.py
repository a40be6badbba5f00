"""Which tasks and images the rows of a job name, for `rljob plan`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob.api.rljob_types import RLJob
from rljob.errors import DataError, UserError
from rljob_trainer import row_images as module
from rljob_trainer.row_images import row_images


def job(**data: Any) -> RLJob:
    spec: dict[str, Any] = {
        "mode": "train" if "train" in data else "eval",
        "model": {"source": "recipe://quickstart"},
        "data": data,
        "tasks": [
            {"name": name, "type": "shell_files", "sandbox": {"pool": "p"}} for name in ("a", "b")
        ],
        "sandboxPools": [{"name": "p"}],
    }
    if "train" in data:
        spec["trainer"] = {"steps": 1, "groupsPerStep": 1}
    head = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}}
    return RLJob.model_validate({**head, "spec": spec})


def file_of(folder: Path, *rows: dict[str, Any]) -> dict[str, str]:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"source": "file://rows.jsonl"}


A, B = {"task": "a", "prompt": "x"}, {"task": "b", "prompt": "x"}
OTHER = {**A, "overrides": {"image": "i"}}


def test_rows_are_counted_by_task_and_image(tmp_path: Path) -> None:
    found = row_images(job(train=file_of(tmp_path, A, OTHER, B, OTHER)), tmp_path)
    assert found == {"train": {"counts": [["a", None, 1], ["a", "i", 2], ["b", None, 1]]}}


def test_of_validation_rows_only_those_that_are_scored_count(tmp_path: Path) -> None:
    scored = {**file_of(tmp_path, A, B, B), "maxRows": 2}
    assert row_images(job(validation=scored), tmp_path) == {
        "validation": {"counts": [["a", None, 1], ["b", None, 1]]}
    }


@pytest.mark.parametrize("image", [3, "", ["i"], "a b", "i" * 513])
def test_an_image_that_is_none_is_refused_with_its_row(tmp_path: Path, image: object) -> None:
    rows = file_of(tmp_path, A, {**A, "overrides": {"image": image}})
    with pytest.raises(DataError, match=r"row 2: overrides\.image is .*; name an image"):
        row_images(job(train=rows), tmp_path)


@pytest.mark.parametrize("source", ["pvc://claim/rows.jsonl", "file:///not/here.jsonl"])
def test_rows_that_only_the_cluster_has_are_left_unread(tmp_path: Path, source: str) -> None:
    found = row_images(job(train={"source": source}), tmp_path)
    assert source in found["train"]["unread"]


def test_a_hub_that_cannot_be_reached_leaves_rows_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("spec.data.train.source", "cannot fetch hf://o/n")

    monkeypatch.setattr(module, "fetch_rows", fail)
    found = row_images(job(train={"source": "hf://o/n/f.jsonl"}), tmp_path)
    assert found == {"train": {"unread": "cannot fetch hf://o/n"}}


@pytest.mark.parametrize(("rows", "code"), [([A], 0), ([{"task": "c", "prompt": "x"}], 2)])
def test_the_program_writes_json_or_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]],
    code: int,
) -> None:
    made = job(train=file_of(tmp_path, *rows))
    monkeypatch.setattr(sys, "argv", ["row_images", str(tmp_path)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(made.model_dump_json(exclude_unset=True)))
    assert module.main() == code
    shown = capsys.readouterr()
    if code:
        assert "task 'c' is not configured" in shown.err
        assert len(shown.err.splitlines()) == 1
    else:
        assert json.loads(shown.out) == {"train": {"counts": [["a", None, 1]]}}
