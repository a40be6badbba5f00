"""What a fresh machine is told when it lacks something, and in which order things happen."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ["make", "bash", "sh", "grep", "sed", "expand", "id", "touch", "test", "rm", "env"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone, as far as make can see."""
    folder = tmp_path / "clone"
    for name in ("Makefile", "pyproject.toml", "requirements", "compat", ".ci"):
        source = ROOT / name
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    return folder


def make(
    clone: Path, *words: str, missing: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run make where only TOOLS and a few stand-ins can be found; `missing` lacks the named ones."""
    tools = clone.parent / "bin"
    tools.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    for name in {"bwrap", "id"} - set(missing):
        (tools / name).unlink(missing_ok=True)
        (tools / name).write_text("#!/bin/sh\necho 1000\n")
        (tools / name).chmod(0o755)
    env = {"PATH": str(tools), "HOME": str(clone.parent), "LC_ALL": "C"}
    return subprocess.run(
        [tools / "make", "--no-print-directory", *words],
        cwd=clone,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_names_what_there_is(clone: Path) -> None:
    told = make(clone, "help").stdout.split()
    assert {"run", "test", "bench", "lint", "types", "lock", "clean"} <= set(told)


def test_without_python_3_11_one_line_says_what_to_do(clone: Path) -> None:
    result = make(clone, "install", "PYTHON=")  # what the search gives where it finds none
    assert result.returncode != 0
    assert "Python 3.11 is missing: install it" in result.stderr
    assert not (clone / ".uv-venv").exists()


def test_without_bubblewrap_a_user_is_told_before_anything_is_installed(clone: Path) -> None:
    result = make(clone, "run", missing=("bwrap",))
    assert result.returncode != 0
    assert "bubblewrap is missing: sandboxes need it; install it" in result.stderr
    assert "Python" not in result.stderr


def test_the_fast_checks_come_before_the_tests(clone: Path) -> None:
    planned = make(clone, "-n", "test").stdout
    order = [
        planned.index(word)
        for word in ("tools.lock", "cpu.lock", "ruff", "lint-imports", "pyright")
    ]
    assert order == sorted(order)


def test_ci_runs_what_a_person_runs() -> None:
    script = ROOT / ".ci/run"
    assert script.read_text().splitlines()[-1] == "exec make test"
    assert os.access(script, os.X_OK)
