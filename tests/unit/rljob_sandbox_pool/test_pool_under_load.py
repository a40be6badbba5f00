"""A pool whose every place is taken, and claims that wait all the time."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from rljob.api.rljob_types import SandboxPool, SandboxPoolSpec
from rljob_sandbox_pool import ready_queue
from rljob_sandbox_pool.leases import ClaimRequest
from rljob_sandbox_pool.pool import NoSandboxError, Pool
from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime

REUSED: dict[str, Any] = {"recycle": {"maxReuses": 100_000}}


class Images(SimulatedRuntime):
    """Simulated sandboxes of several images."""

    def images(self, spec: SandboxPoolSpec) -> dict[str, int]:
        return {each.image: each.weight for each in spec.images} or {"": 1}


def spec(**keys: Any) -> SandboxPool:
    return SandboxPool.model_validate({"name": "p", **REUSED, **keys})


@asynccontextmanager
async def busy(wanted: Mapping[str, Any], **keys: Any) -> AsyncIterator[Pool]:
    """A pool, and eight who claim from it, and give back, without a pause."""
    pool = Pool(spec(**keys), Images(), "pool key", name="p")
    loop = asyncio.create_task(pool.keep_warm_loop())
    numbers, job, stop = count(), str(wanted.get("job", "")), asyncio.Event()

    async def work() -> None:
        while not stop.is_set():
            claim = ClaimRequest(id=f"c{next(numbers)}", wait_seconds=5.0, **wanted)
            await pool.claim(claim)
            await asyncio.sleep(0.01)
            await pool.release(claim.id, job=job)

    tasks = [asyncio.create_task(work()) for _ in range(8)]
    try:
        async with asyncio.timeout(20):
            while pool.counts().claimed < pool.spec.max:
                await asyncio.sleep(0.01)
        yield pool
    finally:
        stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await pool.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_queue, "PASSED_OVER_SECONDS", 0.2)


async def test_another_job_gets_a_place_of_a_pool_that_one_job_keeps_busy() -> None:
    async with busy({"job": "a"}, warm=1, max=2) as pool:
        await pool.claim(ClaimRequest(id="other", job="b", wait_seconds=15.0))


async def test_another_image_gets_a_place_of_a_pool_that_one_image_keeps_busy() -> None:
    images = [{"image": "x"}, {"image": "y"}]
    async with busy({"image": "x"}, warm=0, max=2, images=images) as pool:
        await pool.claim(ClaimRequest(id="other", image="y", wait_seconds=15.0))


async def test_nothing_makes_room_for_an_image_that_cannot_start() -> None:
    images = [{"image": "x"}, {"image": "y"}]
    async with busy({"image": "x"}, warm=0, max=2, images=images) as pool:
        before = pool.status().started_total
        claim = ClaimRequest(id="other", image="y", wait_seconds=1.0)
        waits = asyncio.create_task(pool.claim(claim))
        await asyncio.sleep(0)
        pool.update(spec(warm=0, max=2, images=images[:1]))
        with pytest.raises(NoSandboxError):
            await waits
        assert pool.status().started_total == before


async def test_a_smaller_maximum_comes_true_although_claims_wait() -> None:
    async with busy({}, warm=6, max=6) as pool:
        pool.update(spec(warm=1, max=2))
        async with asyncio.timeout(15):
            while pool.counts().total > 2:
                await asyncio.sleep(0.01)
