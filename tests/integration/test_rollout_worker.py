"""The rollout worker on a real ledger (Valkey): faults everywhere, a worker that dies, a store that is killed."""

import asyncio
import hashlib
import json
import random
from pathlib import Path
from typing import Any

from rljob.api.rljob_types import RLJob
from rljob.clock import SystemClock
from rljob.codec import unpack
from rljob.errors import EngineError, GatewayError, SandboxError
from rljob.ids import PolicyVersion, new_boot_id
from rljob.ledger import Ledger, LedgerConfig
from rljob.testing.chat import FakeGateway, call
from rljob.testing.sandbox import FakeBroker
from rljob_rollout_worker.completions import read_completions
from rljob_rollout_worker.worker import Parts, Worker

STEPS, GROUPS, GROUP_SIZE = 10, 4, 5


class Engine:
    """Holds whatever the trainer committed last."""

    problem = ""

    def __init__(self) -> None:
        self.current: PolicyVersion | None = None
        self.before_switch: Any = None

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def switch(self, version: PolicyVersion) -> None:
        if self.before_switch is not None:
            await self.before_switch(version)
        self.current = version


class Scene:
    """One job: ledger, rows, fakes around a worker, and a trainer that only takes and commits."""

    def __init__(self, artifacts: Path, job_name: str, url: str, **rollout: Any) -> None:
        self.artifacts, self.url, self.engine = artifacts, url, Engine()
        self.job = manifest(job_name, rollout)
        self.broker = FakeBroker(12, fault=self.fault)
        self.gateway = FakeGateway(
            solve, lambda: self.engine.current or PolicyVersion(0, 0), fault=self.fault
        )
        self.random, self.failure_rate = random.Random(1), 0.0
        self.trained: dict[str, str] = {}
        self.staleness: list[int] = []
        prepare(artifacts)

    async def fault(self, operation: str) -> None:
        await asyncio.sleep(self.random.random() * 0.01)
        if self.random.random() < self.failure_rate:
            kinds = {"turn": EngineError, "open": GatewayError, "close": GatewayError}
            raise kinds.get(operation, SandboxError)(f"injected into {operation}")

    async def ledger(self) -> Ledger:
        ledger = await Ledger.connect(self.url, self.job.name)
        data = json.loads((self.artifacts / "prepared/manifest.json").read_text())["train"]
        await ledger.initialise(LedgerConfig.from_job(self.job, data["rows"], data["sha256"]))
        return ledger

    async def work(self) -> None:
        """One life of the worker."""
        ledger, boot_id = await self.ledger(), new_boot_id()
        try:
            await ledger.open_worker("worker-0", boot_id)
            parts = Parts(
                job=self.job,
                worker="worker-0",
                boot_id=boot_id,
                artifacts=self.artifacts,
                search_path="",
                ledger=ledger,
                broker=self.broker,
                gateway=self.gateway,
                chat=self.gateway.chat,
                engine=self.engine,
                clock=SystemClock(),
            )
            await Worker(parts).run()
        finally:
            await ledger.aclose()

    async def train(self) -> None:
        """Take, archive, commit, switch: what a trainer and an engine agent do, without arithmetic."""
        ledger = await self.ledger()
        incarnation = await ledger.open_trainer(new_boot_id())
        await self.publish(ledger, incarnation, 0)
        for step in range(1, STEPS + 1):
            while (reply := await ledger.take(incarnation, step, GROUPS)).groups is None:
                await asyncio.sleep(0.02)
            for group in reply.groups:
                for payload in group.payloads:
                    self.record(step, payload)
            await ledger.archived(incarnation, step)
            await self.publish(ledger, incarnation, step)
        await ledger.finish(incarnation, "Succeeded")
        await ledger.aclose()

    async def publish(self, ledger: Ledger, incarnation: int, step: int) -> None:
        version = PolicyVersion(incarnation, step)
        await ledger.commit(incarnation, step, version, f"digest-{step}")
        await self.engine.switch(version)

    def record(self, step: int, payload: bytes) -> None:
        trajectory = unpack(payload)
        key = f"{trajectory.row_index}.{trajectory.episode.rpartition('.')[2]}"
        assert key not in self.trained, "trained twice"
        self.trained[key] = hashlib.sha256(payload).hexdigest()
        self.staleness.append(step - 1 - trajectory.version_range[0])

    def assert_all_trained(self) -> None:
        assert len(self.trained) == STEPS * GROUPS * GROUP_SIZE
        assert self.broker.claimed == {}
        assert self.gateway.open == {}
        lines = read_completions(self.artifacts / "completions" / "worker-0.jsonl")
        assert set(self.trained.values()) <= {
            line.sha256 for line in lines if line.answer == "sent"
        }


async def test_every_episode_of_a_job_is_trained_once_through_faults(
    artifacts: Path, job_name: str, valkey_url: str
) -> None:
    scene = Scene(artifacts, job_name, valkey_url, maxAttempts=20, retryBackoffSeconds=0.01)
    scene.failure_rate = 0.03
    async with asyncio.timeout(90):
        await asyncio.gather(scene.work(), scene.train())
    scene.assert_all_trained()
    assert max(scene.staleness) <= 2
    lines = read_completions(artifacts / "completions" / "worker-0.jsonl")
    assert set(scene.trained.values()) <= {x.sha256 for x in lines if x.answer == "accepted"}


async def test_a_worker_that_dies_costs_only_what_it_was_running(
    artifacts: Path, job_name: str, valkey_url: str
) -> None:
    scene = Scene(artifacts, job_name, valkey_url)
    async with asyncio.timeout(90):
        training = asyncio.create_task(scene.train())
        for _ in range(4):
            life = asyncio.create_task(scene.work())
            await asyncio.sleep(0.4)
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
        await asyncio.gather(scene.work(), training)
    scene.assert_all_trained()


async def test_a_store_that_is_killed_costs_nothing(
    artifacts: Path, job_name: str, own_valkey: Any
) -> None:
    scene = Scene(artifacts, job_name, own_valkey.url)
    async with asyncio.timeout(100):
        running = asyncio.gather(scene.work(), scene.train())
        for _ in range(3):
            await asyncio.sleep(0.5)
            await asyncio.to_thread(own_valkey.kill)
            await asyncio.sleep(0.7)
            await asyncio.to_thread(own_valkey.start)
        await running
    scene.assert_all_trained()


async def test_in_sync_every_trained_token_has_the_version_being_trained(
    artifacts: Path, job_name: str, valkey_url: str
) -> None:
    scene = Scene(artifacts, job_name, valkey_url, schedule="sync")
    async with asyncio.timeout(90):
        await asyncio.gather(scene.work(), scene.train())
    scene.assert_all_trained()
    assert set(scene.staleness) == {0}


async def test_one_step_trains_batches_of_one_version_one_step_old(
    artifacts: Path, job_name: str, valkey_url: str
) -> None:
    scene = Scene(artifacts, job_name, valkey_url, schedule="one_step")
    async with asyncio.timeout(90):
        await asyncio.gather(scene.work(), scene.train())
    scene.assert_all_trained()
    per_step = [set(scene.staleness[i : i + 20]) for i in range(0, len(scene.staleness), 20)]
    assert per_step == [{0}] + [{1}] * (STEPS - 1)


def solve(messages: Any) -> Any:
    """Looks once, then submits."""
    if messages[-1]["role"] == "user":
        return call("bash", command="ls")
    return call("submit", answer="right")


def prepare(artifacts: Path) -> None:
    folder = artifacts / "prepared"
    folder.mkdir()
    row = {"task": "shell", "prompt": "?", "metadata": {"answer": "right", "files": {"a": "b"}}}
    data = b"".join(json.dumps(row | {"prompt": f"{i}?"}).encode() + b"\n" for i in range(15))
    (folder / "train.jsonl").write_bytes(data)
    split = {"rows": 15, "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"train": split}))


def manifest(name: str, rollout: dict[str, Any]) -> RLJob:
    spec = {
        "model": {"source": "recipe://quickstart"},
        "data": {"train": {"source": "recipe://quickstart"}},
        "tasks": [{"name": "shell", "type": "shell_files", "sandbox": {"pool": "default"}}],
        "rollout": {"groupSize": GROUP_SIZE, "maxConcurrentEpisodes": 30} | rollout,
        "trainer": {"steps": STEPS, "groupsPerStep": GROUPS},
        "sandboxPools": [{"name": "default", "max": 64}],
    }
    head = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}}
    return RLJob.model_validate(head | {"spec": spec})
