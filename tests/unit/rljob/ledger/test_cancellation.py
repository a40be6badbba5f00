"""A task that is cancelled inside a call of the ledger ends, whatever the client library makes of it."""

import asyncio

from rljob.ledger import Ledger, Report


async def test_a_cancelled_caller_ends(valkey_url: str, job_name: str) -> None:
    ledger = await Ledger.connect(valkey_url, job_name)

    async def report_for_ever() -> None:
        while True:
            await ledger.report("trainer", Report())

    for attempt in range(40):
        task = asyncio.create_task(report_for_ever())
        await asyncio.sleep(0.0001 * attempt)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=2)
        assert done, f"attempt {attempt} lost its cancellation"
    await ledger.aclose()
