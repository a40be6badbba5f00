"""Every command that README and docs show is run here, or is a target that make knows; so is every piece of Python."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.cluster import wait_until
from tests.harness.fixtures import simulated_model
from tests.harness.simulated_job import Job

__all__ = ["simulated_model"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _commands(page: Path) -> list[str]:
    """Lines of an indented block that start with our programs, without what follows a gap."""
    lines = re.findall(r"^ {4}((?:rljob|make) .+)$", page.read_text(), re.MULTILINE)
    return [re.split(r" {2,}| +#", line)[0].strip() for line in lines]


def _python(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def _rljob(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return _run(["-m", "rljob.cli.main", *words], cwd)


def _run(
    words: list[str], cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**_env(cwd), **(env or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def _env(home: Path) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "RLJOB_SANDBOX_STATE": str(home / "sandboxes")}


@contextmanager
def _serving(words: list[str], home: Path) -> Iterator[dict[str, str]]:
    """`rljob sandbox serve` beside the commands, until what is Ctrl-C at a terminal; the variables of its clients."""
    command = [sys.executable, "-m", "rljob.cli.main", *words]
    told = home / "sandboxes" / "serve.json"
    with subprocess.Popen(command, cwd=home, env=_env(home)) as process:
        try:
            wait_until("the pool's address", lambda: told.exists() or process.poll(), 60)
            served = json.loads(told.read_text())
            yield {
                "RLJOB_SANDBOX_URL": served["url"],
                "RLJOB_SANDBOX_TOKEN": served["token"],
            }
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(30)
    assert code == 0
    assert not told.exists()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, simulated_model: Path) -> Path:
    """A folder with `rljob.yaml`, a job whose parts are simulated, and the examples where README has them."""
    folder = tmp_path_factory.mktemp("home")
    for mode in ("eval", "rollout"):
        Job(folder, simulated_model, mode, metadata__name=mode).manifest.rename(folder / mode)
    Job(folder, simulated_model, spec__trainer__steps=3)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def _fill(words: list[str], home: Path) -> list[str]:
    """Put a real episode where the page says ID, and a simulated manifest where it names one of real parts."""
    if "ID" in words:
        listed = _rljob(["trajectories"], home).stdout
        episode = re.search(r"[tv]\d+-\d+\.\d+", listed)
        assert episode, listed
        words = [episode[0] if word == "ID" else word for word in words]
    return [_SIMULATED.get(word, word) for word in words]


_SIMULATED = {
    "examples/quickstart/rljob.yaml": "rljob.yaml",
    "examples/eval/rljob.yaml": "eval",
    "examples/rollout/rljob.yaml": "rollout",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_rljob_command_of_a_page_works(page: Path, home: Path) -> None:
    commands = [
        command
        for command in _commands(page)
        if command.startswith("rljob ") and not command.startswith("rljob sandbox")
    ]
    starts_a_run = any(command.startswith("rljob run") for command in commands)
    if commands and not starts_a_run and not (home / "runs").exists():
        assert _rljob(["run", "rljob.yaml"], home).returncode == 0
    shutil.rmtree(home / "model", ignore_errors=True)
    for command in commands:
        done = _rljob(_fill(shlex.split(command)[1:], home), home)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_every_command_of_the_sandboxes_page_works_and_so_does_its_python(home: Path) -> None:
    page = ROOT / "docs" / "sandboxes.md"
    serve, *commands = (line for line in _commands(page) if line.startswith("rljob sandbox "))
    assert serve.startswith("rljob sandbox serve")
    claim = ""
    with _serving(shlex.split(serve)[1:], home) as served:
        for command in commands:
            words = [word.replace("CLAIM", claim) for word in shlex.split(command)[1:]]
            done = _rljob(words, home)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            claim = done.stdout.strip() if words[1] == "claim" else claim
        for text in _python(page):
            done = _run(["-c", text], home, served)
            assert done.returncode == 0, done.stderr


def test_no_page_has_python_or_sandbox_commands_that_nothing_runs() -> None:
    for page in PAGES:
        shown = _python(page) + [line for line in _commands(page) if "rljob sandbox" in line]
        assert not shown or page.name == "sandboxes.md", page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_of_a_page_exists(page: Path) -> None:
    for command in _commands(page):
        if command.startswith("make "):
            words = [word for word in shlex.split(command)[1:] if "=" not in word]
            plan = ["make", "--dry-run", "--no-print-directory", *words]
            done = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_readme_opens_with_the_two_commands() -> None:
    assert _commands(ROOT / "README.md")[:2] == ["make run", "make test"]
