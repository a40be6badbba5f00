"""From a manifest file to an RLJob, or to one clear line per fault."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob.api.load import ManifestFaultsError, load
from rljob.api.rljob_types import RLJob
from rljob.errors import ManifestError

ROOT = Path(__file__).parents[4]
EXAMPLE: dict[str, Any] = yaml.safe_load((ROOT / "examples/quickstart/rljob.yaml").read_text())


def written(tmp_path: Path, data: Any) -> Path:
    file = tmp_path / "m.yaml"
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False))
    return file


def faults(tmp_path: Path, *assignments: str) -> list[str]:
    """What is wrong with the quick start once these are set, without the `--set: ` in front."""
    with pytest.raises(ManifestError) as error:
        load(ROOT / "examples/quickstart/rljob.yaml", assignments)
    return [line.removeprefix("--set: ") for line in str(error.value).splitlines()]


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("examples/*/rljob.yaml")), ids=lambda file: file.parent.name
)
def test_every_example_is_valid(file: Path) -> None:
    assert isinstance(load(file), RLJob)


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("rollout.gruopSize=4", "spec.rollout.gruopSize: unknown key; did you mean groupSize?"),
        ("rollout.group_size=4", "spec.rollout.group_size: unknown key; did you mean groupSize?"),
        ("tasks[0].agent.maxTurn=4", "spec.tasks[0].agent.maxTurn: unknown key; did you mean maxTurns?"),
        ("rollout.groupSize=four", 'spec.rollout.groupSize: expected a whole number, got "four"; correct the value'),
        ("rollout.groupSize='8'", 'spec.rollout.groupSize: expected a whole number, got "8"; correct the value'),
        ("rollout.groupSize=8.5", "spec.rollout.groupSize: expected a whole number, got 8.5; correct the value"),
        ("rollout.groupSize=true", "spec.rollout.groupSize: expected a whole number, got true; correct the value"),
        ("trainer.optimizer.learningRate=high", "spec.trainer.optimizer.learningRate: expected a number, "
         'got "high"; correct the value'),
        ("trainer.steps=0", "spec.trainer.steps: 0 is out of range; it must be ≥ 1"),
        ("rollout.sampling.temperature=0", "spec.rollout.sampling.temperature: 0 is out of range; it must be > 0"),
        ("rollout.schedule=later", "spec.rollout.schedule: \"later\" is not allowed; "
         "use 'sync', 'one_step' or 'async'"),
        ("sandboxPools=3", "spec.sandboxPools: expected a list, got 3; correct the value"),
        ("rollout.partialRollout=maybe", "spec.rollout.partialRollout: expected true or false, "
         'got "maybe"; correct the value'),
        ("trainer.optimizer.learningRate=.nan", None),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_with_path_problem_and_fix(
    tmp_path: Path, assignment: str, line: str | None
) -> None:
    found = faults(tmp_path, assignment)
    assert len(found) == 1
    assert line is None or found[0] == line


def test_all_faults_are_listed_with_their_lines(tmp_path: Path) -> None:
    data = copy.deepcopy(EXAMPLE)
    del data["spec"]["model"]
    data["spec"]["trainer"]["steps"] = -1
    data["spec"]["extra"] = 1
    with pytest.raises(ManifestFaultsError) as error:
        load(written(tmp_path, data))
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    text = (tmp_path / "m.yaml").read_text().splitlines()
    for line in lines:
        number = int(line.split(":")[1])
        assert 1 <= number <= len(text)
    assert any("spec.model: is required" in line for line in lines)


def test_a_missing_file_a_folder_and_other_kinds_are_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no.yaml", "there is no such file"), (tmp_path, "is a folder")):
        with pytest.raises(ManifestError, match=said):
            load(path)
    with pytest.raises(ManifestError, match="is 'Pod', not RLJob"):
        load(written(tmp_path, {**EXAMPLE, "kind": "Pod"}))
    (tmp_path / "m.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="/dev/zero: holds more than 16 MiB; is it the right"):
        load(Path("/dev/zero"))
    with pytest.raises(ManifestError, match="is not UTF-8 text"):
        load(tmp_path / "m.yaml")


@pytest.mark.parametrize(
    ("assignment", "path"),
    [
        ("tasks[0].type=no_such_task", "spec.tasks[0].type"),
        ("tasks[0].agent.name=no_such_agent", "spec.tasks[0].agent.name"),
        ("tasks[0].agent.tools[0].name=no_such_tool", "spec.tasks[0].agent.tools[0].name"),
        ("tasks[0].reward.name=no_such_package.rewards:Mine", "spec.tasks[0].reward.name"),
    ],
)
def test_an_unknown_plugin_is_told_at_its_place(tmp_path: Path, assignment: str, path: str) -> None:
    (line,) = faults(tmp_path, assignment)
    assert line.startswith(f"{path}: ")
    assert "no_such" in line


def test_a_plugin_of_ones_own_is_found_beside_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "own_reward_for_test.py").write_text(
        "async def score(box, row, result):\n    return 1.0\n"
    )
    data = copy.deepcopy(EXAMPLE)
    data["spec"]["tasks"][0]["reward"] = {"name": "own_reward_for_test:score"}
    assert load(written(tmp_path, data)).spec.tasks[0].reward.name == "own_reward_for_test:score"


def test_the_faults_pickle() -> None:
    import pickle

    error = ManifestFaultsError(["a", "b"])
    assert str(pickle.loads(pickle.dumps(error))) == "a\nb"


def test_null_is_not_given_and_a_whole_float_is_a_whole_number(tmp_path: Path) -> None:
    given = ["rollout.groupSize=4.0", "rollout.maxAttempts=null", "tasks[0].options={a: null}"]
    job = load(ROOT / "examples/quickstart/rljob.yaml", given)
    assert (job.spec.rollout.group_size, job.spec.rollout.max_attempts) == (4, 3)
    assert job.spec.tasks[0].options == {"a": None}
    assert faults(tmp_path, "model=null") == ["spec.model: is required; add it"]
