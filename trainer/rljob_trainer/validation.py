"""Validation: episodes on held-out rows, scored against one version or a span of them.

    open ─► the ledger leases its episodes to engines ─► drain (1/s) ─► done, dead or stalled ─► close ─► score
                                                            │
                                                            └─► .partial-step-N.bin, so that a crash loses no record

Produces validation/step-N.bin (as groups.bin of a batch), validation/step-N.jsonl and a line of metrics/validation.jsonl.
The first and the last run on a *settled* version: engines must stay on it, so `settled` holds back the next publication
until that run is done or has stalled. The others run in flight and record the span of versions that they saw.
One validation runs at a time; one that falls due while another runs is left out, and said so.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from rljob.api.rljob_types import RLJob
from rljob.clock import Clock
from rljob.codec import unpack
from rljob.errors import CorruptError
from rljob.ids import EpisodeId, PolicyVersion
from rljob.trajectory import Trajectory
from rljob_trainer.files import write_atomic
from rljob_trainer.metrics import append_line, mean, pass_at, read_lines, wilson_interval
from rljob_trainer.progress import Progress

if TYPE_CHECKING:
    from rljob.ledger import Ledger

_LENGTH = struct.Struct("<I")
_POLL_SECONDS = 0.5
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
        # Half of what makes the whole job count as stuck, so that a stalled validation is given up before the job is.
        self._stall_seconds = job.spec.lifecycle.progress_deadline_seconds / 2
        self._artifacts, self._ledger, self._incarnation = artifacts, ledger, incarnation
        self._num_rows, self._spawn, self._progress, self._clock = num_rows, spawn, progress, clock
        self._run: _Run | None = None

    async def open_if_due(self, step: int, version: PolicyVersion) -> None:
        """Start the validation of `step` where one is due and not on record yet."""
        if not self._is_due(step) or self._is_recorded(step):
            return
        is_last = step == self._steps
        if is_last:
            await self.finished()
        if self._run is not None:
            log.warning("validation left out", step=step, still_running=self._run.step)
            return
        run = _Run(step, version, settled=is_last or step == 0)
        samples = self._spec.samples_per_prompt if self._spec else 1
        await self._ledger.open_validation(self._incarnation, step, version, self._num_rows, samples, run.settled)
        self._run = run
        self._spawn(self._follow(run))

    async def settled(self) -> None:
        """Return when no run needs the engines to stay on their version."""
        if self._run is not None and self._run.settled:
            await self._run.done.wait()

    async def finished(self) -> None:
        """Return when nothing is running."""
        if self._run is not None:
            await self._run.done.wait()

    def _is_due(self, step: int) -> bool:
        if self._spec is None or self._num_rows == 0:
            return False
        return step in (0, self._steps) or step % self._spec.every_steps == 0

    def _is_recorded(self, step: int) -> bool:
        return any(line["step"] == step for line in read_lines(self._metrics_path))

    @property
    def _metrics_path(self) -> Path:
        return self._artifacts / "metrics" / "validation.jsonl"

    async def _follow(self, run: _Run) -> None:
        files = _Files(self._artifacts, run.step)
        seen, since = -1, self._clock.monotonic()
        while True:
            status = await self._ledger.validation(run.step)
            files.add([payload for _, payload in await self._ledger.drain_validation(self._incarnation, run.step)])
            ended = status.done + status.dead
            self._progress.facts["validation"] = f"{ended} of {status.total}"
            if run.settled:
                self._progress.waiting_for = self._progress.waiting_for or f"validation: {ended} of {status.total}"
            if ended >= status.total or self._clock.monotonic() - since > self._stall_seconds:
                break
            if ended != seen:
                seen, since = ended, self._clock.monotonic()
            await self._clock.sleep(_POLL_SECONDS)
        if ended < status.total:
            log.warning("validation stalled", step=run.step, done=ended, total=status.total)
        await self._close(run, files, status.total)

    async def _close(self, run: _Run, files: _Files, total: int) -> None:
        await self._ledger.close_validation(self._incarnation, run.step)
        files.finish()
        k = self._spec.pass_at if self._spec else [1]
        samples = self._spec.samples_per_prompt if self._spec else 1
        record = {
            "step": run.step,
            "version": str(run.version),
            "settled": run.settled,
            **score(files.trajectories, total, samples, k),
        }
        append_line(self._metrics_path, record)
        log.info("validated", **record)
        self._progress.facts["validation_score"] = record["score"]
        self._run = None
        run.done.set()


class _Files:
    """The trajectories of one validation, on disk from the moment they are drained."""

    def __init__(self, artifacts: Path, step: int) -> None:
        directory = artifacts / "validation"
        directory.mkdir(parents=True, exist_ok=True)
        self._partial = directory / f".partial-step-{step:06d}.bin"
        self._final = directory / f"step-{step:06d}.bin"
        self._by_episode: dict[str, tuple[bytes, Trajectory]] = {}
        if self._partial.exists():
            self._collect(split_records(self._partial.read_bytes()))

    @property
    def trajectories(self) -> list[Trajectory]:
        """In the order of their episodes."""
        return [trajectory for _, trajectory in self._sorted()]

    def add(self, payloads: Sequence[bytes]) -> None:
        """Keep drained payloads."""
        if not payloads:
            return
        with self._partial.open("ab") as file:
            file.write(b"".join(_LENGTH.pack(len(payload)) + payload for payload in payloads))
        self._collect(payloads)

    def finish(self) -> None:
        """Write the final files."""
        lines = b"".join(json.dumps(_line(trajectory)).encode() + b"\n" for trajectory in self.trajectories)
        blob = b"".join(_LENGTH.pack(len(payload)) + payload for payload, _ in self._sorted())
        write_atomic(self._final, blob)
        write_atomic(self._final.with_suffix(".jsonl"), lines)
        self._partial.unlink(missing_ok=True)

    def _sorted(self) -> list[tuple[bytes, Trajectory]]:
        return [self._by_episode[name] for name in sorted(self._by_episode, key=EpisodeId.parse)]

    def _collect(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            try:
                trajectory = unpack(payload)
            except CorruptError as error:
                log.warning("validation record left out", error=str(error))
                continue
            self._by_episode.setdefault(trajectory.episode, (payload, trajectory))


def split_records(data: bytes) -> list[bytes]:
    """The whole records of a length-prefixed file; a torn last one is left out."""
    records, at = [], 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            break
        records.append(data[at : at + length])
        at += length
    return records


def score(trajectories: Sequence[Trajectory], total: int, samples: int, ks: Sequence[int]) -> dict[str, Any]:
    """What a validation says.

    Args:
        trajectories: Those that came back.
        total: Episodes asked for; what did not come back counts as reward 0.
        samples: Episodes per row.
        ks: The k of pass@k, each at most `samples`.
    """
    value = sum(trajectory.reward for trajectory in trajectories) / total if total else 0.0
    low, high = wilson_interval(value, total)
    passed: dict[int, int] = defaultdict(int)
    for trajectory in trajectories:
        passed[trajectory.row_index] += trajectory.reward >= _PASS_REWARD
    rows = max(1, total // samples)
    pass_at_k = {str(k): sum(pass_at(k, samples, count) for count in passed.values()) / rows for k in ks}
    spans = [trajectory.version_range for trajectory in trajectories if trajectory.num_action_tokens]
    return {
        "score": value,
        "n": total,
        "returned": len(trajectories),
        "ci_low": low,
        "ci_high": high,
        "mean_turns": mean(trajectory.turns for trajectory in trajectories),
        "versions": [min(low for low, _ in spans), max(high for _, high in spans)] if spans else None,
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
