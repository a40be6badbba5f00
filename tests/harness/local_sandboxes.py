"""A bubblewrap pool in this process for one test, and the proof that the test left it as it found it.

serving ─► client … ─► back at its target (nothing claimed, all warm) ─► ended ─► nothing leaked
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rljob.api.rljob_types import SandboxPool
from rljob.sandbox import PoolStatus
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool.manager import Manager
from rljob_sandbox_pool.runtimes.bubblewrap import BubblewrapRuntime

KINDS: dict[str, dict[str, Any]] = {
    "own-uid": {},
    "own-uid-rlimits": {"use_cgroups": False},
    "user-namespace": {"own_uids": False, "use_cgroups": False},
}
TARGET_SECONDS = 30.0
LEAK_SECONDS = 5.0


@asynccontextmanager
async def serving(
    work: Path, kind: str = "own-uid", *, returns: bool = True, **spec: object
) -> AsyncIterator[SandboxClient]:
    """A pool `p` of one sandbox with small limits; `client.manager` is its manager.

    Args:
        work: The runtime's own folder.
        kind: One of `KINDS`.
        returns: Whether the pool must be back at its target when the block ends; a claim that is still held then has
            a connection, too.
        spec: Of the pool, over what is above.
    """
    limits = {"memoryMib": 256, "diskMib": 8, "pids": 48}
    pool = SandboxPool.model_validate({"name": "p", "warm": 1, "max": 1, "limits": limits, **spec})
    before = descriptors()
    manager = Manager(
        [pool],
        {"bubblewrap": BubblewrapRuntime(work, **KINDS[kind])},
        token="t",
        pool_key="pool-key",
    )
    client = SandboxClient(await manager.start("127.0.0.1", 0), "t")
    client.manager = manager
    try:
        yield client
        if returns:
            await back_at_target(client)
    finally:
        await client.aclose()
        await manager.close()
    await nothing_leaked(work, before if returns else descriptors())


async def back_at_target(client: SandboxClient) -> PoolStatus:
    """Nothing claimed, at least as many ready as are kept warm, and a process for each that there is."""
    deadline = time.monotonic() + TARGET_SECONDS
    while True:
        (status,) = await client.pools()
        num = status.ready + status.starting + status.resetting
        is_right = status.warm <= status.ready <= num <= status.max and not status.claimed
        if is_right and len(wrappers()) == num:
            return status
        assert time.monotonic() < deadline, f"not back at its target: {status}, {wrappers()}"
        await asyncio.sleep(0.05)


async def nothing_leaked(work: Path, before: set[str]) -> None:
    """No process, no file, no descriptor, no cgroup of what has ended."""
    deadline = time.monotonic() + LEAK_SECONDS
    while left := [*wrappers(), *work.iterdir(), *(descriptors() - before), *_groups()]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        await asyncio.sleep(0.02)


def descriptors() -> set[str]:
    """Open descriptors of this process, with what they are."""
    found: set[str] = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found.add(f"{path.name} {path.readlink()}")
    return {fd for fd in found if not fd.endswith("/fd")}


def _groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    try:
        return list(root.glob(f"**/rljob-sandbox-*-{os.getpid()}-*"))
    except FileNotFoundError:  # another's went meanwhile, and nobody knows what was not looked at
        return [root]


def children_of(pid: int) -> list[int]:
    """Processes started by another."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def wrappers() -> list[int]:
    """Outer processes of bwrap; the run has other children (a store, an engine), not ours to end."""
    found = []
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().strip() == "bwrap":
                found.append(pid)
    return found


def guests() -> list[int]:
    """Pids of the guests on this machine: what bwrap started."""
    return [guest for bwrap in wrappers() for guest in children_of(bwrap)]
