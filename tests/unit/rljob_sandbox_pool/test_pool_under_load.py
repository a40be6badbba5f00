"""A pool whose every place is taken, and claims that wait all the time; and specs that change meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from rljob.api.rljob_types import SandboxPool, SandboxPoolSpec
from rljob_sandbox_pool import decide
from rljob_sandbox_pool.guest.wire import RefusedError
from rljob_sandbox_pool.leases import ClaimRequest
from rljob_sandbox_pool.pool import NoSandboxError, Pool
from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime

REUSED: dict[str, Any] = {"recycle": {"maxReuses": 100_000}}


class Images(SimulatedRuntime):
    """Simulated sandboxes of several images."""

    def images(self, spec: SandboxPoolSpec) -> dict[str, int]:
        return {each.image: each.weight for each in spec.images} or {"default": 1}


def spec(**keys: Any) -> SandboxPool:
    return SandboxPool.model_validate({"name": "p", **REUSED, **keys})


@asynccontextmanager
async def running(runtime: SimulatedRuntime, **keys: Any) -> AsyncIterator[Pool]:
    pool = Pool(spec(**keys), runtime, "pool key", name="p")
    loop = asyncio.create_task(pool.keep_warm_loop())
    try:
        yield pool
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await pool.close()


@asynccontextmanager
async def busy(wanted: Mapping[str, Any], *, workers: int = 8, **keys: Any) -> AsyncIterator[Pool]:
    """A pool, and some who claim from it, and give back, without a pause."""
    numbers, job = count(), str(wanted.get("job", ""))

    async def work(pool: Pool) -> None:
        while True:
            claim = ClaimRequest(id=f"c{next(numbers)}", wait_seconds=30.0, **wanted)
            await pool.claim(claim)
            await asyncio.sleep(0.01)
            await pool.release(claim.id, job=job)

    async with running(Images(), **keys) as pool:
        tasks = [asyncio.create_task(work(pool)) for _ in range(workers)]
        try:
            async with asyncio.timeout(20):
                while pool.counts().claimed < pool.spec.max:
                    await asyncio.sleep(0.01)
            yield pool
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def claimed(pool: Pool, name: str, **more: Any) -> str:
    """The sandbox that a claim gets."""
    answer = await pool.claim(ClaimRequest(id=name, wait_seconds=15.0, **more))
    return json.loads(answer)["sandbox_id"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "PATIENCE_SECONDS", 0.2)


@pytest.mark.parametrize("workers", [2, 8])
async def test_another_job_gets_a_place_of_a_pool_that_one_job_keeps_busy(workers: int) -> None:
    async with busy({"job": "a"}, workers=workers, warm=1, max=2) as pool:
        await claimed(pool, "other", job="b")


@pytest.mark.parametrize("workers", [2, 8])
async def test_another_image_gets_a_place_of_a_pool_that_one_image_keeps_busy(workers: int) -> None:
    images = [{"image": "x"}, {"image": "y"}]
    async with busy({"image": "x"}, workers=workers, warm=0, max=2, images=images) as pool:
        await claimed(pool, "other", image="y")


async def test_a_higher_priority_waits_for_no_more_than_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decide, "PATIENCE_SECONDS", 1000.0)
    async with busy({"job": "a"}, warm=1, max=1) as pool:
        await claimed(pool, "other", job="b", priority=1)


async def test_nothing_makes_room_for_an_image_that_is_not_the_pool_s_any_more() -> None:
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
    async with busy({}, workers=24, warm=6, max=6) as pool:
        pool.update(spec(warm=1, max=2))
        async with asyncio.timeout(15):
            while pool.counts().total > 2:
                await asyncio.sleep(0.01)


async def test_what_was_used_is_not_used_again_once_sandboxes_are_to_be_recreated() -> None:
    async with running(Images(), warm=3, max=3) as pool:
        used = {name: await claimed(pool, name) for name in ("ready", "resetting", "held")}
        await pool.release("ready")
        release = asyncio.create_task(pool.release("resetting"))
        while not pool.counts().resetting:
            await asyncio.sleep(0)
        pool.update(spec(warm=3, max=3, recycle={"strategy": "recreate"}))
        found = {await claimed(pool, "a"), await claimed(pool, "b")}
        await release
        await pool.release("held")
        found.add(await claimed(pool, "c"))
        assert not found & set(used.values())


async def test_what_was_never_used_stays_when_sandboxes_are_to_be_recreated() -> None:
    async with running(Images(), warm=1, max=1) as pool:
        while not pool.counts().ready:
            await asyncio.sleep(0.01)
        pool.update(spec(warm=1, max=1, recycle={"strategy": "recreate"}))
        await claimed(pool, "a")
        assert pool.status().started_total == 1


async def test_a_pool_without_images_has_its_default_one_and_no_other() -> None:
    async with running(Images(), warm=1, max=2) as pool:
        await claimed(pool, "a", image="default")
        with pytest.raises(RefusedError, match="no image 'another'") as refusal:
            await claimed(pool, "b", image="another")
        assert (refusal.value.status, refusal.value.error) == (404, "unknown_image")


async def test_on_one_machine_an_image_has_no_effect() -> None:
    async with running(SimulatedRuntime(), warm=1, max=2) as pool:
        await claimed(pool, "a", image="any")
