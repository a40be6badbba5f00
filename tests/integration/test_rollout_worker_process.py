"""The worker as a process: how it ends, and what it says then."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob.ids import new_boot_id
from rljob.ledger import Ledger
from rljob.settings import Settings

MANIFEST: dict[str, Any] = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "process"},
    "spec": {
        "model": {"source": "recipe://quickstart"},
        "data": {"train": {"source": "recipe://quickstart"}},
        "tasks": [{"name": "shell", "type": "shell_files", "sandbox": {"pool": "default"}}],
        "trainer": {"steps": 1, "groupsPerStep": 1},
        "sandboxPools": [{"name": "default"}],
    },
}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(artifacts: Path, tmp_path: Path, valkey_url: str) -> Iterator[Start]:
    """Starts a worker whose engine, gateway and broker do not answer."""
    processes: list[subprocess.Popen[str]] = []

    def begin(task: str = "shell") -> subprocess.Popen[str]:
        prepare(artifacts, task)
        (tmp_path / "job.json").write_text(json.dumps(MANIFEST))
        settings = Settings(
            component="worker-0",
            job_file=str(tmp_path / "job.json"),
            artifacts=str(artifacts),
            work_dir=str(tmp_path / "work"),
            redis_url=valkey_url,
            engine_url="http://127.0.0.1:9",
            gateway_url="http://127.0.0.1:9",
            gateway_control_url="http://127.0.0.1:9",
            broker_url="http://127.0.0.1:9",
            token="only-for-tests",
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "rljob_rollout_worker.main"],
            env=os.environ | settings.to_env(),
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def prepare(artifacts: Path, task: str) -> None:
    folder = artifacts / "prepared"
    folder.mkdir(exist_ok=True)
    data = json.dumps({"task": task, "prompt": "?", "metadata": {"answer": "x"}}).encode() + b"\n"
    (folder / "train.jsonl").write_bytes(data)
    split = {"rows": 1, "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"train": split}))


def wait_for_line(process: "subprocess.Popen[str]", event: str) -> None:
    assert process.stderr
    for line in process.stderr:
        if f"event={event}" in line:
            return
    raise AssertionError(f"the worker ended without {event}")


def test_bad_input_is_one_line_and_exit_code_2(start: Start, artifacts: Path) -> None:
    _, errors = (process := start(task="other")).communicate(timeout=60)
    assert process.returncode == 2
    where = artifacts / "prepared" / "train.jsonl"
    last = errors.strip().splitlines()[-1]
    assert last == f"{where}:1: task: 'other' is not configured; add it to spec.tasks"


def test_told_to_stop_it_ends_well(start: Start) -> None:
    process = start()
    wait_for_line(process, "worker_started")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


async def test_fenced_by_another_of_its_name_it_ends_with_3(start: Start, valkey_url: str) -> None:
    process = start()
    wait_for_line(process, "worker_started")
    ledger = await Ledger.connect(valkey_url, "process")
    await ledger.open_worker("worker-0", new_boot_id())
    await ledger.aclose()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
