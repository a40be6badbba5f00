"""The command line's frame: fast help, one line per fault, suggestions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def rljob(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rljob.cli.main", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_lists_every_command_on_one_line_each() -> None:
    done = rljob("--help")
    assert done.returncode == 0
    listed = {
        line.split()[0] for line in done.stdout.split("Commands:")[1].splitlines() if line.strip()
    }
    assert listed == {
        "validate",
        "run",
        "apply",
        "plan",
        "doctor",
        "status",
        "logs",
        "stop",
        "trajectories",
        "export",
        "ledger",
        "sandbox",
    }
    assert "..." not in done.stdout.split("Commands:")[1]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom rljob.cli.main import build\nbuild()\n"
        "heavy = {'pydantic', 'rich', 'torch', 'redis', 'msgspec', 'httpx', 'yaml', 'kubernetes', 'kopf'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_validate_says_so_when_all_is_well() -> None:
    done = rljob("validate", "examples/quickstart/rljob.yaml")
    assert (done.returncode, done.stdout) == (
        0,
        "examples/quickstart/rljob.yaml: RLJob quickstart is valid\n",
    )


def test_validate_prints_every_fault_and_exits_with_two() -> None:
    done = rljob(
        "validate",
        "examples/quickstart/rljob.yaml",
        "--set",
        "trainer.steps=0",
        "--set",
        "model.x=1",
    )
    assert done.returncode == 2
    assert sorted(done.stderr.splitlines()) == [
        "--set: spec.model.x: unknown key; known here: source, revision, maxContextLength",
        "--set: spec.trainer.steps: 0 is out of range; it must be ≥ 1",
    ]


def test_an_unknown_command_is_suggested_its_neighbour() -> None:
    done = rljob("rnu")
    assert done.returncode == 2
    assert "run" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "command",
    [["run", "no.yaml"], ["plan", "no.yaml"], ["validate", "no.yaml"], ["doctor", "no.yaml"]],
)
def test_a_missing_manifest_is_one_line(command: list[str]) -> None:
    done = rljob(*command)
    assert (done.returncode, done.stderr) == (2, "no.yaml: there is no such file; check the path\n")


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["logs"],
        ["stop"],
        ["trajectories"],
        ["export", "--to", "x"],
        ["ledger", "audit"],
    ],
)
def test_where_there_are_no_runs_one_line_says_so(command: list[str], tmp_path: Path) -> None:
    done = rljob(*command, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "there are no runs here" in done.stderr


def test_plan_prints_components_and_what_a_step_moves() -> None:
    done = rljob("plan", "examples/quickstart/rljob.yaml")
    assert done.returncode == 0
    for name in (
        "store",
        "prepare",
        "sandbox-pool",
        "engine-0",
        "gateway-0",
        "worker-0",
        "trainer",
        "weight bytes",
    ):
        assert name in done.stdout


def test_output_that_nobody_takes_is_no_traceback() -> None:
    for redirection, code, said in ((">/dev/full", 2, "stdout: No space left"), (">&-", 0, "")):
        line = f'"{sys.executable}" -m rljob.cli.main --help {redirection}'
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") == (1 if said else 0)
