"""Told to stop: what was trained since the newest checkpoint is kept, so that a resume does not train it again.

    SIGTERM ─► the loop's task is cancelled ─► what the backend's thread does ends ─► checkpoint, if there is news

A step that is being trained is finished: its batch is archived and its arithmetic cannot be interrupted. Whether it was
committed does not matter: as after any crash, the next trainer publishes what the checkpoint holds. A second SIGTERM,
or the end of the grace period, may come at any moment; a checkpoint is whole or absent.
"""

from __future__ import annotations

import asyncio

import structlog

from rljob_trainer.checkpoint import Checkpoints
from rljob_trainer.loop import Trainer, write_checkpoint

log = structlog.get_logger()


async def keep_trained(trainer: Trainer) -> int | None:
    """Write the checkpoint of the last trained step where the newest one is older. Gives its step, or None."""
    if trainer.validator is None:
        return None  # the backend is still being loaded: there is nothing to keep, and nothing to wait for
    loop = asyncio.get_running_loop()
    step = await loop.run_in_executor(
        trainer.thread, _keep, trainer, trainer.validator.is_pending(0)
    )
    log.info("told to stop", checkpoint=step)
    return step


def _keep(trainer: Trainer, first_is_pending: bool) -> int | None:
    checkpoints, record = (
        Checkpoints(trainer.artifacts, trainer.job.spec.trainer.checkpoint.keep),
        trainer.trained,
    )
    if record is None or first_is_pending:  # version 0 would be gone before it was scored
        return None
    newest = checkpoints.newest()
    if newest is not None and newest.step >= record["step"]:
        return None
    write_checkpoint(trainer, checkpoints, record)
    return int(record["step"])
