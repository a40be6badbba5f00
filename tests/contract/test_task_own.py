"""examples/own_task: a user's own task, reward, tool and agent, run over a simulated engine and sandbox."""

import asyncio
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob.api.load import load
from rljob.clock import SystemClock
from rljob.codec import unpack
from rljob.ids import PolicyVersion
from rljob.sandbox import ExecResult
from rljob.task_config import Agent, Task, Tool
from rljob.testing.chat import FakeGateway, call
from rljob.testing.ledger import FakeLedger
from rljob.testing.sandbox import FakeBroker, FakeSandbox
from rljob_rollout_worker.plugins import benches
from rljob_rollout_worker.worker import Parts, Worker

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task"


class Engine:
    current = PolicyVersion(1, 0)
    before_switch = None
    problem = ""

    async def run(self) -> None:
        await asyncio.Event().wait()


def grep(box: FakeSandbox, line: str) -> ExecResult:
    """What `grep -i -e ^COUNTRY= atlas.txt` finds."""
    country = line.split("^")[1].split("=", maxsplit=1)[0].lower()
    hits = [
        row
        for row in box.files["atlas.txt"].decode().splitlines()
        if row.lower().startswith(country)
    ]
    return ExecResult(exit_code=not hits, stdout="".join(f"{hit}\n" for hit in hits), stderr="")


def traveller(messages: Any) -> Any:
    """Looks up the wrong country, then the right one, then submits it in lower case now and then."""
    country = messages[0]["content"].split("?")[0].split()[-1]
    match messages[-1]["role"], messages[-1]["content"]:
        case "user", _:
            return call("look_up", country="Atlantis")
        case _, text if text.startswith("error"):
            return call("look_up", country=country)
        case _, text:
            capital = text.strip().split("=")[1]
            return call("submit", answer=capital.lower() if country < "G" else capital)


def prepare(artifacts: Path) -> None:
    folder = artifacts / "prepared"
    folder.mkdir()
    splits = {}
    for split in ("train", "validation"):
        data = (EXAMPLE / f"{split}.jsonl").read_bytes()
        (folder / f"{split}.jsonl").write_bytes(data)
        splits[split] = {"rows": len(data.splitlines()), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(splits))


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example; what is put on the path for it is taken off again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "atlas", raising=False)
    return shutil.copytree(EXAMPLE, tmp_path / "own_task")


async def test_the_example_runs(example: Path, artifacts: Path) -> None:
    job = load(example / "rljob.yaml")
    prepare(artifacts)
    ledger, broker, gateway = FakeLedger(16), FakeBroker(shell=grep), FakeGateway(traveller)
    parts = Parts(
        job=job,
        worker="worker-0",
        boot_id="b" * 16,
        artifacts=artifacts,
        search_path=str(example),
        ledger=ledger,
        broker=broker,
        gateway=gateway,
        chat=gateway.chat,
        engine=Engine(),
        clock=SystemClock(),
    )
    await Worker(parts).run()
    records = [unpack(payload) for payload, _ in ledger.completed.values()]
    assert len(records) == 16
    assert {record.outcome for record in records} == {"completed"}
    assert {record.reward for record in records} == {1.0, 0.25}
    assert {record.reward_parts["found"] for record in records} == {1.0}
    assert {record.turns for record in records} == {3}


def test_each_part_keeps_its_contract(example: Path) -> None:
    bench = benches(load(example / "rljob.yaml"), str(example))["atlas"]
    assert isinstance(bench.task, Task)
    assert isinstance(bench.agent(), Agent)
    assert all(isinstance(tool, Tool) for tool in bench.tools())


def test_it_is_as_short_as_promised() -> None:
    assert len((EXAMPLE / "atlas.py").read_text().splitlines()) < 40
