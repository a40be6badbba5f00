"""Slots: a limit, an order, and no slot lost to a cancellation."""

import asyncio

import pytest

from rljob_rollout_worker.slots import Slots


async def test_no_more_than_the_limit_are_inside() -> None:
    slots, most = Slots(3), 0

    async def visit() -> None:
        nonlocal most
        async with slots.slot((0, 0)):
            most = max(most, slots.in_use)
            await asyncio.sleep(0)

    await asyncio.gather(*(visit() for _ in range(20)))
    assert (most, slots.in_use, slots.waiting) == (3, 0, 0)


async def test_the_most_urgent_waiter_is_next() -> None:
    slots, order = Slots(1), []
    await slots.enter((0, 0))

    async def visit(priority: tuple[int, int]) -> None:
        async with slots.slot(priority):
            order.append(priority)

    tasks = [asyncio.create_task(visit(p)) for p in [(1, 5), (1, 2), (0, 9), (1, 2)]]
    await asyncio.sleep(0)
    assert slots.waiting == 4
    slots.leave()
    await asyncio.gather(*tasks)
    assert order == [(0, 9), (1, 2), (1, 2), (1, 5)]


async def test_a_waiter_that_is_cancelled_when_its_turn_comes_passes_it_on() -> None:
    slots = Slots(1)
    await slots.enter((0, 0))
    first = asyncio.create_task(slots.enter((0, 0)))
    second = asyncio.create_task(slots.enter((0, 1)))
    await asyncio.sleep(0)
    slots.leave()
    first.cancel()
    await second
    assert first.cancelled()
    assert slots.in_use == 1


async def test_a_waiter_that_is_cancelled_before_is_skipped() -> None:
    slots = Slots(1)
    await slots.enter((0, 0))
    first = asyncio.create_task(slots.enter((0, 0)))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    slots.leave()
    assert slots.in_use == 0


def test_a_stage_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        Slots(0)
