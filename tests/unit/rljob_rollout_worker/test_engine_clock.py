"""The clock that stands still while no engine is ready."""

import asyncio

import pytest

from rljob.testing.clock import ManualClock
from rljob_rollout_worker.engine_clock import EngineClock, OutOfTimeError


class Switch:
    def __init__(self) -> None:
        self.on = True

    def __call__(self) -> bool:
        return self.on


async def test_it_runs_only_while_an_engine_is_ready() -> None:
    time, ready = ManualClock(), Switch()
    clock = EngineClock(time, ready)
    ticking = asyncio.create_task(clock.tick_loop())
    await time.advance(10)
    ready.on = False
    await time.advance(100)
    assert clock.seconds() == pytest.approx(10, abs=0.3)
    assert clock.away_seconds() == pytest.approx(100, abs=0.3)
    ready.on = True
    await time.advance(5)
    assert clock.seconds() == pytest.approx(15, abs=0.5)
    assert clock.away_seconds() == 0
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)


async def test_work_that_ends_in_time_gives_its_result() -> None:
    clock = EngineClock(ManualClock(), Switch())
    assert await clock.within(5, asyncio.sleep(0, "result")) == "result"


async def test_errors_of_the_work_come_through_as_they_are() -> None:
    async def fails() -> None:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="the work's own"):
        await EngineClock(ManualClock(), Switch()).within(5, fails())


async def test_work_that_does_not_end_is_cancelled_and_has_ended() -> None:
    ended = asyncio.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            ended.set()

    time = ManualClock()
    waiting = asyncio.create_task(EngineClock(time, Switch()).within(5, long()))
    await time.advance(5.1)
    with pytest.raises(OutOfTimeError):
        await waiting
    assert ended.is_set()


async def test_a_caller_that_is_cancelled_ends_the_work() -> None:
    ended = asyncio.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    waiting = asyncio.create_task(EngineClock(ManualClock(), Switch()).within(5, long()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert ended.is_set()
