"""The trainer dies at every point at which it may, on a real store: the line that survives trains every group once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob.clock import SystemClock
from rljob.codec import pack
from rljob.ids import PolicyVersion
from rljob.ledger import CompletionInfo, Lease, Ledger, LedgerConfig
from rljob.ledger.audit import audit
from rljob.weights import WeightStore
from rljob_trainer.backends.simulated import SimulatedBackend
from rljob_trainer.batch import read_archive
from rljob_trainer.loop import Trainer, train
from rljob_trainer.metrics import read_lines
from rljob_trainer.progress import Progress
from rljob_trainer.testing import chain, job, trajectory

STEPS, ROWS = 3, 3
JOB = job(
    steps=STEPS,
    groupsPerStep=2,
    checkpoint={"everySteps": 2, "keep": 1},
    rollout={"groupSize": 2, "maxStaleness": 2, "maxConcurrentEpisodes": 8},
    validation={"everySteps": 100},
)


class KilledError(BaseException):
    """Stands for the process's end: nothing catches it."""


class QuickClock(SystemClock):
    """Pauses are a hundredth, so that polling does not set the pace of the test."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 100)


class Fuse:
    """Counts the points that the trainer passes, and kills it at one of them, before or after the call there."""

    def __init__(self, kill_at: int | None) -> None:
        self.points: list[str] = []
        self.kill_at = kill_at

    def pass_point(self, name: str) -> None:
        self.points.append(name)
        if len(self.points) - 1 == self.kill_at:
            raise KilledError(name)


class Wrapped:
    """An object whose named methods pass a point of the fuse before and after."""

    def __init__(self, inner: Any, fuse: Fuse, names: str) -> None:
        self._inner, self._fuse, self._names = inner, fuse, names.split()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._names:
            return found
        return (
            self._asynchronous(name, found)
            if asyncio.iscoroutinefunction(found)
            else self._blocking(name, found)
        )

    def _asynchronous(self, name: str, call: Any) -> Any:
        async def wrapped(*arguments: Any, **keywords: Any) -> Any:
            self._fuse.pass_point(f"before {name}")
            answer = await call(*arguments, **keywords)
            self._fuse.pass_point(f"after {name}")
            return answer

        return wrapped

    def _blocking(self, name: str, call: Any) -> Any:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            self._fuse.pass_point(f"before {name}")
            answer = call(*arguments, **keywords)
            self._fuse.pass_point(f"after {name}")
            return answer

        return wrapped


@contextlib.contextmanager
def renames_pass(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is written under a temporary name passes a point before and after it gets its own."""
    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(Path, name, _passing(fuse, getattr(Path, name)))
        yield


def _passing(fuse: Fuse, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(path: Path, target: Any) -> Any:
        fuse.pass_point(f"before the rename of {Path(target).name}")
        answer = original(path, target)
        fuse.pass_point(f"after the rename of {Path(target).name}")
        return answer

    return wrapped


class Rollouts:
    """A worker with one engine: leases, answers at once, keeps a completion log."""

    def __init__(self, ledger: Ledger, artifacts: Path) -> None:
        self._ledger, self._log = ledger, artifacts / "completions" / "w.jsonl"
        self._log.parent.mkdir(parents=True)
        self._clock = QuickClock()

    async def run(self) -> None:
        await self._ledger.open_worker("w", "boot")
        while True:
            version = (await self._ledger.policy()).version
            if version is not None:
                for lease in (await self._ledger.lease("w", "boot", version, 4)).leases:
                    await self._complete(lease, version)
            await self._clock.sleep(0.5)

    async def _complete(self, lease: Lease, version: PolicyVersion) -> None:
        reward = float(lease.episode.member % 2)
        made = chain(n=version.n, incarnation=version.incarnation, seed=lease.row_index)
        payload = pack(trajectory(str(lease.episode), reward, [made], attempt=lease.attempt))
        info = CompletionInfo(
            reward=reward, outcome="completed", min_version=version.n, max_version=version.n
        )
        answer = await self._ledger.complete(
            "w", "boot", lease.episode, lease.attempt, payload, info
        )
        line = {
            "time": 0.0,
            "episode": str(lease.episode),
            "attempt": lease.attempt,
            "answer": answer,
        }
        line |= {
            "reward": reward,
            "outcome": "completed",
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")


@contextlib.asynccontextmanager
async def rollouts(url: str, name: str, artifacts: Path) -> AsyncIterator[Ledger]:
    ledger = await Ledger.connect(url, name)
    await ledger.initialise(LedgerConfig.from_job(JOB, num_rows=100, data_hash="d"))
    task = asyncio.create_task(Rollouts(ledger, artifacts).run())
    try:
        yield ledger
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await ledger.aclose()


async def run_trainer(ledger: Ledger, artifacts: Path, fuse: Fuse) -> SimulatedBackend:
    backend = SimulatedBackend()
    trainer = Trainer(
        job=JOB,
        artifacts=artifacts,
        scratch=artifacts / "scratch",
        ledger=Wrapped(
            ledger,
            fuse,
            "resume take archived commit held_versions open_validation close_validation finish",
        ),
        incarnation=await ledger.open_trainer(f"boot-{id(fuse)}"),
        backend=Wrapped(backend, fuse, "load train_step save export_weights"),
        store=Wrapped(WeightStore(artifacts), fuse, "publish prune"),
        progress=Progress(),
        clock=QuickClock(),
        num_validation_rows=ROWS,
    )
    with contextlib.closing(backend):
        await asyncio.wait_for(train(trainer), 30)
    trainer.thread.shutdown()
    return backend


async def killed_at(
    point: int | None, url: str, name: str, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> Fuse:
    """Run until killed at `point`, run again to the end, check what is left. Gives what the first run passed."""
    fuse = Fuse(point)
    async with rollouts(url, name, artifacts) as ledger:
        backend = await until_killed(ledger, artifacts, fuse, monkeypatch)
        if backend is None:
            backend = await run_trainer(ledger, artifacts, Fuse(None))
        await check(ledger, artifacts, backend)
    return fuse


async def until_killed(
    ledger: Ledger, artifacts: Path, fuse: Fuse, monkeypatch: pytest.MonkeyPatch
) -> SimulatedBackend | None:
    """The backend of a trainer that came to its end; None of one that was killed."""
    with renames_pass(fuse, monkeypatch):
        try:
            return await run_trainer(ledger, artifacts, fuse)
        except* KilledError:
            pass
    return None


async def check(ledger: Ledger, artifacts: Path, backend: SimulatedBackend) -> None:
    trained = [
        sorted(
            item.episode for group in read_archive(artifacts, step) for item in group.trajectories
        )
        for step in range(1, STEPS + 1)
    ]
    assert backend.history == trained, (
        "the weights are not the result of the archived batches, each once, in order"
    )
    episodes = [episode for batch in trained for episode in batch]
    assert len(episodes) == len(set(episodes)) == STEPS * 2 * 2
    report = await audit(artifacts, ledger)
    assert report.ok, report
    assert await ledger.finished() == "Succeeded"
    assert [line["step"] for line in read_lines(artifacts / "metrics" / "steps.jsonl")] == [1, 2, 3]
    scored = read_lines(artifacts / "metrics" / "validation.jsonl")
    assert [(line["step"], line["returned"]) for line in scored] == [(0, ROWS), (STEPS, ROWS)]
    policy = await ledger.policy()
    assert policy.step == STEPS
    assert policy.version
    assert WeightStore(artifacts).verify(policy.version).digest == policy.digest


@pytest.mark.timeout(300)
async def test_a_trainer_killed_at_any_point_leaves_every_group_trained_once(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = (await killed_at(None, valkey_url, "whole", tmp_path / "whole", monkeypatch)).points
    assert {"after train_step", "before commit", "after archived", "after publish"} <= set(points)
    for point in range(len(points)):
        await killed_at(point, valkey_url, f"cut-{point}", tmp_path / f"cut-{point}", monkeypatch)
