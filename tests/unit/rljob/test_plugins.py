"""Plugins by name or import path, and what a wrong one is told."""

from pathlib import Path

import pytest

from rljob.errors import ManifestError
from rljob.plugins import Group, construct, names, resolve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_plugin_under_test.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "broken_plugin_under_test.py").write_text("1 / 0\n")
    (tmp_path / "needy_plugin_under_test.py").write_text("import no_such_module\n")
    return str(tmp_path)


def test_built_in_names_are_entry_points() -> None:
    assert "shell_files" in names("rljob.tasks")
    assert "react" in names("rljob.agents")
    assert {"bash", "submit"} <= set(names("rljob.tools"))
    assert resolve("rljob.tools", "submit").name == "submit"


def test_an_import_path_is_looked_up_in_the_folder_of_the_manifest(folder: str) -> None:
    assert resolve("rljob.tasks", "own_plugin_under_test:Mine", folder).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reakt", "spec.x: unknown agent 'reakt'; did you mean react?"),
        (
            "zzz",
            "spec.x: unknown agent 'zzz'; known: react; or give an import path module:attribute",
        ),
        (
            "own_plugin_under_test:Mein",
            "spec.x: own_plugin_under_test has no 'Mein'; did you mean Mine?",
        ),
        ("no_such:X", "spec.x: agent 'no_such:X': no module 'no_such'; looked in "),
        ("broken_plugin_under_test:X", "does not import: ZeroDivisionError: division by zero"),
        ("needy_plugin_under_test:X", "no module 'no_such_module'"),
    ],
)
def test_a_wrong_name_is_told_what_would_be_right(folder: str, name: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        resolve("rljob.agents", name, folder, where="spec.x")
    assert message in str(caught.value)


def test_options_that_a_constructor_refuses_are_the_manifests_fault() -> None:
    with pytest.raises(ManifestError, match=r"spec\.x\.options: dict refuses its options"):
        construct(dict.fromkeys, "dict", {"a": 1}, where="spec.x.options")


@pytest.mark.parametrize("group", ["rljob.rewards", "rljob.tasks", "rljob.agents", "rljob.tools"])
def test_what_cannot_be_called_is_no_plugin(group: Group) -> None:
    with pytest.raises(ManifestError) as caught:
        resolve(group, "math:pi", where="spec.tasks[0].reward.name")
    line = str(caught.value)
    assert line.startswith("spec.tasks[0].reward.name: ")
    assert "'math:pi' is a float, not a class or function" in line
