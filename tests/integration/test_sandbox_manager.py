"""The pool manager as a process: how it starts, refuses to start, ends, and is killed."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from rljob.errors import SandboxError
from rljob.sandbox_client import SandboxClient
from rljob.settings import Settings

TOKEN = "the-token"
ENDED_SECONDS = 20.0


def manifest(**pool: object) -> dict[str, object]:
    """A manifest with one pool."""
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"source": "file:///model"},
            "data": {"train": {"source": "file:///rows.jsonl"}},
            "tasks": [{"name": "t", "type": "shell_files", "sandbox": {"pool": "default"}}],
            "trainer": {"steps": 1, "groupsPerStep": 1},
            "sandboxPools": [{"name": "default", "warm": 2, "max": 4, **pool}],
        },
    }


@pytest.fixture
def settings(tmp_path: Path, free_port: Callable[[], int]) -> Settings:
    (tmp_path / "job.json").write_text(json.dumps(manifest()))
    return Settings(
        component="sandbox-pool",
        job_file=str(tmp_path / "job.json"),
        artifacts=str(tmp_path),
        work_dir=str(tmp_path / "work"),
        metrics_port=free_port(),
        broker_url=f"http://127.0.0.1:{free_port()}",
        token=TOKEN,
        pool_key="the-pool-key",
    )


@pytest.fixture
def start(settings: Settings) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the pool manager; whatever still runs ends with the test."""
    running: list[subprocess.Popen[str]] = []

    def start(**env: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "rljob_sandbox_pool.main"]
        everything = {**os.environ, **settings.to_env(), **env}
        running.append(subprocess.Popen(argv, env=everything, stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[SandboxClient]:
    client = SandboxClient(settings.broker_url, TOKEN)
    yield client
    await client.aclose()


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        todo += children.get(todo.pop(), [])
        found |= set(todo)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that run; a zombie does not."""
    found = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.add(pid)
        except OSError:
            continue
    return found


async def assert_ended(pids: set[int]) -> None:
    """None of them is left before the deadline."""
    deadline = time.monotonic() + ENDED_SECONDS
    while left := alive(pids):
        assert time.monotonic() < deadline, f"still running: {left}"
        await asyncio.sleep(0.05)


async def test_sigterm_ends_every_sandbox_and_is_success(start, client: SandboxClient) -> None:
    manager = start()
    box = await client.acquire("default", timeout=60)
    await box.exec("(setsid sleep 1000 &)")
    sandboxes = descendants(manager.pid)
    assert len(sandboxes) >= 3
    manager.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(manager.wait, 30) == 0
    assert not alive(sandboxes)
    with pytest.raises(SandboxError):
        await box.exec("true")
    await box.release()


async def test_killed_it_takes_every_sandbox_with_it_and_the_next_one_serves(
    start, client: SandboxClient
) -> None:
    manager = start()
    box = await client.acquire("default", timeout=60)
    await box.exec("(setsid sleep 1000 &)")
    running = asyncio.create_task(box.exec("sleep 1000", timeout=1000))
    await asyncio.sleep(0.2)
    sandboxes = descendants(manager.pid)
    manager.kill()
    with pytest.raises(SandboxError):
        await running
    await assert_ended(sandboxes)
    waiting = asyncio.create_task(client.acquire("default", timeout=60))
    await asyncio.sleep(0.2)
    start()
    other = await waiting
    assert (await other.exec("echo again")).stdout == "again\n"
    await other.release()
    await box.release()


@pytest.mark.parametrize("after_seconds", [0.0, 0.01, 0.03, 0.1])
async def test_killed_while_sandboxes_start_it_leaves_none(start, after_seconds: float) -> None:
    manager = start()
    deadline = time.monotonic() + 60
    while not descendants(manager.pid):
        assert time.monotonic() < deadline
    await asyncio.sleep(after_seconds)
    manager.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.05)
    starting = descendants(manager.pid)
    manager.kill()
    await assert_ended(starting)


async def test_it_tells_its_health_and_its_metrics(
    start, settings: Settings, client: SandboxClient
) -> None:
    start()
    async with client.claim("default", timeout=60) as box:
        await box.exec("true")

    def get(path: str) -> str:
        return (
            urllib.request.urlopen(f"http://127.0.0.1:{settings.metrics_port}{path}", timeout=10)
            .read()
            .decode()
        )

    assert json.loads(await asyncio.to_thread(get, "/healthz"))["ok"]
    metrics = await asyncio.to_thread(get, "/metrics")
    assert 'rljob_sandbox_claims_total{pool="default",result="granted"} 1.0' in metrics


def refused(process: subprocess.Popen[str]) -> str:
    """The one line of a start that was refused."""
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2, stderr
    (line,) = [line for line in stderr.splitlines() if "level=" not in line]
    return line


def test_without_bubblewrap_it_says_what_to_install(start, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    line = refused(start(PATH=str(empty)))
    assert line.startswith("bubblewrap: bwrap is not installed; install it")


def test_where_namespaces_are_forbidden_it_says_what_to_allow(start, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    line = refused(start(PATH=f"{fake.parent}:{os.environ['PATH']}"))
    assert line.startswith(
        "user namespaces: bubblewrap cannot isolate here (bwrap: No permissions to create new"
    )
    assert "sysctl user.max_user_namespaces" in line


def test_a_port_in_use_is_named(start, settings: Settings) -> None:
    import socket

    port = int(settings.broker_url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        line = refused(start())
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in line


async def test_a_simulated_pool_needs_no_bubblewrap(
    start, settings: Settings, client: SandboxClient
) -> None:
    Path(settings.job_file).write_text(json.dumps(manifest(runtime="simulated")))
    start(PATH="/nonexistent")
    async with client.claim("default", timeout=60) as box:
        assert (await box.exec("echo simulated")).stdout == "simulated\n"


AS_AN_ORDINARY_USER = """
import asyncio, sys, tempfile
from pathlib import Path
from rljob.api.rljob_types import SandboxPool
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool.manager import Manager
from rljob_sandbox_pool.runtimes.bubblewrap import BubblewrapRuntime

FORKS = '''
import os, time
made = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        made += 1
except OSError:
    pass
print(made, flush=True)
'''

async def main(work):
    pool = SandboxPool.model_validate({"name": "p", "warm": 3, "max": 3, "limits": {"pids": 48}})
    runtime = BubblewrapRuntime(Path(work))
    manager = Manager([pool], {"bubblewrap": runtime}, token="t", pool_key="k")
    client = SandboxClient(await manager.start("127.0.0.1", 0), "t")
    boxes = [await client.acquire("p", timeout=30) for _ in range(3)]
    results = await asyncio.gather(*(box.exec([sys.executable, "-c", FORKS]) for box in boxes))
    print(runtime.limits()["user"], runtime.limits()["pids"], *(int(result.stdout) for result in results), sep=",")
    for box in boxes:
        await box.release()
    await client.aclose()
    await manager.close()

with tempfile.TemporaryDirectory() as work:
    asyncio.run(main(work))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_users_sandboxes_each_have_their_own_process_limit() -> None:
    python = shutil.which(
        f"python{sys.version_info.major}.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin"
    )
    if python is None or not shutil.which("setpriv"):
        pytest.skip("this machine has no interpreter that an ordinary user can read")
    argv = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        python,
        "-c",
        AS_AN_ORDINARY_USER,
    ]
    paths = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        argv, env={"PYTHONPATH": paths, "PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("an ordinary user cannot read this checkout")
    assert done.returncode == 0, done.stderr
    user, pids, *numbers = done.stdout.strip().split(",")
    assert (user, pids) == ("user namespace", "rlimit")
    assert all(30 < int(number) <= 48 for number in numbers)
