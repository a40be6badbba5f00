"""Manifest text to values: lines, YAML's traps, and `--set`."""

from __future__ import annotations

import pytest

from rljob.api.source import dotted, parse, set_value
from rljob.errors import ManifestError


def test_numbers_and_words_are_read_as_yaml_1_2_does() -> None:
    source = parse("a: 6e-4\nb: on\nc: 2020-01-01\nd: true\ne: 1.5\nf: no\ng: 7\nh: ~\n", "m.yaml")
    assert source.data == {
        "a": 6e-4,
        "b": "on",
        "c": "2020-01-01",
        "d": True,
        "e": 1.5,
        "f": "no",
        "g": 7,
        "h": None,
    }


def test_every_path_knows_its_line_and_a_missing_one_its_parents() -> None:
    source = parse("a:\n  b: 1\n  c:\n  - x\n  - y: 2\n", "m.yaml")
    assert source.where(("a", "b")) == "m.yaml:2"
    assert source.where(("a", "c", 1, "y")) == "m.yaml:5"
    assert source.where(("a", "missing")) == "m.yaml:1"


def test_anchors_and_merge_keys_work() -> None:
    source = parse("base: &b {q: 1, r: 1}\nuse: {<<: *b, r: 2}\nagain: *b\n", "m.yaml")
    assert source.data["use"] == {"q": 1, "r": 2}
    assert source.data["again"] == {"q": 1, "r": 1}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "m.yaml:3: a is given twice (first in line 1); keep one of them"),
        (
            "a:\n  b: 1\n  b: 2\n",
            "m.yaml:3: a.b is given twice (first in line 2); keep one of them",
        ),
        ("a:\n\tb: 1\n", "m.yaml:2: a tab stands where YAML wants spaces; indent with spaces"),
        (
            "a: 1\n---\nb: 2\n",
            "m.yaml:3: a second YAML document starts here; keep one document per file",
        ),
        (
            "",
            "m.yaml:1: the file is empty; write an RLJob into it; see examples/quickstart/rljob.yaml",
        ),
        ("1: 2\n", "m.yaml:1: the key 1 is not a string; put it in quotes"),
        ("{a: b: c}\n", "m.yaml:1: not YAML: expected ',' or '}', but got ':'; correct the syntax"),
        (
            "a: &x [*x]\n",
            "m.yaml:1: nested too deeply or too large; an anchor that contains itself?",
        ),
    ],
)
def test_what_a_manifest_must_not_hold_is_one_line(text: str, line: str) -> None:
    with pytest.raises(ManifestError) as error:
        parse(text, "m.yaml")
    assert str(error.value) == line


@pytest.mark.parametrize(
    "text", ["[1]", "just words", "a: [", "\x00", "a: !!python/object:os.system {}", "- a\nb: c"]
)
def test_what_is_no_mapping_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ManifestError) as error:
        parse(text, "m.yaml")
    assert str(error.value).startswith("m.yaml")
    assert "\n" not in str(error.value)


def test_set_replaces_adds_and_reaches_into_lists() -> None:
    source = parse("spec:\n  rollout: {groupSize: 8}\n  tasks:\n  - name: a\n", "m.yaml")
    set_value(source, "rollout.groupSize=4")
    set_value(source, "spec.tasks[0].agent.maxTurns=2")
    set_value(source, "metadata.name=other")
    set_value(source, "trainer.optimizer.learningRate=6e-4")
    assert source.data["spec"]["rollout"]["groupSize"] == 4
    assert source.data["spec"]["tasks"][0]["agent"] == {"maxTurns": 2}
    assert source.data["metadata"] == {"name": "other"}
    assert source.data["spec"]["trainer"]["optimizer"]["learningRate"] == 6e-4
    assert source.where(("spec", "rollout", "groupSize")) == "--set"


@pytest.mark.parametrize(
    "assignment", ["nothing", "=3", "spec.tasks[7].name=x", "spec.rollout.groupSize.deep=1", "a=[1"]
)
def test_a_malformed_set_is_one_line(assignment: str) -> None:
    source = parse("spec:\n  rollout: {groupSize: 8}\n  tasks:\n  - name: a\n", "m.yaml")
    with pytest.raises(ManifestError, match=r"^--set "):
        set_value(source, assignment)


def test_paths_are_written_as_people_write_them() -> None:
    assert dotted(("spec", "tasks", 0, "agent")) == "spec.tasks[0].agent"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: " + "[" * 5000, "m.yaml: nested too deeply"),
        ("a: 1\nb: " + "9" * 6000, "m.yaml:2: a whole number that cannot be read"),
        ("a: 0x" + "f" * 6000, "m.yaml:1: a whole number that cannot be read"),
        ("a: 0x_", "m.yaml:1: a whole number that cannot be read"),
        ("a:\n  <<: 3\n", "m.yaml:2: << merges a mapping, not 3"),
        ("a:\n  <<: [1]\n", "m.yaml:2: << merges a mapping, not 1"),
    ],
)
def test_what_breaks_a_yaml_reader_is_one_line(text: str, fault: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse(text, "m.yaml")
    assert str(caught.value).startswith(fault)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 6000, "0x_"])
def test_a_set_value_that_breaks_a_yaml_reader_is_one_line(value: str) -> None:
    with pytest.raises(ManifestError, match="not YAML"):
        set_value(parse("spec: {}\n", "m.yaml"), f"a={value}")
