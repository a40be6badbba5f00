"""Validation: episodes on held-out rows, scored against one version or a span of them.

    open ─► the ledger leases its episodes to engines ─► drain (2/s) ─► done, dead or stalled ─► files ─► score ─► close

A row out of attempts counts 0; a row that a stalled run never heard of does not count. A stalled run in which nothing
ended leaves no score at all.
Produces validation/step-N.bin (records as in groups.bin of a batch), validation/step-N.jsonl and a line of
metrics/validation.jsonl. Drained episodes stay in the ledger until `close`, so a crash before it loses none.
The first and the last run on a *settled* version: engines must stay on it, so `settled` holds back the next publication
until that run is done or has stalled. The others run in flight and record the span of versions that they saw.
One validation runs at a time; one that falls due while another runs is left out, and said so.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from rljob import telemetry
from rljob.api.rljob_types import RLJob
from rljob.clock import Clock
from rljob.codec import unpack
from rljob.errors import CorruptError
from rljob.ids import EpisodeId, PolicyVersion
from rljob.trajectory import Trajectory
from rljob_trainer.batch import LENGTH
from rljob_trainer.files import write_atomic
from rljob_trainer.metrics import append_line, mean, pass_at, read_lines, wilson_interval
from rljob_trainer.progress import Progress

if TYPE_CHECKING:
    from rljob.ledger import Ledger

_POLL_SECONDS = 0.5
_FIRST_SECONDS = 120.0
"""What the first episode may take at least: engines start, sandboxes fill, the whole episode runs."""
_PASS_REWARD = 1.0 - 1e-9
log = structlog.get_logger()


@dataclass
class _Run:
    """A validation that is open."""

    step: int
    version: PolicyVersion
    settled: bool
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Validator:
    """Runs the validations of one incarnation.

    Args:
        job: The manifest.
        artifacts: The artifact store.
        ledger: Where episodes are opened and drained.
        incarnation: Fencing token.
        num_rows: Validation rows; 0: nothing is ever validated.
        spawn: Starts the background task of a run; its failure must end the process.
        progress: Where to say what is waited for.
        clock: Time.
    """

    def __init__(
        self,
        job: RLJob,
        artifacts: Path,
        ledger: Ledger,
        incarnation: int,
        num_rows: int,
        spawn: Callable[[Any], Any],
        progress: Progress,
        clock: Clock,
    ) -> None:
        self._spec = job.spec.data.validation
        self._steps = job.spec.trainer.steps
        self._deadline_seconds = job.spec.lifecycle.progress_deadline_seconds
        self._artifacts, self._ledger, self._incarnation = artifacts, ledger, incarnation
        self._num_rows, self._spawn, self._progress, self._clock = num_rows, spawn, progress, clock
        self._run: _Run | None = None
        self._waited_for = False

    def is_pending(self, step: int) -> bool:
        """Whether the validation of `step` is due and not on record yet."""
        if self._spec is None or self._num_rows == 0:
            return False
        is_due = step in (0, self._steps) or step % self._spec.every_steps == 0
        return is_due and all(line["step"] != step for line in read_lines(self._metrics_path))

    async def open_if_due(self, step: int, version: PolicyVersion) -> None:
        """Start the validation of `step` where one is pending."""
        if not self.is_pending(step):
            return
        is_last = step == self._steps
        if is_last:
            await self.finished()
        if self._run is not None:
            log.warning("validation left out", step=step, still_running=self._run.step)
            return
        await self._open(_Run(step, version, settled=is_last or step == 0))

    async def open_again(self, resumed: int, step: int, version: PolicyVersion) -> None:
        """After a resume from checkpoint `resumed`, at `step`: go on with what its trainer left, in flight.

        The run of a step that was trained again is gone, with the weights that it scored: the present ones are scored.
        """
        missed = next((due for due in range(step, 0, -1) if self.is_pending(due)), None)
        if missed is None or missed == step:
            await self.open_if_due(step, version)
        elif missed > resumed:
            await self._open(_Run(step, version, settled=False))
        elif (await self._ledger.validation(missed)).open:
            await self._open(_Run(missed, version, settled=False))

    async def _open(self, run: _Run) -> None:
        samples = self._spec.samples_per_prompt if self._spec else 1
        arguments = (self._incarnation, run.step, run.version, self._num_rows, samples, run.settled)
        await self._ledger.open_validation(*arguments)
        self._run = run
        self._spawn(self._follow(run))

    async def settled(self) -> None:
        """Return when no run needs the engines to stay on their version."""
        if self._run is not None and self._run.settled:
            await self.finished()

    async def finished(self) -> None:
        """Return when nothing is running."""
        if self._run is None:
            return
        self._waited_for = True
        self._progress.waiting_for = f"validation of step {self._run.step}"
        await self._run.done.wait()
        self._waited_for = False
        self._progress.waiting_for = ""

    @property
    def _metrics_path(self) -> Path:
        return self._artifacts / "metrics" / "validation.jsonl"

    async def _follow(self, run: _Run) -> None:
        records, after = _Records(), ""
        ended, counted, seen, since = 0, 0, -1, self._clock.monotonic()
        while self._clock.monotonic() - since <= self._stall_seconds(ended):
            status = await self._ledger.validation(run.step)
            drained = await self._ledger.drain_validation(self._incarnation, run.step, after=after)
            after = drained[-1][0] if drained else after
            records.add([payload for _, payload in drained])
            ended = status.done + status.dead
            counted = max(ended, records.num + status.dead)  # some may have ended since `status`
            self._tell(ended, status.total)
            if ended >= status.total:
                break
            if ended != seen:
                seen, since = ended, self._clock.monotonic()
            await self._clock.sleep(_POLL_SECONDS)
        else:
            log.warning("validation stalled", step=run.step, done=ended, rows=self._num_rows)
        await self._close(run, records, counted)

    def _stall_seconds(self, ended: int) -> float:
        """How long nothing may end: half of what makes the whole job count as stuck, to give up before the job is.

        Before the first end it is no less than that, nor than what a cold start takes.
        """
        deadline = self._deadline_seconds
        return deadline / 2 if ended else max(deadline, _FIRST_SECONDS)

    def _tell(self, ended: int, total: int) -> None:
        self._progress.facts.update(validation_done=float(ended), validation_total=float(total))
        if self._waited_for:
            self._progress.waiting_for = f"validation: {ended} of {total}"

    async def _close(self, run: _Run, records: _Records, counted: int) -> None:
        records.write(self._artifacts / "validation", run.step)
        if counted:
            self._record(run, records.trajectories, counted)
        else:
            log.warning("validation without a score: no episode came back", step=run.step)
        await self._ledger.close_validation(self._incarnation, run.step)
        self._progress.facts.update(validation_total=0.0)
        self._run = None
        run.done.set()

    def _record(self, run: _Run, trajectories: Sequence[Trajectory], counted: int) -> None:
        """Write and tell the score of the `counted` episodes that came to an end."""
        assert self._spec is not None
        samples = self._spec.samples_per_prompt
        record: dict[str, Any] = {
            "step": run.step,
            "version": str(run.version),
            "settled": run.settled,
            "time": self._clock.now(),
            **score(trajectories, counted, samples, self._spec.pass_at),
            "asked": self._num_rows * samples,
        }
        append_line(self._metrics_path, record)
        log.info("validated", **record)
        telemetry.VALIDATION_SCORE.set(float(record["score"]))
        telemetry.VALIDATION_STEP.set(run.step)
        self._progress.facts.update(validation_score=record["score"])


class _Records:
    """The episodes of one validation, as drained."""

    def __init__(self) -> None:
        self._by_episode: dict[str, tuple[bytes, Trajectory]] = {}

    @property
    def num(self) -> int:
        """How many."""
        return len(self._by_episode)

    @property
    def trajectories(self) -> list[Trajectory]:
        """In the order of their episodes."""
        return [trajectory for _, trajectory in self._sorted()]

    def add(self, payloads: Sequence[bytes]) -> None:
        """Keep drained payloads; one that does not decode counts as not come back."""
        for payload in payloads:
            try:
                trajectory = unpack(payload)
            except CorruptError as error:
                log.warning("validation record left out", error=str(error))
                continue
            self._by_episode[trajectory.episode] = (payload, trajectory)

    def write(self, directory: Path, step: int) -> None:
        """Write `step-N.bin`, then `step-N.jsonl`."""
        blob = b"".join(LENGTH.pack(len(payload)) + payload for payload, _ in self._sorted())
        lines = b"".join(
            json.dumps(_line(trajectory)).encode() + b"\n" for trajectory in self.trajectories
        )
        write_atomic(directory / f"step-{step:06d}.bin", blob)
        write_atomic(directory / f"step-{step:06d}.jsonl", lines)

    def _sorted(self) -> list[tuple[bytes, Trajectory]]:
        return [self._by_episode[name] for name in sorted(self._by_episode, key=EpisodeId.parse)]


class Scorable(Protocol):
    """What a score needs of an episode."""

    @property
    def row_index(self) -> int:
        """Which row."""
        ...

    @property
    def reward(self) -> float:
        """Between 0 and 1 for pass@k to mean something."""
        ...

    @property
    def turns(self) -> int:
        """Assistant turns."""
        ...

    @property
    def num_action_tokens(self) -> int:
        """Sampled tokens."""
        ...

    @property
    def version_range(self) -> tuple[int, int]:
        """(oldest, newest) n."""
        ...


def score(
    trajectories: Sequence[Scorable], total: int, samples: int, ks: Sequence[int]
) -> dict[str, Any]:
    """What a validation says.

    Args:
        trajectories: Those that came back.
        total: Episodes that came to an end; one that did not come back, out of attempts, counts as reward 0.
        samples: Episodes per row.
        ks: The k of pass@k, each at most `samples`.
    """
    value = sum(trajectory.reward for trajectory in trajectories) / total if total else 0.0
    low, high = wilson_interval(value, total)
    passed: dict[int, int] = defaultdict(int)
    for trajectory in trajectories:
        passed[trajectory.row_index] += trajectory.reward >= _PASS_REWARD
    rows = max(1, len(passed), -(-total // samples))
    pass_at_k = {
        str(k): sum(pass_at(k, samples, count) for count in passed.values()) / rows for k in ks
    }
    spans = [
        trajectory.version_range for trajectory in trajectories if trajectory.num_action_tokens
    ]
    return {
        "score": value,
        "n": total,
        "returned": len(trajectories),
        "ci_low": low,
        "ci_high": high,
        "mean_turns": mean(trajectory.turns for trajectory in trajectories),
        "versions": [min(low for low, _ in spans), max(high for _, high in spans)]
        if spans
        else None,
        "pass_at": pass_at_k,
    }


def _line(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "episode": trajectory.episode,
        "reward": trajectory.reward,
        "outcome": trajectory.outcome,
        "turns": trajectory.turns,
        "versions": list(trajectory.version_range),
    }
