"""Nothing survives: not when a component is killed, nor its wrapper, nor the driver, nor both at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PARENT = """
import asyncio, os, sys
from pathlib import Path
from rljob_operator.drivers.process import Process

async def main():
    root, shimmed = Path(sys.argv[1]), sys.argv[2] == "shimmed"
    script = "setsid sleep 600 & sleep 600 & echo ready; wait"
    process = await Process.start(["sh", "-c", script], os.environ, root / "log", root, makes_namespaces=shimmed)
    (root / "wrapper").write_text(str(process._process.pid))
    await process.wait()

asyncio.run(main())
"""


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a parent that starts a contained shell, which starts two children, one in a session of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(how: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PARENT, str(tmp_path), how]
        started.append(subprocess.Popen(command, start_new_session=True))
        until(lambda: (tmp_path / "log").exists() and "ready" in (tmp_path / "log").read_text())
        until(lambda: (tmp_path / "wrapper").exists() and (tmp_path / "wrapper").read_text())
        assert len(inside(tmp_path)) >= 3
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(what: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def inside(folder: Path) -> list[int]:
    """Processes whose working folder is that of the component."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("how", "killed"),
    [
        ("namespace", "driver"),
        ("namespace", "wrapper"),
        ("namespace", "both"),
        ("shimmed", "driver"),
    ],
)
def test_a_sigkill_of_driver_or_wrapper_or_both_leaves_nothing(
    contained: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path, how: str, killed: str
) -> None:
    driver = contained(how)
    wrapper = int((tmp_path / "wrapper").read_text())
    for pid in {"driver": [driver.pid], "wrapper": [wrapper], "both": [driver.pid, wrapper]}[
        killed
    ]:
        with contextlib.suppress(ProcessLookupError):  # a wrapper dies with its driver
            os.kill(pid, signal.SIGKILL)
    until(lambda: inside(tmp_path) == [])


@pytest.mark.parametrize("killed", ["wrapper", "both"])
def test_a_pool_manager_whose_shim_is_killed_ends_with_its_sandboxes(
    contained: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path, killed: str
) -> None:
    driver = contained("shimmed")
    shim = int((tmp_path / "wrapper").read_text())
    command = int(Path(f"/proc/{shim}/task/{shim}/children").read_text().split()[0])
    if killed == "both":
        os.kill(driver.pid, signal.SIGKILL)
    os.kill(shim, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{command}").exists())
    for pid in inside(tmp_path):
        os.kill(pid, signal.SIGKILL)
