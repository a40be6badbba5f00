"""`python -m rljob_trainer.main`: the trainer component.

Exit codes: 0 the job is trained, or SIGTERM, which leaves a checkpoint of the last trained step behind (a second one
ends at once); 2 bad input (the last line of stderr says which); 3 fenced by a newer trainer.
Any other end is a crash, from which the next start resumes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from rljob.clock import SystemClock
from rljob.errors import FencedError, MachineError, UserError
from rljob.ids import new_boot_id
from rljob.settings import Settings
from rljob_trainer.backends.base import create
from rljob_trainer.checkpoint import Checkpoints
from rljob_trainer.loop import Trainer, train
from rljob_trainer.progress import Progress
from rljob_trainer.stopping import keep_trained

if TYPE_CHECKING:
    from rljob.ledger import Ledger

EXIT_FENCED = 3
log = structlog.get_logger()


def main() -> int:
    """Run until trained, fenced or told to stop."""
    from rljob.telemetry import configure_logging

    configure_logging("trainer")
    try:
        settings = Settings.from_env()
        return asyncio.run(_until_signalled(settings))
    except UserError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the driver shows the last line
        return error.exit_code
    except FencedError as error:
        log.error("fenced", error=str(error))
        return EXIT_FENCED


async def _until_signalled(settings: Settings) -> int:
    """Every moment is a safe one to stop at; the first SIGTERM lets `stopping` keep what it can, a second does not."""
    job = asyncio.create_task(run(settings))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, job.cancel)
    try:
        await job
    except asyncio.CancelledError:
        log.info("stopped")
    except BaseExceptionGroup as group:
        raise _first(group) from group
    return 0


def _first(group: BaseExceptionGroup) -> BaseException:
    """The failure that ended a task group; being fenced outranks what followed from it."""
    fenced, rest = group.split(FencedError)
    found = fenced or rest
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found or group


async def run(settings: Settings) -> None:
    """Connect, start the backend, train, and say that the job succeeded."""
    from rljob.ledger import Ledger, LedgerConfig
    from rljob.telemetry import serve

    job = settings.job()
    rows = _prepared_rows(Path(settings.artifacts))
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


def _prepared_rows(artifacts: Path) -> dict[str, Any]:
    try:
        return json.loads((artifacts / "prepared" / "manifest.json").read_text())
    except OSError as error:
        raise MachineError(
            str(artifacts / "prepared"),
            f"not prepared ({error.strerror})",
            "run the prepare component first",
        ) from None


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The backend's thread may be in the middle of a step or of an import; nothing that it could still do is needed.
    os._exit(code)
