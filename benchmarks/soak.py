"""A day in miniature: thousands of claims on the same few sandboxes, then thousands of commands of one claim.

    claim ─► a file, a command ─► release ─► reset      × 20,000, read at a quarter, the half, three quarters, the end
    claim ─► a command that leaves an orphan, …         × 10,000, read at a quarter and the end

Read from outside: the pool manager's process, and the largest of its guests, which live through all of it. Memory and
descriptors must not grow, and no zombie may stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

from benchmarks.figure import Figure
from benchmarks.local_pool import POOL, SEED, LocalPool, children_of, local_pool, num_descriptors
from benchmarks.on_cluster import rss_mb
from rljob.sandbox_client import ClaimedSandbox, SandboxClient

QUARTERS = ("quarter", "half", "three_quarters", "end")
MAX_GROWTH = 1.05
"""Of memory, from the first quarter to the end."""
SPARE = 8
"""Descriptors and processes above those of the first quarter: connections that happen to be open."""
TIMEOUT_SECONDS = 60.0


class Size(NamedTuple):
    """How much is measured."""

    claims: int
    execs: int
    sandboxes: int = 4
    """And as many claims at once, and commands at once."""


FULL = Size(claims=20_000, execs=10_000)
SHORT = Size(claims=40, execs=40, sandboxes=2)


class Reading(NamedTuple):
    """Of one moment."""

    broker_rss_mb: float
    broker_descriptors: int
    guest_rss_mb: float
    """The largest."""
    guest_descriptors: int
    """The most."""
    guest_children: int
    """Of all, zombies included; between calls there should be none."""


def figures(size: Size = FULL) -> Iterator[Figure]:
    """The later readings beside the first."""
    num = size.sandboxes
    recycle = {"strategy": "reset", "maxReuses": size.claims}
    with local_pool(warm=num, max=num, recycle=recycle, ready=num) as pool:
        before = set(pool.guests())
        readings, of_execs = asyncio.run(_measure(pool, size))
        lost = len(before - set(pool.guests()))
    yield from compare(readings)
    yield from compare_execs(*of_execs)
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
        for name in Reading._fields[:-1]:
            value, beside = getattr(reading, name), getattr(first, name)
            yield _beside(f"{name}_{moment}", value, beside, has_goal=moment == QUARTERS[-1])


def compare_execs(first: Reading, last: Reading) -> Iterator[Figure]:
    """The guest's, after a quarter of the commands and after all."""
    yield _beside("guest_rss_mb_execs", last.guest_rss_mb, first.guest_rss_mb)
    yield _beside("guest_descriptors_execs", last.guest_descriptors, first.guest_descriptors)
    yield _beside("guest_children_execs", last.guest_children, first.guest_children)


def _beside(name: str, value: float, first: float, *, has_goal: bool = True) -> Figure:
    is_memory = "_mb" in name
    most = MAX_GROWTH * first if is_memory else first + SPARE
    goal = f"at most {MAX_GROWTH} of" if is_memory else f"at most {SPARE} above"
    return Figure(
        name=f"soak_{name.replace('_mb', '')}",
        value=value,
        unit="MB" if is_memory else name.split("_")[1],
        comparator="at a quarter",
        comparator_value=first,
        goal=f"{goal} the comparator" if has_goal else "",
        holds=value <= most if has_goal else None,
        seed=SEED,
    )


async def _measure(pool: LocalPool, size: Size) -> tuple[list[Reading], tuple[Reading, Reading]]:
    client, readings = pool.client(), list[Reading]()
    for _ in QUARTERS:
        await _claims(client, size.claims // len(QUARTERS), size.sandboxes)
        readings.append(_read(pool))
    async with client.claim(POOL, timeout=TIMEOUT_SECONDS) as box:
        await _execs(box, size.execs // 4, size.sandboxes)
        first = _read(pool)
        await _execs(box, size.execs - size.execs // 4, size.sandboxes)
        last = _read(pool)
    await client.aclose()
    return readings, (first, last)


async def _execs(box: ClaimedSandbox, execs: int, at_once: int) -> None:
    async def run(number: int) -> None:
        result = await box.exec(f"(sleep 0.001 &); echo {number}")
        if result.stdout != f"{number}\n":
            raise RuntimeError(f"{box.id}: {result}")

    await _shared(run, execs, at_once)
    await box.exec("sleep 0.2")  # the last orphan ends


async def _claims(client: SandboxClient, claims: int, at_once: int) -> None:
    async def claim(number: int) -> None:
        async with client.claim(POOL, timeout=TIMEOUT_SECONDS) as box:
            await box.write_file("number", b"%d" % number)
            if (await box.exec("cat number")).stdout != str(number):
                raise RuntimeError(f"{box.id}: not what was written")

    await _shared(claim, claims, at_once)


async def _shared(do: Callable[[int], Awaitable[None]], times: int, at_once: int) -> None:
    numbers = iter(range(times))

    async def worker() -> None:
        for number in numbers:  # the workers share one iterator: each takes what is next
            await do(number)

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
        sum(len(children_of(guest)) for guest in guests),
    )
