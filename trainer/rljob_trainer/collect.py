"""`python -m rljob_trainer.collect`: what modes `eval` and `rollout` have in the trainer's place. Imports no torch.

    open_trainer ─► publish the prepared model ─► score (eval) │ collect (rollout) ─► result.json ─► finished

Exit codes as in `component`. Every moment is a safe one to stop at: what was scored or archived stays.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from rljob.clock import SystemClock
from rljob.ids import new_boot_id
from rljob.settings import Settings
from rljob_trainer.collector import NAME, Collector, publish_prepared
from rljob_trainer.component import prepared_rows, run_and_exit
from rljob_trainer.gathering import gather
from rljob_trainer.progress import Progress, report, report_loop
from rljob_trainer.scoring import score_rows

if TYPE_CHECKING:
    from rljob.ledger import Ledger

log = structlog.get_logger()


async def run(settings: Settings) -> None:
    """Connect, publish, do the mode's work, and say that the job succeeded."""
    from rljob.ledger import Ledger, LedgerConfig
    from rljob.telemetry import serve

    job = settings.job()
    split = "validation" if job.spec.mode == "eval" else "train"
    rows = prepared_rows(Path(settings.artifacts))[split]
    async with AsyncExitStack() as stack:
        stack.enter_context(serve(settings))
        ledger = await Ledger.connect(settings.redis_url, job.ledger_name)
        stack.push_async_callback(ledger.aclose)
        await ledger.initialise(LedgerConfig.from_job(job, rows["rows"], rows["sha256"]))
        if await ledger.finished() == "Succeeded":
            log.info("finished before")
            return
        await work(await _open(settings, ledger, rows["rows"]))


async def _open(settings: Settings, ledger: Ledger, num_rows: int) -> Collector:
    from rljob.weights import WeightStore

    job, artifacts = settings.job(), Path(settings.artifacts)
    known = [version.incarnation for version in WeightStore(artifacts).list()]
    incarnation = await ledger.open_trainer(new_boot_id(), at_least=max(known, default=0))
    log.info("started", incarnation=incarnation, mode=job.spec.mode)
    version, digest = await asyncio.to_thread(publish_prepared, artifacts, incarnation)
    return Collector(
        job=job,
        artifacts=artifacts,
        ledger=ledger,
        incarnation=incarnation,
        version=version,
        digest=digest,
        num_rows=num_rows,
        progress=Progress(component=NAME),
        clock=SystemClock(),
    )


async def work(collector: Collector) -> None:
    """Do it all, with reports in the background, whose failure ends it."""
    async with asyncio.TaskGroup() as tasks:
        reports = tasks.create_task(
            report_loop(collector.ledger, collector.progress, collector.clock)
        )
        await (score_rows(collector) if collector.job.spec.mode == "eval" else gather(collector))
        reports.cancel()
    await report(collector.ledger, collector.progress)
    await collector.ledger.finish(collector.incarnation, "Succeeded")


if __name__ == "__main__":
    run_and_exit(NAME, run)
