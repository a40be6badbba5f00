"""The gate in front of a weight switch, where weights change only between batches."""

import asyncio
from collections.abc import Callable
from typing import Any

from rljob.codec import unpack
from rljob.ids import PolicyVersion
from rljob.ledger.types import LeaseReply
from rljob.testing.clock import ManualClock
from rljob.testing.ledger import FakeLedger
from rljob_rollout_worker.gate import HOLD_SECONDS, SwitchGate

OLD, NEW = PolicyVersion(1, 0), PolicyVersion(1, 1)
Make = Callable[..., Any]


class Scene:
    def __init__(self, *, finishes_batch: bool) -> None:
        self.clock, self.version, self.running = ManualClock(), OLD, 2
        self.handed_back = 0
        self.gate = SwitchGate(
            finishes_batch=finishes_batch,
            limit_seconds=100,
            clock=self.clock,
            current=lambda: self.version,
            num_running=lambda: self.running,
            hand_back=self.hand_back,
        )

    async def hand_back(self) -> None:
        self.handed_back, self.running = self.running, 0


async def test_it_waits_until_nothing_runs_and_leases_nothing_meanwhile() -> None:
    scene = Scene(finishes_batch=False)
    assert scene.gate.leases_may_start
    waiting = asyncio.create_task(scene.gate.before_switch(NEW))
    await scene.clock.advance(5)
    assert not waiting.done()
    assert not scene.gate.leases_may_start
    scene.running = 0
    await scene.clock.advance(1)
    assert waiting.done()
    assert not scene.gate.leases_may_start, "the engine still has the old version"
    scene.version = NEW
    assert scene.gate.leases_may_start


async def test_a_batch_that_has_begun_is_completed_first() -> None:
    scene = Scene(finishes_batch=True)
    waiting = asyncio.create_task(scene.gate.before_switch(NEW))
    scene.running = 0
    await scene.clock.advance(5)
    assert scene.gate.leases_may_start
    assert not waiting.done(), "the ledger may have more of this batch"
    scene.gate.exhausted = OLD
    await scene.clock.advance(1)
    assert waiting.done()


async def test_past_its_limit_what_runs_is_handed_back() -> None:
    scene = Scene(finishes_batch=False)
    waiting = asyncio.create_task(scene.gate.before_switch(NEW))
    await scene.clock.advance(99)
    assert scene.handed_back == 0
    await scene.clock.advance(2)
    assert waiting.done()
    assert scene.handed_back == 2


async def test_a_switch_that_failed_does_not_hold_leases_for_ever() -> None:
    scene = Scene(finishes_batch=False)
    scene.running = 0
    await scene.gate.before_switch(NEW)
    assert not scene.gate.leases_may_start
    await scene.clock.advance(HOLD_SECONDS + 1)
    assert scene.gate.leases_may_start


class OneBatch(FakeLedger):
    """Gives eight episodes per engine version, as admission does with B groups a step."""

    async def lease(self, worker: str, boot_id: str, engine: Any, free_slots: int) -> LeaseReply:
        allowed = 8 * (engine.n + 1) - sum(self.admitted.values())
        reply = await super().lease(worker, boot_id, engine, min(free_slots, max(allowed, 0)))
        self.admitted[engine.n] = self.admitted.get(engine.n, 0) + len(reply.leases)
        return reply

    admitted: dict[int, int]


async def test_in_sync_every_token_of_a_batch_has_one_version(house: Make) -> None:
    ledger = OneBatch(16)
    ledger.admitted = {}
    spec = {"rollout": {"schedule": "sync", "maxConcurrentEpisodes": 4}}
    home = house(ledger=ledger, spec=spec)

    async def slow(operation: str) -> None:
        await asyncio.sleep(0.01)

    home.gateway._fault = slow
    running = asyncio.create_task(home.run())
    while len(ledger.completed) < 3:
        await asyncio.sleep(0.005)
    await home.engine.switch(NEW)  # far too early: the gate holds it back
    await running
    spans = [unpack(payload).version_range for payload, _ in ledger.completed.values()]
    assert sorted(spans) == [(0, 0)] * 8 + [(1, 1)] * 8


async def test_without_a_gate_an_episode_goes_on_across_a_switch(house: Make) -> None:
    home = house(ledger=FakeLedger(1))
    assert home.engine.before_switch is None

    async def switch(operation: str) -> None:
        if operation == "turn" and home.gateway.open and home.gateway.specs:
            home.engine.current = PolicyVersion(1, home.engine.current.n + 1)

    home.gateway._fault = switch
    await home.run()
    ((payload, info),) = home.ledger.completed.values()
    assert unpack(payload).version_range == (1, 2) == (info.min_version, info.max_version)
