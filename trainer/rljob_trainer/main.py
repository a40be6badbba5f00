"""`python -m rljob_trainer.main`: the trainer component. Exit codes as in `component`.

SIGTERM leaves a checkpoint of the last trained step behind; a second one ends at once.
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
from rljob_trainer.backends.base import create
from rljob_trainer.checkpoint import Checkpoints
from rljob_trainer.component import prepared_rows, run_and_exit
from rljob_trainer.loop import Trainer, train
from rljob_trainer.progress import Progress
from rljob_trainer.stopping import keep_trained

if TYPE_CHECKING:
    from rljob.ledger import Ledger

log = structlog.get_logger()


async def run(settings: Settings) -> None:
    """Connect, start the backend, train, and say that the job succeeded."""
    from rljob.ledger import Ledger, LedgerConfig
    from rljob.telemetry import serve

    job = settings.job()
    rows = prepared_rows(Path(settings.artifacts))
    async with AsyncExitStack() as stack:
        stack.enter_context(serve(settings))
        ledger = await Ledger.connect(settings.redis_url, job.ledger_name)
        stack.push_async_callback(ledger.aclose)
        await ledger.initialise(
            LedgerConfig.from_job(job, rows["train"]["rows"], rows["train"]["sha256"])
        )
        if (
            await ledger.finished() == "Succeeded"
            and (await ledger.policy()).step >= job.spec.trainer.steps
        ):
            log.info("finished before")
            return
        await _train(settings, ledger, rows.get("validation", {}).get("rows", 0))


async def _train(settings: Settings, ledger: Ledger, num_validation_rows: int) -> None:
    from rljob.weights import WeightStore

    job, artifacts, spec = settings.job(), Path(settings.artifacts), settings.job().spec.trainer
    progress = Progress()
    newest = Checkpoints(artifacts, spec.checkpoint.keep).newest()
    at_least = int(newest.state["incarnation"]) if newest else 0
    incarnation = await ledger.open_trainer(new_boot_id(), at_least=at_least)
    log.info("started", incarnation=incarnation, backend=spec.backend)
    trainer = Trainer(
        job=job,
        artifacts=artifacts,
        scratch=Path(settings.work_dir),
        ledger=ledger,
        incarnation=incarnation,
        backend=create(spec.backend),
        store=WeightStore(artifacts),
        progress=progress,
        clock=SystemClock(),
        num_validation_rows=num_validation_rows,
    )
    try:
        await train(trainer)
    except asyncio.CancelledError:
        await keep_trained(trainer)
        raise


if __name__ == "__main__":
    run_and_exit("trainer", run)
