"""A driver over tiny fake components: real processes, real containment, a ledger that a test writes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob.api.rljob_types import RLJob
from rljob.clock import SystemClock
from rljob.ids import PolicyVersion
from rljob.ledger import LedgerSnapshot, Policy
from rljob_operator.drivers.folder import EventLog, RunFolder
from rljob_operator.drivers.local import LocalDriver
from rljob_operator.drivers.watch import Watch
from rljob_operator.drivers.wiring import Wiring
from rljob_operator.render.component import Component, Kind, Port, Probe, Resources
from rljob_operator.view.facts import Facts

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


def manifest(**spec: Any) -> dict[str, Any]:
    """A small valid manifest, everything simulated; keyword arguments replace parts of its spec."""
    base: dict[str, Any] = {
        "model": {"source": "recipe://quickstart", "maxContextLength": 1024},
        "data": {"train": {"source": "recipe://quickstart"}},
        "tasks": [{"name": "shell", "type": "shell_files", "sandbox": {"pool": "shells"}}],
        "rollout": {
            "groupSize": 4,
            "engine": {"kind": "simulated"},
            "sampling": {"maxTokensPerTurn": 56},
        },
        "trainer": {"backend": "simulated", "steps": 3, "groupsPerStep": 2},
        "sandboxPools": [{"name": "shells", "runtime": "simulated"}],
    }
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "test"},
        "spec": base | spec,
    }


def make_job(**spec: Any) -> RLJob:
    """The job of `manifest`."""
    return RLJob.model_validate(manifest(**spec))


def component(name: str, script: str, **more: Any) -> Component:
    """A component that runs a Python script."""
    fields: dict[str, Any] = {"role": name, "kind": Kind.SERVICE, "resources": Resources(0.1, 16)}
    return Component(name=name, command=("python", "-c", script), **(fields | more))


def server(name: str, script: str = SERVER, **more: Any) -> Component:
    """A component that answers its probe."""
    fields: dict[str, Any] = {
        "env": {"PORT": f"${{port:{name}/http}}"},
        "ports": (Port("http"),),
        "probe": Probe("http", "http", "/healthz", deadline_seconds=30),
    }
    return component(name, script, **(fields | more))


def snapshot(**fields: Any) -> LedgerSnapshot:
    """A ledger that has seen little."""
    base: dict[str, Any] = {
        "step": 0,
        "steps": 3,
        "incarnation": 1,
        "policy": Policy(version=PolicyVersion(1, 0)),
        "phase": None,
        "message": "",
        "counts": {"running": 1, "completed": 2, "failed": 0},
        "reports": {},
        "reward_mean": None,
        "reward_recent": None,
        "turns_recent": None,
        "validation": {},
        "staleness": {},
        "progress": 1,
        "stream_entries": 0,
        "stream_pending": 0,
        "memory_bytes": 0,
        "max_memory_bytes": 0,
    }
    return LedgerSnapshot(**(base | fields))


class FakeObserver:
    """A ledger that says what the test put there."""

    def __init__(self) -> None:
        self.now: LedgerSnapshot | None = snapshot()

    async def snapshot(self) -> LedgerSnapshot | None:
        return self.now

    async def outcome(self, deadline_seconds: float) -> tuple[str | None, str]:
        return (self.now.phase, self.now.message) if self.now else (None, "")

    def finish(self, phase: str, message: str = "") -> None:
        self.now = snapshot(phase=phase, message=message)


class FakeView:
    """Remembers what was shown."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.facts: Facts | None = None

    def update(self, facts: Facts) -> None:
        self.facts = facts

    def note(self, text: str) -> None:
        self.notes.append(text)


class Harness:
    """A driver in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.observer, self.view, self.audits = FakeObserver(), FakeView(), 0
        self.folder = RunFolder(root / "runs" / "test")
        self.folder.claim()
        self.folder.lay()
        self.events = EventLog(self.folder)
        self.clock = SystemClock()

    def driver(self, *plan: Component, **spec: Any) -> LocalDriver:
        job = make_job(**spec)
        root = self.folder.root
        paths = {"work": root / "work", "artifacts": root / "artifacts", "store": root / "store"}
        secrets = {"token": "t", "pool_key": "p", "redis": "r"}
        watch = Watch(
            job,
            self.folder,
            self.events,
            root / "artifacts",
            observer=self.observer,
            view=self.view,
            clock=self.clock,
            started_at=0,
        )

        async def count_audits() -> None:
            self.audits += 1

        return LocalDriver(
            job,
            plan,
            Wiring(plan, paths, secrets, {}),
            self.folder,
            self.events,
            observer=self.observer,
            watch=watch,
            before_store_ends=count_audits,
            clock=self.clock,
        )

    def log(self, name: str) -> str:
        return self.folder.log(name).read_text()

    def happened(self) -> str:
        return (self.folder.root / "events.jsonl").read_text()

    async def until(self, what: Callable[[], object], seconds: float = 20) -> None:
        """Wait for something to become true."""
        for _ in range(int(seconds / 0.02)):
            if what():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("did not happen in time")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.folder.release()
    assert left_over(str(tmp_path)) == []


def left_over(mark: str) -> list[str]:
    """Processes whose environment or working folder names `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            if (
                str((entry / "cwd").readlink()).startswith(mark)
                or mark.encode() in (entry / "environ").read_bytes()
            ):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
