"""How many finished episodes per second the ledger hands from workers to the trainer, beside a bare stream.

    ledger   8 × complete ──► take, read, archived, commit        bare   8 × XADD ──► XREADGROUP, XACK, XDEL

Both carry the same packed record of 32 K tokens, over the same client, in the same server with `appendfsync always`,
with one reader beside the writers. Leases are taken before the clock starts: workers ask for them by the dozen, minutes
before they complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from redis.asyncio import Redis

from benchmarks.figure import Figure
from benchmarks.store import valkey
from benchmarks.workload import SEED, mixed_trajectory
from rljob.codec import pack
from rljob.ids import PolicyVersion
from rljob.ledger import CompletionInfo, Lease, Ledger, LedgerConfig
from rljob.ledger.trainer_calls import READ_BATCH

GOAL = 0.7
WRITERS = 8
GROUP_SIZE, GROUPS_PER_STEP, STEPS = 8, 8, 16
RECORDS = GROUP_SIZE * GROUPS_PER_STEP * STEPS
ROUNDS = 7
POLL_SECONDS = 0.01
WORKER, BOOT = "worker-0", "boot"


def figures() -> Iterator[Figure]:
    """Records per second, the best of rounds that take turns: a busy moment of the machine meets both."""
    ours, bare = asyncio.run(_measure(pack(mixed_trajectory())))
    yield Figure(
        name="stream_handover",
        value=ours,
        unit="records/s",
        comparator="XADD, XREADGROUP, XACK, XDEL",
        comparator_value=bare,
        goal=f"at least {GOAL} of the comparator",
        holds=ours >= GOAL * bare,
        seed=SEED,
    )


async def _measure(payload: bytes) -> tuple[float, float]:
    ours: list[float] = []
    bare: list[float] = []
    with valkey() as url:
        for number in range(ROUNDS):
            ours.append(RECORDS / await _ledger_seconds(url, f"round-{number}", payload))
            bare.append(RECORDS / await _bare_seconds(url, payload))
    return max(ours), max(bare)


async def _write_all(jobs: Iterator[Callable[[], Awaitable[object]]]) -> None:
    async def writer() -> None:
        for job in jobs:  # the writers share one iterator: each takes what is next
            await job()

    async with asyncio.TaskGroup() as writers:
        for _ in range(WRITERS):
            writers.create_task(writer())


# ── the ledger ──


async def _ledger_seconds(url: str, job: str, payload: bytes) -> float:
    config = LedgerConfig(
        job=job,
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        steps=STEPS,
        max_staleness=STEPS,
        max_concurrent_episodes=RECORDS,
        num_rows=RECORDS,
        data_hash="benchmark",
    )
    async with await Ledger.connect(url, job) as ledger:
        await ledger.initialise(config)
        incarnation = await ledger.open_trainer(BOOT)
        await ledger.resume(incarnation, 0)
        await ledger.commit(incarnation, 0, PolicyVersion(incarnation, 0), "digest")
        await ledger.open_worker(WORKER, BOOT)
        leases: list[Lease] = []
        while len(leases) < RECORDS:
            reply = await ledger.lease(WORKER, BOOT, PolicyVersion(incarnation, 0), 64)
            if not reply.leases:
                raise RuntimeError(f"no lease after {len(leases)}: {reply.reason}")
            leases += reply.leases
        started = time.perf_counter()
        async with asyncio.TaskGroup() as both:
            both.create_task(_write_all(_completions(ledger, leases, payload)))
            both.create_task(_train(ledger, incarnation))
        seconds = time.perf_counter() - started
        await ledger.destroy()
        return seconds


def _completions(
    ledger: Ledger, leases: list[Lease], payload: bytes
) -> Iterator[Callable[[], Awaitable[object]]]:
    info = CompletionInfo(
        reward=1.0, outcome="completed", min_version=0, max_version=0, tokens=32_768
    )
    for lease in leases:
        yield lambda lease=lease: ledger.complete(
            WORKER, BOOT, lease.episode, lease.attempt, payload, info
        )


async def _train(ledger: Ledger, incarnation: int) -> None:
    for step in range(1, STEPS + 1):
        while (batch := await ledger.take(incarnation, step, GROUPS_PER_STEP)).groups is None:
            await asyncio.sleep(POLL_SECONDS)
        if sum(len(group.payloads) for group in batch.groups) != GROUP_SIZE * GROUPS_PER_STEP:
            raise RuntimeError(f"step {step} got {len(batch.groups)} groups")
        await ledger.archived(incarnation, step)
        await ledger.commit(incarnation, step, PolicyVersion(incarnation, step), "digest")


# ── a bare stream ──


async def _bare_seconds(url: str, payload: bytes) -> float:
    async with Redis.from_url(url, protocol=2, max_connections=32) as redis:
        await redis.xgroup_create("bare", "trainer", id="0", mkstream=True)
        started = time.perf_counter()
        async with asyncio.TaskGroup() as both:
            both.create_task(
                _write_all(lambda: redis.xadd("bare", {"p": payload}) for _ in range(RECORDS))
            )
            both.create_task(_read(redis))
        seconds = time.perf_counter() - started
        await redis.delete("bare")
        return seconds


async def _read(redis: Redis) -> None:
    left = RECORDS
    while left:
        answer: Any = await redis.xreadgroup(
            "trainer", "reader", {"bare": ">"}, count=READ_BATCH, block=1000
        )
        for _, entries in answer:
            ids = [entry for entry, _ in entries]
            async with redis.pipeline(transaction=False) as pipe:
                pipe.xack("bare", "trainer", *ids)
                pipe.xdel("bare", *ids)
                await pipe.execute()
            left -= len(ids)
