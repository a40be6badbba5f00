"""May a run begin, or go on, here? Asked before anything is moved or started."""

from __future__ import annotations

from pathlib import Path

from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob.errors import MachineError, ManifestError, StoreError
from rljob.ledger import Ledger
from rljob_operator.drivers.folder import RunFolder, writable
from rljob_operator.policies.resume import changed_keys

_REDIS_SECONDS = 5.0
_FRESH_SECONDS = 30.0
"""A component that reported so lately belongs to a run that is alive."""

_OF_A_RUN = ("checkpoints", "batches", "weights")


def check(folder: RunFolder, job: RLJob, artifacts: Path, *, resume: bool) -> None:
    """Refuse to resume what cannot be resumed, and to begin on top of another run's artifacts.

    Raises:
        UserError: what is wrong.
    """
    if job.spec.store.artifacts:
        writable(artifacts, "spec.store.artifacts")
    if resume:
        _check_resume(folder, job, artifacts)
    elif job.spec.store.artifacts and any((artifacts / name).exists() for name in _OF_A_RUN):
        fix = "go on with it (--resume), or name an empty folder"
        raise MachineError(
            "spec.store.artifacts", f"{artifacts} holds the artifacts of an earlier run", fix
        )


def _check_resume(folder: RunFolder, job: RLJob, artifacts: Path) -> None:
    old = folder.read("job.json")
    if not old:
        raise MachineError(str(folder.root), "there is no run to resume", "run without --resume")
    before = RLJob.model_validate(old)
    succeeded = folder.read("status.json").get("phase") == conditions.PHASE_SUCCEEDED
    trains = before.spec.mode == "train"
    if succeeded and not (trains and job.spec.trainer.steps > before.spec.trainer.steps):
        fix = "run without --resume for a new one"
        more = ", or give it more spec.trainer.steps" if trains else ""
        raise MachineError(str(folder.root), "this run has succeeded already", fix + more)
    for problem in changed_keys(before, job):
        raise problem
    if trains and job.spec.trainer.steps < (done := _steps_done(folder, artifacts)):
        problem = f"is {job.spec.trainer.steps}, but the run has trained {done} steps already"
        raise ManifestError("spec.trainer.steps", problem, f"give it {done} or more")


def _steps_done(folder: RunFolder, artifacts: Path) -> int:
    """As the last driver saw it, or as the checkpoints say where a driver ended before it looked."""
    saved = artifacts.glob("checkpoints/step-*/state.json")
    steps = [int(path.parent.name.removeprefix("step-")) for path in saved]
    return max([int(folder.read("status.json").get("step") or 0), *steps])


async def check_redis(url: str, job: str, *, resume: bool) -> None:
    """A Redis of the person's own must answer and serve no living run of this name; a fresh one clears it.

    Raises:
        MachineError: it does not answer, or another run of this name uses it.
    """
    where = "spec.store.redis.url"
    try:
        async with await Ledger.connect(url, job, deadline_seconds=_REDIS_SECONDS) as ledger:
            snapshot = await ledger.snapshot()
            if snapshot.phase is None and any(
                report.age_seconds < _FRESH_SECONDS for report in snapshot.reports.values()
            ):
                fix = "stop that run (or wait half a minute if it was killed), or change metadata.name"
                raise MachineError(where, f"a living run named {job} uses this Redis", fix)
            if not resume:
                await ledger.destroy()
    except StoreError as error:
        fix = "start it, or leave url out to get a Valkey of the job's own"
        raise MachineError(where, str(error), fix) from None
