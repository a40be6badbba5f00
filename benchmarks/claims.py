"""How long a claim of a warm sandbox takes, as it comes in training and all at once.

    Poisson arrivals, each: claim ─► held for a second ─► released          then a burst of claims at one moment

Times run from the planned arrival, so a stall is felt by every claim that it delays. Beside them: a bare asyncio HTTP
server in a process of its own that echoes bodies of the same size at the same moments, with the same client; and the
cold start of a sandbox of the same runtime, which a claim without a pool would be.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.figure import Figure
from benchmarks.local_pool import POOL, SEED, LocalPool, local_pool, percentile
from rljob.http1 import HttpClient
from rljob.sandbox_client import ClaimedSandbox, SandboxClient

GOAL_P50_MS, GOAL_P99_MS, GOAL_BURST_MS = 10.0, 50.0, 150.0
CLAIM_BYTES = 230
"""Of a claim's JSON; its answer is as long."""
TIMEOUT_SECONDS = 60.0


class Size(NamedTuple):
    """How much is measured."""

    claims_per_second: float
    seconds: float
    burst: int
    """Also how many are kept warm."""
    cold_starts: int
    held_seconds: float = 1.0


FULL = Size(claims_per_second=45, seconds=60, burst=300, cold_starts=20)
SHORT = Size(claims_per_second=20, seconds=1, burst=6, cold_starts=2, held_seconds=0.05)

Call = Callable[[], Awaitable[object]]


class Measured(NamedTuple):
    """One way to answer. Milliseconds."""

    arrivals: list[float]
    burst: list[float]


def figures(size: Size = FULL) -> Iterator[Figure]:
    """Claims beside echoes and cold starts."""
    with local_pool(warm=size.burst, max=size.burst, ready=size.burst) as pool:
        ours = asyncio.run(_claims_of(pool, size))
        misses = pool.metric("rljob_sandbox_claim_seconds_count", phase="queue", result="miss")
        hits = pool.metric("rljob_sandbox_claim_seconds_count", phase="queue", result="hit")
    with _echo() as url:
        echoed = asyncio.run(_echoes(url, size))
    with local_pool(warm=0, max=4, recycle={"strategy": "recreate"}) as pool:
        cold = asyncio.run(_cold_starts(pool, size.cold_starts))
    yield from compare(ours, echoed, cold)
    yield Figure(
        name="claim_misses",
        value=misses,
        unit="claims",
        comparator="hits",
        comparator_value=hits,
        seed=SEED,
    )


def compare(ours: Measured, echoed: Measured, cold: list[float]) -> Iterator[Figure]:
    """Claims beside echoes, then beside cold starts."""
    rows = (
        ("claim_p50", ours.arrivals, 0.5, echoed.arrivals, GOAL_P50_MS),
        ("claim_p99", ours.arrivals, 0.99, echoed.arrivals, GOAL_P99_MS),
        ("claim_burst_p50", ours.burst, 0.5, echoed.burst, GOAL_BURST_MS),
        ("claim_burst_p99", ours.burst, 0.99, echoed.burst, None),
    )
    for name, values, share, others, goal in rows:
        value = percentile(values, share)
        yield Figure(
            name=name,
            value=value,
            unit="ms",
            comparator="bare asyncio echo",
            comparator_value=percentile(others, share),
            goal=f"at most {goal:g} ms" if goal else "",
            holds=value <= goal if goal else None,
            seed=SEED,
        )
    yield Figure(
        name="claim_p50",
        value=percentile(ours.arrivals, 0.5),
        unit="ms",
        comparator="cold start",
        comparator_value=percentile(cold, 0.5),
        seed=SEED,
    )


async def arrivals(call: Call, size: Size) -> list[float]:
    """Milliseconds of each `call`, made at Poisson's moments."""
    dice, at = random.Random(SEED), 0.0
    moments: list[float] = []
    while (at := at + dice.expovariate(size.claims_per_second)) < size.seconds:
        moments.append(at)
    began = asyncio.get_running_loop().time()

    async def arrive(moment: float) -> float:
        await asyncio.sleep(began + moment - asyncio.get_running_loop().time())
        return await _ms_since(began + moment, call)

    return await asyncio.gather(*map(arrive, moments))


async def _all_at_once(call: Call, number: int) -> list[float]:
    began = asyncio.get_running_loop().time()
    return await asyncio.gather(*(_ms_since(began, call) for _ in range(number)))


async def _ms_since(began: float, call: Call) -> float:
    await call()
    return 1000 * (asyncio.get_running_loop().time() - began)


# ── the pool ──


async def _claims_of(pool: LocalPool, size: Size) -> Measured:
    client = pool.client()
    try:
        return await claims(client, POOL, size)
    finally:
        await client.aclose()


async def claims(client: SandboxClient, pool: str, size: Size) -> Measured:
    """Claims as they come, and when all are given back, a burst."""
    releases = set[asyncio.Task[None]]()

    async def claim() -> None:
        box = await client.acquire(pool, timeout=TIMEOUT_SECONDS)
        releases.add(asyncio.create_task(_release_later(box, size.held_seconds)))

    as_they_come = await arrivals(claim, size)
    await asyncio.gather(*releases)
    releases.clear()
    await _all_ready(client)
    burst = await _all_at_once(claim, size.burst)
    await asyncio.gather(*releases)
    return Measured(as_they_come, burst)


async def _release_later(box: ClaimedSandbox, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await box.release()


async def _all_ready(client: SandboxClient) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while any(status.ready < status.warm for status in await client.pools()):
            await asyncio.sleep(0.1)


async def _cold_starts(pool: LocalPool, number: int) -> list[float]:
    """A pool that keeps nothing warm."""
    client = pool.client()
    times: list[float] = []
    for _ in range(number):
        began = asyncio.get_running_loop().time()
        box = await client.acquire(POOL, timeout=TIMEOUT_SECONDS)
        times.append(1000 * (asyncio.get_running_loop().time() - began))
        await box.release()
    await client.aclose()
    return times


# ── the echo ──


@contextmanager
def _echo() -> Iterator[str]:
    argv = [sys.executable, "-m", "benchmarks.echo"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


async def _echoes(url: str, size: Size) -> Measured:
    http = HttpClient(url)

    async def echo() -> None:
        await http.request("POST", "/", b"x" * CLAIM_BYTES)

    try:
        return Measured(await arrivals(echo, size), await _all_at_once(echo, size.burst))
    finally:
        await http.aclose()
