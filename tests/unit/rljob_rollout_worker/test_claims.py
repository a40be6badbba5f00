"""Claims: none is lost by a cancellation, none outlives the worker for long."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from rljob.errors import DeadlineError
from rljob.testing.sandbox import FakeBroker, FakeSandbox
from rljob_rollout_worker import claims as module
from rljob_rollout_worker.claims import Claims


class SlowBroker(FakeBroker):
    """Grants a claim only when the test says so, even to someone who has gone."""

    def __init__(self) -> None:
        super().__init__()
        self.grant = asyncio.Event()

    async def acquire(
        self,
        pool: str,
        *,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        ttl_seconds: float = 0.0,
        timeout: float = 0.0,
        priority: int = 0,
    ) -> FakeSandbox:
        await self.grant.wait()
        return await super().acquire(pool, image=image, env=env)


async def claim(claims: Claims, timeout: float = 5.0) -> FakeSandbox:
    box = await claims.acquire("p", image=None, env={}, ttl_seconds=60, timeout=timeout)
    assert isinstance(box, FakeSandbox)
    return box


async def test_a_claim_that_is_granted_to_a_cancelled_episode_is_given_back(tmp_path: Path) -> None:
    broker = SlowBroker()
    claims = Claims(broker, tmp_path / "claims")
    task = asyncio.create_task(claim(claims))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    broker.grant.set()
    await claims.aclose()
    assert broker.num_claims == 1
    assert broker.claimed == {}


async def test_what_a_killed_worker_held_is_given_back_by_the_next(tmp_path: Path) -> None:
    broker = FakeBroker()
    before = Claims(broker, tmp_path / "claims")
    boxes = [await claim(before) for _ in range(3)]
    await before.release(boxes[1])
    after = Claims(broker, tmp_path / "claims")
    assert await after.recover() == 2
    assert sorted(broker.returned) == sorted([boxes[0].claim_id, boxes[2].claim_id])
    assert broker.claimed == {}
    assert await after.recover() == 0


async def test_the_journal_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOURNAL_NOTES", 20)
    claims = Claims(FakeBroker(), tmp_path / "claims")
    held = await claim(claims)
    for _ in range(100):
        await claims.release(await claim(claims))
    assert len((tmp_path / "claims").read_text().split()) <= 22
    assert f"+{held.claim_id}" in (tmp_path / "claims").read_text()
    await claims.release(held)
    assert (tmp_path / "claims").read_text() == ""


async def test_waiting_goes_on_past_one_request_to_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLAIM_SLICE_SECONDS", 0.05)
    broker = FakeBroker(size=1)
    claims = Claims(broker, tmp_path / "claims")
    first = await claim(claims)
    second = asyncio.create_task(claim(claims))
    await asyncio.sleep(0.2)
    await claims.release(first)
    assert (await second).id == "box-2"


async def test_no_sandbox_in_time_is_a_deadline_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLAIM_SLICE_SECONDS", 0.05)
    claims = Claims(FakeBroker(size=0), tmp_path / "claims")
    with pytest.raises(DeadlineError):
        await claim(claims, timeout=0.2)
