"""The trainer's loop: stream in, weights out.

              ┌──────────────────────────────────────────────────────────────────────────────┐
              ▼                                                                              │
    take ─► archive ─► archived ─► advantages ─► train ─► checkpoint (if due) ─► publish ─► commit ─► steps.jsonl
                                                                 ▲                  ▲
                                  archived batches after a crash ┘                  └ held back by a settled validation

Consumes complete groups (ledger) and, after a crash, archived batches. Produces batches/, checkpoints/, weights/,
metrics/, validation/. Waits for groups, and before publishing for a settled validation. Every arrow may be the last
thing this process does: the next trainer loads the newest checkpoint s, trains the archived batches s+1 … again as
they were, and goes on from there. What a batch holds is decided once, by `take`; that it is trained is decided by
`commit` or, on resume, by the checkpoint. So in the line that survives every group is trained exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from rljob import telemetry
from rljob.api.rljob_types import RLJob
from rljob.clock import Clock
from rljob.ids import PolicyVersion
from rljob_trainer.backends.base import Backend, TrainRow
from rljob_trainer.batch import Group, archived_groups, archived_steps, read_archive
from rljob_trainer.checkpoint import Checkpoints
from rljob_trainer.intake import Intake
from rljob_trainer.metrics import StepLog
from rljob_trainer.progress import Progress, report, report_loop
from rljob_trainer.publish import Publisher, first_canary
from rljob_trainer.step import StepResult, train_on
from rljob_trainer.validation import Validator

if TYPE_CHECKING:
    from rljob.ledger import Ledger
    from rljob.weights import WeightStore

T = TypeVar("T")
_REASSERTED_STEPS = 256
"""Archived batches that a resume names to the ledger: far more than a store that lost writes can have lost."""
log = structlog.get_logger()


@dataclass
class Trainer:
    """Everything the loop holds. Built once per incarnation by `main`, or by a test with fakes."""

    job: RLJob
    artifacts: Path
    scratch: Path
    ledger: Ledger
    incarnation: int
    backend: Backend
    store: WeightStore
    progress: Progress
    clock: Clock
    num_validation_rows: int
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "backend"))
    """Every call of the backend runs here: torch keeps state per thread, and the event loop stays free."""
    version: PolicyVersion = PolicyVersion(0, 0)
    digest: str = ""
    rows: list[TrainRow] = field(default_factory=list)
    """Of the last batch: where the next canary comes from."""
    trained: dict[str, Any] | None = None
    """Record of the step whose weights the backend holds; None before the first, and while one is being trained."""
    validator: Validator | None = None

    async def blocking(self, what: str, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call on the backend's thread and add its seconds to `what`."""
        began = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, call, *arguments)
        finally:
            seconds = time.monotonic() - began
            self.progress.spend(what, seconds)
            telemetry.TRAINER_PHASE_SECONDS.observe(seconds, phase=what)


async def train(trainer: Trainer) -> None:
    """Train to the last step and say that the job succeeded. A background task that fails ends it."""
    async with asyncio.TaskGroup() as tasks:
        reports = tasks.create_task(report_loop(trainer.ledger, trainer.progress, trainer.clock))
        await start(trainer)
        trainer.validator = Validator(
            trainer.job,
            trainer.artifacts,
            trainer.ledger,
            trainer.incarnation,
            trainer.num_validation_rows,
            tasks.create_task,
            trainer.progress,
            trainer.clock,
        )
        await step_loop(trainer, trainer.validator)
        reports.cancel()
    await report(trainer.ledger, trainer.progress)
    await trainer.ledger.finish(trainer.incarnation, "Succeeded")
    await trainer.blocking("closing", trainer.backend.close)


async def start(trainer: Trainer) -> None:
    """Load the prepared model into the backend: for verl the better part of half a minute."""
    spec = trainer.job.spec.trainer
    trainer.progress.waiting_for = f"starting backend {spec.backend}"
    model = trainer.artifacts / "prepared" / "model"
    begin = trainer.backend.start
    await trainer.blocking(
        "starting", begin, model, spec.replicas, spec.optimizer, spec.micro_batch_tokens, spec.seed
    )
    trainer.progress.waiting_for = ""


async def step_loop(trainer: Trainer, validator: Validator) -> None:
    """See the module's picture."""
    spec, artifacts = trainer.job.spec.trainer, trainer.artifacts
    checkpoints, steps = Checkpoints(artifacts, spec.checkpoint.keep), StepLog(artifacts)
    publisher = Publisher(
        trainer.backend, trainer.store, trainer.scratch, first_canary(artifacts / "prepared")
    )
    intake = Intake(
        trainer.ledger,
        trainer.incarnation,
        artifacts,
        spec.groups_per_step,
        trainer.progress,
        trainer.clock,
    )
    resumed, archived = await resume(trainer, checkpoints, steps)
    # Version 0 is scored before it is gone; otherwise nothing is published before the last archived batch is trained.
    if resumed == archived or (resumed == 0 and validator.is_pending(0)):
        await publish_and_commit(trainer, publisher, resumed)
        await validator.open_again(resumed, resumed, trainer.version)

    for step in range(resumed + 1, spec.steps + 1):
        groups = (
            read_archive(artifacts, step) if step <= archived else await intake.next_batch(step)
        )
        record = await train_step(trainer, step, groups)
        if step % spec.checkpoint.every_steps == 0 or step == spec.steps:
            await save(trainer, checkpoints, record)
        if step < archived:
            steps.append(record)
            continue
        if step % spec.weights.publish_every_steps == 0 or step in (archived, spec.steps):
            await validator.settled()
            await publish_and_commit(trainer, publisher, step)
        else:
            await commit(trainer, step)
        steps.append(record)
        if step == archived:
            await validator.open_again(resumed, step, trainer.version)
        else:
            await validator.open_if_due(step, trainer.version)
    await validator.finished()


async def resume(trainer: Trainer, checkpoints: Checkpoints, steps: StepLog) -> tuple[int, int]:
    """Load the newest checkpoint and tell the ledger. Gives its step, and the last step whose batch is archived."""
    found = checkpoints.newest()
    if found is not None:
        trainer.progress.waiting_for = f"loading the checkpoint of step {found.step}"
        await trainer.blocking("starting", trainer.backend.load, found.path)
        trainer.progress.waiting_for = ""
    resumed = found.step if found else 0
    archived = archived_steps(trainer.artifacts, resumed)
    groups = archived_groups(trainer.artifacts, archived, _REASSERTED_STEPS)
    await trainer.ledger.resume(
        trainer.incarnation, resumed, archived_step=archived, archived_groups=groups
    )
    steps.rewind(resumed, found.state.get("record") if found else None)
    log.info("resumed", checkpoint=resumed, archived=archived)
    return resumed, archived


async def train_step(trainer: Trainer, step: int, groups: list[Group]) -> dict[str, Any]:
    """One optimizer step, told to whoever watches. Gives its record."""

    def work() -> StepResult:
        # on the thread, which goes on when this task is cancelled: `stopping` asks afterwards what it holds
        trainer.trained = None
        result = train_on(trainer.backend, trainer.job, step, groups)
        trainer.trained = result.record
        return result

    result = await trainer.blocking("training", work)
    trainer.rows = result.rows
    trainer.progress.tell(result.record)
    telemetry.show_step(result.record)
    log.info("trained", **result.record)
    return result.record


async def save(trainer: Trainer, checkpoints: Checkpoints, record: dict[str, Any]) -> None:
    """Write the checkpoint of a step just trained."""
    await trainer.blocking("checkpoint", write_checkpoint, trainer, checkpoints, record)


def write_checkpoint(trainer: Trainer, checkpoints: Checkpoints, record: dict[str, Any]) -> None:
    """Write the checkpoint of the step that `record` tells of. Runs on the backend's thread."""
    data = trainer.job.spec.data.train
    state = {
        "incarnation": trainer.incarnation,
        "published": {"version": str(trainer.version), "digest": trainer.digest},
        "sampler": {"seed": data.seed, "source": data.source, "steps": record["step"]},
        "record": record,
    }
    checkpoints.save(record["step"], trainer.backend.save, state)


async def publish_and_commit(trainer: Trainer, publisher: Publisher, step: int) -> None:
    """Publish the present weights as `{incarnation}-{step}`, make them the policy, and prune older ones."""
    version = PolicyVersion(trainer.incarnation, step)
    trainer.digest = await trainer.blocking("publishing", publisher.publish, version, trainer.rows)
    trainer.version = version
    await commit(trainer, step)
    held = await trainer.ledger.held_versions()
    await trainer.blocking(
        "publishing", trainer.store.prune, trainer.job.spec.trainer.weights.keep, held
    )


async def commit(trainer: Trainer, step: int) -> None:
    """`step` is trained and the newest published version is the policy: one write."""
    await trainer.ledger.commit(trainer.incarnation, step, trainer.version, trainer.digest)
    telemetry.TRAINER_STEP.set(step)
    telemetry.POLICY_VERSION.set(trainer.version.n)
