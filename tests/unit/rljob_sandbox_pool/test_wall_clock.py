"""The wall clock may step: nothing of a sandbox's life depends on it."""

import ast
import itertools
import time
from pathlib import Path

import pytest

import rljob
import rljob_sandbox_pool
from rljob.api.rljob_types import SandboxPool
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool.manager import Manager
from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime

ROOM = Path(rljob_sandbox_pool.__file__).parent
CLIENT = [
    *Path(rljob.__file__).parent.glob("sandbox*.py"),
    Path(rljob.__file__).with_name("claimed_sandbox.py"),
    *Path(rljob.__file__).parent.glob("http1*.py"),
]
WALL_CLOCKS = {
    "time.time",
    "time.time_ns",
    "time.localtime",
    "time.gmtime",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
    "time.CLOCK_REALTIME",
    "clock.now",
    "_clock.now",
}
SHOWN = {"fleet_status.py", "pod_marks.py"}
"""Modules that read it for people: the times of a pool's conditions and events."""


def wall_clocks_of(text: str) -> list[str]:
    """Where source reads the wall clock."""
    names = [
        ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)
    ]
    return [name for name in names if ".".join(name.split(".")[-2:]) in WALL_CLOCKS]


def test_what_reads_the_wall_clock_is_found() -> None:
    text = "import time\nx = time.time()\ny = self._clock.now()\nz = time.monotonic(); loop.time()"
    assert wall_clocks_of(text) == ["time.time", "self._clock.now"]


def test_neither_pool_nor_guest_nor_client_reads_the_wall_clock() -> None:
    # the shell's commands keep claims in files, which outlive this machine's monotonic clock
    room = [path for path in ROOM.rglob("*.py") if path.parent.name != "cli"]
    assert len(room) > 40
    found = {path.name for path in [*room, *CLIENT] if wall_clocks_of(path.read_text())}
    assert found <= SHOWN


async def test_a_clock_that_jumps_ends_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = itertools.cycle([0.0, 1e9, -1e9, 4e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    pool = SandboxPool.model_validate({"name": "p", "warm": 1, "max": 1, "runtime": "simulated"})
    manager = Manager([pool], {"simulated": SimulatedRuntime()}, token="t", pool_key="k")
    client = SandboxClient(await manager.start("127.0.0.1", 0), "t")
    try:
        async with client.claim("p", ttl_seconds=60, timeout=20) as first:
            for _ in range(10):
                assert (await first.exec("echo on")).stdout == "on\n"
        async with client.claim("p", timeout=20) as second:
            assert second.id == first.id
    finally:
        await client.aclose()
        await manager.close()
