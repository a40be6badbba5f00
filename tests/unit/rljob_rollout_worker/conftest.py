"""A whole worker over fakes: prepared rows on disk, broker, gateway and ledger in memory."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rljob.api.rljob_types import RLJob
from rljob.clock import SystemClock
from rljob.ids import PolicyVersion
from rljob.task_config import Message
from rljob.testing.chat import FakeGateway, call
from rljob.testing.ledger import FakeLedger
from rljob.testing.sandbox import FakeBroker
from rljob_rollout_worker.worker import Parts, Worker


class FakeEngine:
    """An engine agent that holds a version until the test says otherwise."""

    def __init__(self, version: PolicyVersion | None = PolicyVersion(1, 0)) -> None:
        self.current = version
        self.before_switch: Any = None
        self.problem = "it starts"

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def switch(self, version: PolicyVersion) -> None:
        """What the real agent does: ask, switch, name the new version."""
        if self.before_switch is not None:
            await self.before_switch(version)
        self.current = None
        await asyncio.sleep(0.001)
        self.current = version


class House:
    """A worker and the fakes around it."""

    def __init__(self, tmp_path: Path, **parts: Any) -> None:
        self.artifacts = tmp_path / "artifacts"
        self.engine: FakeEngine = parts.pop("engine", None) or FakeEngine()
        self.broker: FakeBroker = parts.pop("broker", None) or FakeBroker()
        self.ledger: Any = parts.pop("ledger", None) or FakeLedger(4)
        gateway = parts.pop("gateway", None)
        self.gateway = gateway or FakeGateway(
            solve, lambda: self.engine.current or PolicyVersion(0, 0)
        )
        self.job = manifest(**parts.pop("spec", {}))
        write_rows(self.artifacts, parts.pop("rows", 8), parts.pop("row", {}))
        self.parts = Parts(
            job=self.job,
            worker="worker-0",
            boot_id="0123456789abcdef",
            artifacts=self.artifacts,
            search_path=parts.pop("search_path", ""),
            ledger=self.ledger,
            broker=self.broker,
            gateway=self.gateway,
            chat=self.gateway.chat,
            engine=self.engine,
            clock=parts.pop("clock", None) or SystemClock(),
            **parts,
        )
        self.worker = Worker(self.parts)

    async def run(self, seconds: float = 100.0) -> None:
        """Run the worker to its end; afterwards nothing may be held."""
        async with asyncio.timeout(seconds):
            await self.worker.run()
        assert self.broker.claimed == {}
        assert self.gateway.open == {}
        assert self.worker.pipeline.attempts == []

    def completions(self) -> list[dict[str, Any]]:
        """The lines of the completion log."""
        path = self.artifacts / "completions" / "worker-0.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def house(tmp_path: Path) -> Callable[..., House]:
    """Makes a worker over fakes."""
    return lambda **parts: House(tmp_path, **parts)


def solve(messages: list[Message]) -> Message:
    """A model that looks once and then submits the right answer of its row."""
    if messages[-1]["role"] == "user":
        return call("bash", command="cat data/a.conf")
    return call("submit", answer=messages[-1]["content"].strip().rpartition("=")[2])


def write_rows(artifacts: Path, num_rows: int, row: dict[str, Any]) -> None:
    """Prepared rows whose answer stands in their file, in both splits."""
    folder = artifacts / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {"model_digest": "d", "seconds": 0.0, "from_cache": False}
    for split in ("train", "validation"):
        lines = "".join(json.dumps(one_row(index) | row) + "\n" for index in range(num_rows))
        (folder / f"{split}.jsonl").write_text(lines)
        digest = hashlib.sha256(lines.encode()).hexdigest()
        manifest[split] = {"rows": num_rows, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def one_row(index: int) -> dict[str, Any]:
    """Row `index`."""
    files = {"data/a.conf": f"key=value-{index}\n"}
    metadata = {"files": files, "answer": f"value-{index}", "kind": "lookup"}
    return {"task": "shell", "prompt": f"What is key {index}?", "metadata": metadata}


def manifest(**changes: Any) -> RLJob:
    """A manifest; `changes` are merged into its spec."""
    spec: dict[str, Any] = {
        "model": {"source": "recipe://quickstart", "maxContextLength": 512},
        "data": {
            "train": {"source": "recipe://quickstart", "seed": 7},
            "validation": {
                "source": "recipe://quickstart",
                "sampling": {"temperature": 0.5, "maxTokensPerTurn": 9},
            },
        },
        "tasks": [{"name": "shell", "type": "shell_files", "sandbox": {"pool": "default"}}],
        "rollout": {"groupSize": 1, "maxConcurrentEpisodes": 8},
        "trainer": {"steps": 4, "groupsPerStep": 2},
        "sandboxPools": [{"name": "default", "max": 64}],
    }
    merge(spec, changes)
    return RLJob.model_validate(
        {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "test"},
            "spec": spec,
        }
    )


def merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value
