"""A day in miniature: thousands of claims on the same few sandboxes. Memory and descriptors must not grow.

    claim ─► a file, a command ─► release ─► reset      × 20,000, read at a quarter, the half, three quarters, the end

Read from outside: the pool manager's process, and the largest of its guests, which live through all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.figure import Figure
from benchmarks.local_pool import POOL, SEED, LocalPool, local_pool, num_descriptors
from benchmarks.on_cluster import rss_mb
from rljob.sandbox_client import SandboxClient

QUARTERS = ("quarter", "half", "three_quarters", "end")
MAX_GROWTH = 1.05
"""Of memory, from the first quarter to the end."""
TIMEOUT_SECONDS = 60.0


class Size(NamedTuple):
    """How much is measured."""

    claims: int
    sandboxes: int = 4
    """And as many claims at once."""


FULL = Size(claims=20_000)
SHORT = Size(claims=40, sandboxes=2)


class Reading(NamedTuple):
    """Of one moment."""

    broker_rss_mb: float
    broker_descriptors: int
    guest_rss_mb: float
    """The largest."""
    guest_descriptors: int
    """The most."""


def figures(size: Size = FULL) -> Iterator[Figure]:
    """The later readings beside the first."""
    num = size.sandboxes
    recycle = {"strategy": "reset", "maxReuses": size.claims}
    with local_pool(warm=num, max=num, recycle=recycle, ready=num) as pool:
        before = set(pool.guests())
        readings = asyncio.run(_measure(pool, size))
        lost = len(before - set(pool.guests()))
    yield from compare(readings)
    yield Figure(
        name="soak_sandboxes_replaced",
        value=lost,
        unit="sandboxes",
        comparator="sandboxes",
        comparator_value=num,
        goal="none",
        holds=lost == 0,
        seed=SEED,
    )


def compare(readings: list[Reading]) -> Iterator[Figure]:
    """Everything after the first quarter beside the first quarter; the end has a goal."""
    first, *later = readings
    for moment, reading in zip(QUARTERS[1:], later, strict=True):
        for name in Reading._fields:
            value, beside = getattr(reading, name), getattr(first, name)
            unit, growth, goal = ("descriptors", 1.0, "no more than the comparator")
            if name.endswith("mb"):
                unit, growth, goal = "MB", MAX_GROWTH, f"at most {MAX_GROWTH} of the comparator"
            is_end = moment == QUARTERS[-1]
            yield Figure(
                name=f"soak_{name.removesuffix('_mb')}_{moment}",
                value=value,
                unit=unit,
                comparator="at a quarter",
                comparator_value=beside,
                goal=goal if is_end else "",
                holds=value <= growth * beside if is_end else None,
                seed=SEED,
            )


async def _measure(pool: LocalPool, size: Size) -> list[Reading]:
    client, readings = pool.client(), list[Reading]()
    for _ in QUARTERS:
        await _claims(client, size.claims // len(QUARTERS), size.sandboxes)
        readings.append(_read(pool))
    await client.aclose()
    return readings


async def _claims(client: SandboxClient, claims: int, at_once: int) -> None:
    numbers = iter(range(claims))

    async def worker() -> None:
        for number in numbers:  # the workers share one iterator: each takes what is next
            async with client.claim(POOL, timeout=TIMEOUT_SECONDS) as box:
                await box.write_file("number", b"%d" % number)
                if (await box.exec("cat number")).stdout != str(number):
                    raise RuntimeError(f"{box.id}: not what was written")

    async with asyncio.TaskGroup() as workers:
        for _ in range(at_once):
            workers.create_task(worker())


def _read(pool: LocalPool) -> Reading:
    guests = pool.guests()
    return Reading(
        rss_mb(pool.pid),
        num_descriptors(pool.pid),
        max(map(rss_mb, guests)),
        max(map(num_descriptors, guests)),
    )
