"""A pool manager of this machine as its own process, for the benchmarks of sandboxes, and what is read off it.

here: clients ──► pool manager ──► bwrap ─► guest          its /metrics, its memory and descriptors: from outside
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from rljob.sandbox_client import SandboxClient
from rljob.settings import Settings

SEED = 7
POOL = "bench"
START_SECONDS, STOP_SECONDS, WARM_SECONDS = 60.0, 60.0, 240.0


class LocalPool(NamedTuple):
    """A running pool manager with one pool, `POOL`."""

    url: str
    token: str
    pid: int
    metrics_port: int

    def client(self) -> SandboxClient:
        """A client; the caller closes it."""
        return SandboxClient(self.url, self.token)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=20) as answer:
            return sum_of(answer.read().decode(), name, labels)

    def guests(self) -> list[int]:
        """The pids of the guests of its sandboxes."""
        return [guest for bwrap in children_of(self.pid) for guest in children_of(bwrap)]


def sum_of(text: str, name: str, labels: Mapping[str, str]) -> float:
    """Of the samples of this name in the text of /metrics, those with these labels among theirs."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@contextmanager
def local_pool(*, ready: int = 0, **spec: Any) -> Iterator[LocalPool]:
    """A pool manager until the end of the block.

    Args:
        ready: Sandboxes that are ready before the block begins.
        spec: Of its pool, in the words of a manifest.
    """
    with tempfile.TemporaryDirectory(prefix="rljob-benchmark-") as folder:
        home = Path(folder)
        (home / "job.json").write_text(json.dumps(_job(spec)))
        settings = Settings(
            component="sandbox-pool",
            job_file=str(home / "job.json"),
            artifacts=folder,
            work_dir=str(home / "work"),
            metrics_port=free_port(),
            broker_url=f"http://127.0.0.1:{free_port()}",
            token=secrets.token_hex(16),
            pool_key=secrets.token_hex(16),
        )
        argv = [sys.executable, "-m", "rljob_sandbox_pool.main"]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(argv, env=os.environ | settings.to_env(), stderr=log)
        try:
            pool = LocalPool(
                settings.broker_url, settings.token, process.pid, settings.metrics_port
            )
            _wait_until_up(pool, process, home / "log", ready)
            yield pool
        finally:
            _stop(process)


def _job(pool: Mapping[str, Any]) -> dict[str, Any]:
    task = {"name": "t", "type": "shell_files", "sandbox": {"pool": POOL}}
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"source": "file:///model"},
            "data": {"train": {"source": "file:///rows.jsonl"}},
            "tasks": [task],
            "trainer": {"steps": 1, "groupsPerStep": 1},
            "sandboxPools": [{"name": POOL, **pool}],
        },
    }


def _wait_until_up(
    pool: LocalPool, process: subprocess.Popen[bytes], log: Path, ready: int
) -> None:
    def num_ready() -> float:
        if process.poll() is not None:
            raise RuntimeError(f"the pool manager ended: {log.read_text()[-2000:]}")
        try:
            return pool.metric("rljob_sandboxes", state="ready")
        except (URLError, ConnectionError):
            return -1

    wait_until("the pool manager answers", lambda: num_ready() >= 0, START_SECONDS)
    wait_until(f"{ready} sandboxes are ready", lambda: num_ready() >= ready, WARM_SECONDS)


def wait_until(what: str, holds: Callable[[], bool], seconds: float) -> None:
    """Ask until it holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children_of(pid: int) -> list[int]:
    """Processes that another has started and not yet waited for."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # it has ended
        return []
    return [int(child) for child in text.split()]


def num_descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
