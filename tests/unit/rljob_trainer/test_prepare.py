"""Preparing: sources in, <artifacts>/prepared out; bad sources end in one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob.errors import DataError, UserError
from rljob.settings import Settings
from rljob_trainer import recipes
from rljob_trainer.prepare import prepare
from rljob_trainer.rows import read_rows

GOOD_ROWS = '{"prompt": "one", "metadata": {"answer": "1"}}\n\n{"task": "shell", "prompt": "two"}\n'
OTHER_ROWS = '{"prompt": "three"}\n'


def _model(folder: Path, **leave_out: bool) -> Path:
    folder.mkdir(parents=True)
    files = {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"chat_template": "x"}',
        "model.safetensors": "weights",
    }
    for name, text in files.items():
        if not leave_out.get(name.split(".")[0]):
            (folder / name).write_text(text)
    return folder


def _manifest(**changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "model": {"source": "file://model"},
        "data": {"train": {"source": "file://a.jsonl"}, "validation": {"source": "file://b.jsonl"}},
        "tasks": [{"name": "shell", "type": "shell_files", "sandbox": {"pool": "p"}}],
        "trainer": {"steps": 1, "groupsPerStep": 1},
        "sandboxPools": [{"name": "p"}],
    }
    spec.update(changes)
    meta = {"name": "job"}
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": meta, "spec": spec}


def _settings(tmp_path: Path, **changes: Any) -> Settings:
    (tmp_path / "job.json").write_text(json.dumps(_manifest(**changes)))
    return Settings(
        component="prepare",
        job_file=str(tmp_path / "job.json"),
        artifacts=str(tmp_path / "artifacts"),
        work_dir=str(tmp_path / "work"),
        cache_dir=str(tmp_path / "cache"),
        manifest_dir=str(tmp_path),
    )


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    _model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(GOOD_ROWS)
    (tmp_path / "b.jsonl").write_text(OTHER_ROWS)
    (tmp_path / "artifacts").mkdir()
    return tmp_path


def _quiet(_line: str) -> None:
    pass


def test_files_become_a_prepared_folder(sources: Path) -> None:
    manifest = prepare(_settings(sources), _quiet)
    prepared = sources / "artifacts" / "prepared"
    assert manifest["train"]["rows"] == 2
    assert manifest["validation"]["rows"] == 1
    assert (prepared / "model" / "model.safetensors").read_text() == "weights"
    assert json.loads((prepared / "train.jsonl").read_text().splitlines()[0])["task"] == "shell"
    assert json.loads((prepared / "manifest.json").read_text()) == manifest


def test_a_matching_prepared_folder_is_kept_and_another_is_replaced(sources: Path) -> None:
    first = prepare(_settings(sources), _quiet)
    assert prepare(_settings(sources), _quiet) == first
    (sources / "c.jsonl").write_text(OTHER_ROWS * 1)
    other = prepare(_settings(sources, data={"train": {"source": "file://c.jsonl"}}), _quiet)
    assert other["train"]["rows"] == 1
    assert not (sources / "artifacts" / "prepared" / "validation.jsonl").exists()


def test_a_half_written_folder_of_a_killed_start_does_not_count(sources: Path) -> None:
    (sources / "artifacts" / "prepared").mkdir()
    (sources / "artifacts" / "prepared" / "train.jsonl").write_text("rubbish")
    (sources / "artifacts" / ".tmp-prepared" / "model").mkdir(parents=True)
    assert prepare(_settings(sources), _quiet)["train"]["rows"] == 2


BAD_ROWS = [
    ("not json", "a.jsonl:1: not JSON"),
    ('{"prompt": "x"}\n[1]', "a.jsonl:2: a row must be a JSON object"),
    ('{"task": "shell"}', "missing required field `prompt`"),
    ('{"prompt": 3}', "$.prompt"),
    ('{"prompt": []}', "prompt holds no message"),
    ('{"prompt": "x", "answer": "y"}', "unknown key 'answer'"),
    ('{"prompt": "x", "task": "sql"}', "task 'sql' is not configured; spec.tasks has: shell"),
    ("", "holds no rows"),
    ("\xff", "a.jsonl:1: not JSON"),
]


@pytest.mark.parametrize(("text", "message"), BAD_ROWS)
def test_a_malformed_dataset_names_its_line(sources: Path, text: str, message: str) -> None:
    (sources / "a.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError) as caught:
        prepare(_settings(sources), _quiet)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("config", "no config.json"),
        ("tokenizer", "no tokenizer.json"),
        ("model", "no *.safetensors"),
        ("tokenizer_config", "no chat template"),
    ],
)
def test_an_incomplete_model_names_what_is_missing(
    sources: Path, left_out: str, message: str
) -> None:
    _model(sources / "poor", **{left_out: True})
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        prepare(_settings(sources, model={"source": "file://poor"}), _quiet)


def test_missing_sources_are_named(sources: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        prepare(_settings(sources, model={"source": "file://nowhere"}), _quiet)
    with pytest.raises(DataError, match="no such file"):
        prepare(_settings(sources, data={"train": {"source": "file://nowhere.jsonl"}}), _quiet)


def test_a_validation_row_that_is_trained_on_is_refused(sources: Path) -> None:
    (sources / "b.jsonl").write_text('{"prompt": "two"}')
    with pytest.raises(DataError, match="row 1 is a training row too"):
        prepare(_settings(sources), _quiet)


def test_a_row_without_task_needs_a_single_task_config(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "x"}')
    assert read_rows(file, ["only"])[0].task == "only"
    with pytest.raises(DataError, match="missing required field `task`"):
        read_rows(file, ["one", "two"])


def test_parquet_rows_may_hold_metadata_as_json_text(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "rows.parquet"
    columns = {"prompt": ["x", "y"], "metadata": ['{"answer": "1"}', None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    assert [row.metadata for row in read_rows(file, ["only"])] == [{"answer": "1"}, {}]
    file.write_text("not parquet")
    with pytest.raises(DataError, match="not a parquet file"):
        read_rows(file, ["only"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("recipe://nope", "unknown recipe 'nope'; known: quickstart, simulated"),
        ("recipe://quickstart?rowz=1", "no option 'rowz'"),
        ("recipe://quickstart?rows=many", "not a whole number"),
        ("recipe://quickstart?rows=-1", "not a whole number"),
    ],
)
def test_a_bad_recipe_is_refused(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        recipes.parse(source, "spec.model.source")


def test_an_hf_source_must_name_a_file_of_rows(sources: Path) -> None:
    with pytest.raises(DataError, match="does not name a file"):
        prepare(_settings(sources, data={"train": {"source": "hf://org/name"}}), _quiet)


def test_an_unreachable_hub_is_one_line(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="cannot fetch hf://org/name") as caught:
        prepare(_settings(sources, model={"source": "hf://org/name"}), _quiet)
    assert "\n" not in str(caught.value)


def test_the_component_exits_2_with_the_line_last(sources: Path) -> None:
    settings = _settings(sources, model={"source": "file://nowhere"})
    env = {**os.environ, **settings.to_env()}
    command = [sys.executable, "-m", "rljob_trainer.prepare"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("spec.model.source: no such folder")


@pytest.fixture
def volume(sources: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The claim `data`, mounted."""
    monkeypatch.setattr("rljob_trainer.sources.VOLUMES_PATH", str(sources / "volumes"))
    claim = sources / "volumes" / "data"
    _model(claim / "models" / "small")
    (claim / "rows.jsonl").write_text(GOOD_ROWS)
    return claim


def test_model_and_rows_come_from_a_mounted_volume(sources: Path, volume: Path) -> None:
    (volume / "models" / "small").chmod(0o555)
    changes = {
        "model": {"source": "pvc://data/models/small"},
        "data": {"train": {"source": "pvc://data/rows.jsonl"}},
    }
    assert prepare(_settings(sources, **changes), _quiet)["train"]["rows"] == 2
    model = sources / "artifacts" / "prepared" / "model"
    assert (model / "model.safetensors").read_text() == "weights"
    assert model.stat().st_mode & 0o200  # so that it can be replaced


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pvc://other/rows.jsonl", "the volume other is not mounted at"),
        ("pvc://data/none.jsonl", "the volume data has no none.jsonl"),
        ("pvc://data/../data/rows.jsonl", "names no place inside a volume"),
        ("pvc://data/out/b.jsonl", "leads out of its volume"),
        ("pvc://data/models", "no such file"),
    ],
)
def test_what_a_volume_does_not_hold_is_one_line(
    sources: Path, volume: Path, source: str, message: str
) -> None:
    (volume / "out").symlink_to(sources)
    with pytest.raises(DataError, match=message) as caught:
        prepare(_settings(sources, data={"train": {"source": source}}), _quiet)
    assert "\n" not in str(caught.value)


def test_the_simulated_recipe_needs_seconds_and_no_torch(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    recipe = {"source": "recipe://simulated"}
    settings = _settings(tmp_path, model=recipe, data={"train": recipe, "validation": recipe})
    script = (
        "import sys; sys.modules['torch'] = None; from rljob_trainer.prepare import main; main()"
    )
    env = {**os.environ, **settings.to_env()}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    prepared = tmp_path / "artifacts" / "prepared"
    manifest = json.loads((prepared / "manifest.json").read_text())
    assert (manifest["train"]["rows"], manifest["validation"]["rows"]) == (80, 20)
    for line in (prepared / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["prompt"] == f"Submit sim-answer={row['metadata']['answer']}"


@pytest.mark.verl
def test_a_recipe_is_built_once_and_then_comes_from_the_cache(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    source = "recipe://quickstart?warm_start_steps=2&rows=10"
    rows = {"train": {"source": "recipe://quickstart?rows=10"}}
    settings = _settings(tmp_path, model={"source": source}, data=rows)
    first = prepare(settings, _quiet)
    (tmp_path / "artifacts" / "prepared" / "manifest.json").unlink()
    again = prepare(settings, _quiet)
    assert (first["from_cache"], again["from_cache"]) == (False, True)
    assert first["model_digest"] == again["model_digest"]
