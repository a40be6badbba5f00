"""Rollouts of many tasks on few sandboxes: each is reset, verified and used again, or each rollout gets a new one.

    50 tasks × 40 rollouts, 8 at a time: claim ─► files written, a command run ─► release ─► reset | recreate

Published for the same shape, elsewhere: 416 s with reset, 944 s with recreate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.figure import Figure
from benchmarks.local_pool import POOL, SEED, local_pool
from rljob.sandbox_client import SandboxClient

COMMAND = "sort data/*.txt | uniq -c > counts && mkdir -p out && cp counts out/ && cat counts"
FILES = 8
TIMEOUT_SECONDS = 120.0


class Size(NamedTuple):
    """How much is measured."""

    tasks: int
    rollouts: int
    at_once: int = 8


FULL = Size(tasks=50, rollouts=40)
SHORT = Size(tasks=3, rollouts=4, at_once=2)


class Measured(NamedTuple):
    """One strategy."""

    seconds: float
    started: int
    """Sandboxes."""
    not_verified: float
    """Resets that left something."""


def figures(size: Size = FULL) -> Iterator[Figure]:
    """Reset beside recreate."""
    reset, recreate = (measure(strategy, size) for strategy in ("reset", "recreate"))
    rows = (
        ("recycling_wall", "s", reset.seconds, recreate.seconds),
        ("recycling_sandboxes", "sandboxes", reset.started, recreate.started),
    )
    for name, unit, value, beside in rows:
        yield Figure(
            name=name,
            value=value,
            unit=unit,
            comparator="recreate",
            comparator_value=beside,
            goal="less than the comparator",
            holds=value < beside,
            seed=SEED,
        )
    yield Figure(
        name="recycling_not_verified",
        value=reset.not_verified,
        unit="sandboxes",
        comparator="rollouts",
        comparator_value=size.tasks * size.rollouts,
        goal="none",
        holds=reset.not_verified == 0,
        seed=SEED,
    )


def measure(strategy: str, size: Size) -> Measured:
    """All rollouts with one strategy, from the moment its first sandboxes are warm."""
    num = size.at_once
    with local_pool(warm=num, max=num, recycle={"strategy": strategy}, ready=num) as pool:
        seconds, started = asyncio.run(_rollouts(pool.client(), size))
        not_verified = sum(
            pool.metric("rljob_sandbox_resets_total", result=result)
            for result in ("quarantined", "failed")
        )
    return Measured(seconds, started, not_verified)


async def _rollouts(client: SandboxClient, size: Size) -> tuple[float, int]:
    """Seconds, and sandboxes that were started."""
    began = time.monotonic()
    todo = iter([task for task in range(size.tasks) for _ in range(size.rollouts)])

    async def worker() -> None:
        for task in todo:  # the workers share one iterator: each takes what is next
            await _rollout(client, task)

    async with asyncio.TaskGroup() as workers:
        for _ in range(size.at_once):
            workers.create_task(worker())
    seconds = time.monotonic() - began
    (status,) = await client.pools()
    await client.aclose()
    return seconds, status.started_total


async def _rollout(client: SandboxClient, task: int) -> None:
    files = {
        f"data/{number}.txt": b"".join(b"%d\n" % (line * task % 97) for line in range(200))
        for number in range(FILES)
    }
    async with client.claim(POOL, timeout=TIMEOUT_SECONDS) as box:
        if (await box.exec("ls -A")).stdout:
            raise RuntimeError(f"{box.id}: something of the rollout before is left")
        await box.write_files(files)
        result = await box.exec(COMMAND)
        if result.exit_code or not result.stdout:
            raise RuntimeError(f"{box.id}: {result.stderr}")
