"""Shells of the guest where the image has no bash: dash, and busybox where this machine has it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_sandbox_pool.runtimes import namespace
from tests.harness import guest_shell

SESSION: list[tuple[str, float, str | None, int]] = [
    ("cd /usr; X=1; f() { echo f$1; }; false", 20, "", 1),
    ("echo $?; pwd; echo $X; f 2", 20, "1\n/usr\n1\nf2\n", 0),
    ("echo out; echo err >&2", 20, "out\nerr\n", 0),
    ("echo 'unbalanced", 20, None, 2),
    ("if", 20, None, 2),
    ("echo ${nope:?}", 20, None, 2),
    ("set -u; echo $nope", 20, None, 2),
    ("set +u; echo here", 20, "here\n", 0),
    ("exec 7>&1 8</dev/null 9>/dev/null; echo numbers", 20, "numbers\n", 0),
    ("exec 1>&- 2>&-", 20, "", 0),
    ("sleep 77 & echo job", 20, None, 0),
    ("echo begun; sleep 88; echo never", 0.3, "begun\n", 124),
    ("while :; do :; done", 0.3, "", 124),
    ("while :; do sleep 0.01; done; echo never", 0.3, "", 124),
    ("read x", 0.3, "", 124),
    ("cat | cat", 0.3, "", 124),
    ("sh -c 'trap : INT; sleep 88; sleep 99'", 0.2, None, 124),
    ("jobs >/dev/null; kill %1; echo $X", 20, None, 0),
    ("printf 'a\\nb'", 20, "a\nb", 0),
]


@pytest.fixture(params=["bash", "dash", "busybox"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    found = shutil.which(request.param)
    if found is None:
        pytest.skip(f"this machine has no {request.param}")
    link = tmp_path / ("bash" if request.param == "bash" else "sh")
    link.symlink_to(found)
    return link


def _talk(shell: Path, kind: str, session: list[tuple[str, float]]) -> list[dict[str, Any]]:
    bwrap = [namespace.find_bwrap(), "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid"]
    driver = [sys.executable, str(Path(guest_shell.__file__)), str(shell), kind]
    lines = [json.dumps({"command": command, "timeout": limit}) for command, limit in session]
    ran = subprocess.run(
        [*bwrap, "--as-pid-1", "--die-with-parent", *driver],
        input="\n".join(lines),
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("kind", ["pipes", "pty"])
def test_every_shell_keeps_its_state_through_mistakes_and_interrupts(
    shell: Path, kind: str
) -> None:
    results = _talk(shell, kind, [(command, limit) for command, limit, _, _ in SESSION])
    for (command, _, output, code), result in zip(SESSION, results, strict=True):
        assert result["alive"], command
        is_code = result["exit_code"] == code or (code == 2 and result["exit_code"] == 1)
        assert is_code, (command, result)
        assert output is None or result["output"] == output, command


@pytest.mark.parametrize("kind", ["pipes", "pty"])
def test_every_shell_runs_many_commands(shell: Path, kind: str) -> None:
    commands = [f"echo {n}; echo e{n} >&2" for n in range(200)]
    results = _talk(shell, kind, [(command, 20) for command in commands])
    assert [result["output"] for result in results] == [f"{n}\ne{n}\n" for n in range(200)]


@pytest.mark.parametrize("kind", ["pipes", "pty"])
def test_a_loop_is_interrupted_whatever_it_does_in_that_moment(shell: Path, kind: str) -> None:
    loops = [
        "while :; do /bin/true; done",
        "f() { while :; do /bin/true | cat; done; }; while :; do f; done",
        "while :; do x=$(echo x); done",
    ]
    session = [(loop, 0.02 + 0.003 * n) for n in range(8) for loop in loops]
    session = [
        each
        for pair in zip(session, [("echo next", 20.0)] * len(session), strict=True)
        for each in pair
    ]
    results = _talk(shell, kind, session)
    assert len(results) == len(session)
    assert all(result["alive"] for result in results)
    assert [result["output"] for result in results[1::2]] == ["next\n"] * 24


def test_a_program_in_the_shells_place_has_its_time(shell: Path) -> None:
    line = "exec sh -c 'sleep 2.5; echo done; exit 3'"
    (result,) = _talk(shell, "pipes", [(line, 20)])
    assert (result["output"], result["exit_code"], result["alive"]) == ("done\n", 3, False)
