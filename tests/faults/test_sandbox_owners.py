"""The pool manager is killed again and again while many claim: one owner per sandbox, nothing left over.

Every holder of a claim takes a lock inside its sandbox and finds it as it was when it lets go: another owner of the
same sandbox would have failed to take it, or a reset would have taken it away. RLJOB_FAULT_CLAIMS=2000: the long form.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rljob.errors import SandboxError
from rljob.sandbox_client import ClaimedSandbox, SandboxClient
from rljob.settings import Settings

CLAIMS = int(os.environ.get("RLJOB_FAULT_CLAIMS", "200"))
KILLS = max(5, CLAIMS // 100)
"""At least."""
CLIENTS, CLAIMS_AT_ONCE = 4, 3
SANDBOXES = 6
FORGOTTEN_TTL_SECONDS = 2.0
ENDED_SECONDS = 60.0

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300 + CLAIMS)]


class PoolManager:
    """The process, killed and started again on the same address."""

    def __init__(self, folder: Path, port: int) -> None:
        self.kills = 0
        self.seen: set[tuple[int, str]] = set()
        """Processes below it that ever lived, each with its start time: a pid may come again."""
        self._folder = folder
        (folder / "job.json").write_text(json.dumps(_job()))
        self.settings = Settings(
            component="sandbox-pool",
            job_file=str(folder / "job.json"),
            artifacts=str(folder),
            work_dir=str(folder / "work"),
            broker_url=f"http://127.0.0.1:{port}",
            token="the-token",
            pool_key="the-pool-key",
        )
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "rljob_sandbox_pool.main"]
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                argv,
                env=os.environ | self.settings.to_env(),
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (one call into libc, no lock)
            )

    def kill(self) -> None:
        """`kill -9`, and another one."""
        self._process.send_signal(signal.SIGSTOP)
        self.seen |= descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        self.kills += 1
        self._process = self._start()

    def end(self) -> None:
        """As its driver would."""
        self.seen |= descendants(self._process.pid)
        self._process.terminate()
        try:
            self._process.wait(ENDED_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _job() -> dict[str, object]:
    pool = {"name": "p", "warm": SANDBOXES, "max": SANDBOXES, "limits": {"pids": 32}}
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"source": "file:///model"},
            "data": {"train": {"source": "file:///rows.jsonl"}},
            "tasks": [{"name": "t", "type": "shell_files", "sandbox": {"pool": "p"}}],
            "trainer": {"steps": 1, "groupsPerStep": 1},
            "sandboxPools": [pool],
        },
    }


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pid: int) -> set[tuple[int, str]]:
    """Every process below `pid`, with its start time."""
    parents = {
        int(path.name): fields
        for path in Path("/proc").glob("[0-9]*")
        if (fields := _stat(int(path.name)))
    }
    found, todo = set[tuple[int, str]](), [pid]
    while todo:
        parent = todo.pop()
        children = {child: fields for child, fields in parents.items() if int(fields[1]) == parent}
        found |= {(child, fields[19]) for child, fields in children.items()}
        todo += children
    return found


def running(seen: set[tuple[int, str]]) -> set[int]:
    """Those of them that still run; a zombie does not."""
    found = {pid: (_stat(pid), began) for pid, began in seen}
    return {
        pid
        for pid, (fields, began) in found.items()
        if fields and fields[19] == began and fields[0] not in "ZX"
    }


class Owners:
    """What the holders of claims saw."""

    def __init__(self, dice: random.Random, marker: str) -> None:
        self.counts: Counter[str] = Counter()
        self.holding: dict[str, str] = {}
        self._dice, self._marker = dice, marker

    async def claim(self, client: SandboxClient) -> None:
        """One claim, from its acquisition to its end, whatever that is."""
        is_forgotten = self._dice.random() < 0.05
        ttl = FORGOTTEN_TTL_SECONDS if is_forgotten else 60.0
        box = await client.acquire("p", ttl_seconds=ttl, timeout=200)
        self.counts["claimed"] += 1
        assert box.id not in self.holding, f"{box.id} has two owners"
        self.holding[box.id] = box.claim_id
        try:
            await self.hold(box)
        except SandboxError:
            self.counts["lost"] += 1
        finally:
            del self.holding[box.id]
        if is_forgotten:
            self.counts["forgotten"] += 1
            await box._http.aclose()  # its owner is no more
        else:
            await box.release()

    async def hold(self, box: ClaimedSandbox) -> None:
        lock = await box.exec(
            f"mkdir /workspace/lock && echo {box.claim_id} >/workspace/lock/owner"
            f" && (setsid sleep {self._marker} &)"
        )
        if lock.exit_code:
            raise AssertionError(f"{box.id} has an owner already: {lock.stderr}")
        await asyncio.sleep(self._dice.uniform(0.0, 0.1))
        found = await box.exec("cat /workspace/lock/owner; ls /workspace")
        assert found.stdout == f"{box.claim_id}\nlock\n", f"{box.id} is no longer ours: {found}"


@asynccontextmanager
async def clients(settings: Settings) -> AsyncIterator[list[SandboxClient]]:
    """Several processes' worth of them."""
    made = [
        SandboxClient(settings.broker_url, settings.token, owner=f"worker-{number}", boot_id="1")
        for number in range(CLIENTS)
    ]
    try:
        yield made
    finally:
        for client in made:
            await client.aclose()


def is_done(owners: Owners, manager: PoolManager) -> bool:
    return owners.counts["claimed"] >= CLAIMS and manager.kills >= KILLS


async def claim_until_done(owners: Owners, client: SandboxClient, manager: PoolManager) -> None:
    while not is_done(owners, manager):
        await owners.claim(client)


async def kill_at_random(owners: Owners, manager: PoolManager, dice: random.Random) -> None:
    while not is_done(owners, manager):
        before, is_early = owners.counts["claimed"], dice.random() < 0.3
        await asyncio.sleep(dice.uniform(0.2, 2.0))
        # Mostly one that has served: on a busy machine a start may take longer than any pause.
        while not is_early and owners.counts["claimed"] == before:
            await asyncio.sleep(dice.uniform(0.0, 0.5))
        manager.kill()


async def test_a_manager_killed_at_random_leaves_no_double_owner_and_no_orphan(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    dice = random.Random(5)
    marker = f"98{os.getpid()}"
    manager, owners = PoolManager(tmp_path, free_port()), Owners(dice, marker)
    try:
        async with clients(manager.settings) as some:
            async with asyncio.TaskGroup() as group:
                group.create_task(kill_at_random(owners, manager, dice))
                for client in some * CLAIMS_AT_ONCE:
                    group.create_task(claim_until_done(owners, client, manager))
            await assert_back_at_its_target(some[0])
    finally:
        manager.end()
    assert owners.counts["claimed"] >= CLAIMS
    assert manager.kills >= KILLS
    assert owners.counts["lost"] < owners.counts["claimed"] / 2, owners.counts
    await assert_ended(manager.seen, marker)


async def assert_back_at_its_target(client: SandboxClient) -> None:
    """After the time to live of what was forgotten, every sandbox is ready."""
    deadline = time.monotonic() + FORGOTTEN_TTL_SECONDS + ENDED_SECONDS
    while True:
        try:
            (status,) = await client.pools()
        except SandboxError as error:  # it starts again
            status = error
        else:
            if (status.ready, status.claimed) == (SANDBOXES, 0):
                return
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.1)


async def assert_ended(seen: set[tuple[int, str]], marker: str) -> None:
    assert len(seen) >= 2 * SANDBOXES
    deadline = time.monotonic() + ENDED_SECONDS
    while left := running(seen) | with_words("sleep", marker):
        assert time.monotonic() < deadline, f"still running: {left}"
        await asyncio.sleep(0.05)


def with_words(*words: str) -> set[int]:
    """Processes of this machine whose command line is these words."""
    wanted, found = "\0".join(words).encode() + b"\0", set[int]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == wanted:
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


async def test_two_owners_of_one_sandbox_would_be_noticed(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    manager, owners = PoolManager(tmp_path, free_port()), Owners(random.Random(5), "1")
    try:
        async with clients(manager.settings) as some, some[0].claim("p", timeout=60) as box:
            await owners.hold(box)
            with pytest.raises(AssertionError, match="has an owner already"):
                await owners.hold(box)
            await box.reset()
            holding = asyncio.create_task(owners.hold(box))
            await asyncio.sleep(0.02)
            await box.reset()
            with pytest.raises(AssertionError, match=r"is no longer ours|has an owner already"):
                await holding
    finally:
        manager.end()
