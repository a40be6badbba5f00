"""A task is ended even where a library loses the first cancellation."""

from __future__ import annotations

import asyncio

from rljob_operator.drivers import tasks


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost = 0

    async def forgetful() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                lost += 1
                if lost > 1:
                    raise

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)
    await tasks.end(task)
    assert task.cancelled()
    assert lost == 2


async def test_what_a_task_raised_stays_in_it() -> None:
    async def broken() -> None:
        raise ValueError

    task = asyncio.create_task(broken())
    await asyncio.wait({task})
    await tasks.end(task)
    assert isinstance(task.exception(), ValueError)
