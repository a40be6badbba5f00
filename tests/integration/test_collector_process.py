"""The collector as a process, against a real store and a worker that answers at once: modes eval and rollout."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rljob.api.rljob_types import RLJob
from rljob.codec import pack
from rljob.ids import EpisodeId, PolicyVersion
from rljob.ledger import CompletionInfo, Lease, Ledger
from rljob.ledger.audit import audit
from rljob.settings import Settings
from rljob.weights import WeightStore
from rljob_trainer.batch import archived_steps, read_archive
from rljob_trainer.metrics import read_lines
from rljob_trainer.recipes import simulated
from rljob_trainer.testing import chain, job, trajectory

Reward = Callable[[Lease], float | None]
"""None: the attempt fails."""


def half(lease: Lease) -> float:
    return float(lease.episode.member % 2)


def manifest(mode: str, **rollout: Any) -> RLJob:
    made = job(validation={"samplesPerPrompt": 2, "passAt": [1, 2]}, rollout=rollout)
    return made.model_copy(update={"spec": made.spec.model_copy(update={"mode": mode})})


@pytest.fixture
def prepared(artifacts: Path) -> Path:
    folder = artifacts / "prepared"
    (folder / "model").mkdir(parents=True)
    simulated.build_model(folder / "model", simulated.OPTIONS, lambda _line: None)
    lines = [f'{{"task":"t","prompt":"{number}?"}}'.encode() for number in range(20)]
    data = b"".join(line + b"\n" for line in lines)
    split = {"rows": 20, "sha256": hashlib.sha256(data).hexdigest()}
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_bytes(data)
    (folder / "manifest.json").write_text(json.dumps({"train": split, "validation": split}))
    return artifacts


async def start(url: str, artifacts: Path, made: RLJob) -> asyncio.subprocess.Process:
    work = artifacts.parent / "work"
    work.mkdir(exist_ok=True)
    (work / "job.json").write_text(made.model_dump_json(exclude_unset=True))
    settings = Settings(
        component="collector",
        job_file=str(work / "job.json"),
        artifacts=str(artifacts),
        work_dir=str(work / "collector"),
        redis_url=url,
    )
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WITHOUT_TORCH),
        env={**os.environ, **settings.to_env()},
        stderr=asyncio.subprocess.PIPE,
    )


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
runpy.run_module("rljob_trainer.collect", run_name="__main__")
"""


async def ended(process: asyncio.subprocess.Process, seconds: float = 60) -> tuple[int, str]:
    _, err = await asyncio.wait_for(process.communicate(), seconds)
    return process.returncode or 0, err.decode()


@contextlib.asynccontextmanager
async def worker(
    url: str, artifacts: Path, made: RLJob, reward: Reward = half, pause: float = 0.0
) -> AsyncIterator[Ledger]:
    (artifacts / "completions").mkdir()
    async with await Ledger.connect(url, made.ledger_name) as ledger:
        log = artifacts / "completions" / "w.jsonl"
        task = asyncio.create_task(_work(ledger, log, reward, pause))
        try:
            yield ledger
        finally:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError), outcome


async def _work(ledger: Ledger, log: Path, reward: Reward, pause: float) -> None:
    await ledger.open_worker("w", "boot")
    while True:
        version = (await ledger.policy()).version
        for lease in (await ledger.lease("w", "boot", version, 4)).leases if version else ():
            await asyncio.sleep(pause)
            await _answer(ledger, lease, version, log, reward(lease))
        await asyncio.sleep(0.01)


async def _answer(
    ledger: Ledger, lease: Lease, version: PolicyVersion, log: Path, reward: float | None
) -> None:
    who = ("w", "boot", lease.episode, lease.attempt)
    if reward is None:
        await ledger.fail(*who, "the sandbox died")
        return
    made = chain(n=version.n, incarnation=version.incarnation, seed=lease.row_index)
    payload = pack(trajectory(str(lease.episode), reward, [made], attempt=lease.attempt))
    lowest = {"min_version": version.n, "max_version": version.n}
    info = CompletionInfo(reward=reward, outcome="completed", turns=2, **lowest)
    line = {"time": 0.0, "episode": str(lease.episode), "attempt": lease.attempt, "reward": reward}
    line |= {"outcome": "completed", "sha256": hashlib.sha256(payload).hexdigest()}
    with log.open("a") as file:
        file.write(json.dumps({**line, "answer": "sent"}) + "\n")
        file.flush()
        answer = await ledger.complete(*who, payload, info)
        file.write(json.dumps({**line, "answer": answer}) + "\n")


def result(artifacts: Path) -> dict[str, Any]:
    return json.loads((artifacts / "result.json").read_text())


async def kill_five_times(url: str, artifacts: Path, made: RLJob, ledger: Ledger) -> int:
    """SIGKILL in the middle of the work; how many were killed before the sixth, or an earlier one, came to the end."""
    rng = random.Random(3)
    for kills in range(6):
        process = await start(url, artifacts, made)
        async with asyncio.timeout(60):
            while (await ledger.snapshot()).incarnation <= kills and process.returncode is None:
                await asyncio.sleep(0.02)
        with contextlib.suppress(TimeoutError):
            code, err = await ended(process, rng.uniform(0.1, 0.6) if kills < 5 else 60)
            assert code == 0, err
            return kills
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    raise AssertionError("it never ended")


@pytest.mark.timeout(240)
async def test_killed_again_and_again_every_row_is_scored_once(
    valkey_url: str, prepared: Path
) -> None:
    made = manifest("eval")
    async with worker(valkey_url, prepared, made, pause=0.15) as ledger:
        kills = await kill_five_times(valkey_url, prepared, made, ledger)
        snapshot = await ledger.snapshot()
        assert (snapshot.phase, snapshot.validation) == ("Succeeded", {0: 0.5})
        assert snapshot.counts["leased"] == 40  # nothing was scored again because a collector died
    assert kills >= 1
    found = result(prepared)
    assert (found["score"], found["n"], found["returned"], found["completion_rate"]) == (
        0.5,
        40,
        40,
        1.0,
    )
    assert found["pass_at"] == {"1": 0.5, "2": 1.0}
    assert found["version"] == "1-0"
    assert len(read_lines(prepared / "metrics" / "validation.jsonl")) == 1
    lines = read_lines(prepared / "validation" / "step-000000.jsonl")
    assert len({line["episode"] for line in lines}) == len(lines) == 40
    assert not (prepared / "validation" / "parts").exists()


@pytest.mark.timeout(240)
async def test_killed_again_and_again_every_group_is_collected_once(
    valkey_url: str, prepared: Path
) -> None:
    made = manifest("rollout", groupSize=2, groups=150)
    async with worker(valkey_url, prepared, made, pause=0.03) as ledger:
        kills = await kill_five_times(valkey_url, prepared, made, ledger)
        report = await audit(prepared, ledger)
        assert report.ok, report
        assert (report.trained, report.evicted) == (300, 0)
        assert await ledger.finished() == "Succeeded"
    assert kills >= 1
    last = archived_steps(prepared, 0)
    rows = [
        group.group.row_index
        for step in range(1, last + 1)
        for group in read_archive(prepared, step)
    ]
    assert sorted(rows) == list(range(150))
    exported = [
        json.loads(line)
        for file in sorted((prepared / "export").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert len({line["episode"] for line in exported}) == len(exported) == 300
    found = result(prepared)
    assert (found["groups"], found["episodes"], found["reward_mean"]) == (150, 300, 0.5)
    assert [line["step"] for line in read_lines(prepared / "metrics" / "steps.jsonl")] == list(
        range(1, last + 1)
    )


async def test_one_pass_leaves_out_what_is_given_up_and_says_so(
    valkey_url: str, prepared: Path
) -> None:
    made = manifest("rollout", groupSize=2, maxAttempts=2, retryBackoffSeconds=0)
    doomed = {3, 7}

    def reward(lease: Lease) -> float | None:
        return None if lease.row_index in doomed and lease.episode.member == 1 else 1.0

    async with worker(valkey_url, prepared, made, reward) as ledger:
        assert (await ended(await start(valkey_url, prepared, made)))[0] == 0
        assert (await audit(prepared, ledger)).ok
    found = result(prepared)
    assert (found["groups"], found["groups_given_up"], found["episodes"]) == (18, 2, 36)
    assert found["completion_rate"] == pytest.approx(0.9)


async def test_an_episode_out_of_attempts_counts_nought_and_lowers_the_completion_rate(
    valkey_url: str, prepared: Path
) -> None:
    made = manifest("eval", maxAttempts=1)

    def reward(lease: Lease) -> float | None:
        return None if lease.row_index < 5 else 1.0

    async with worker(valkey_url, prepared, made, reward):
        assert (await ended(await start(valkey_url, prepared, made)))[0] == 0
    found = result(prepared)
    assert (found["score"], found["completion_rate"], found["dead"]) == (0.75, 0.75, 10)


@pytest.mark.parametrize("mode", ["eval", "rollout"])
async def test_where_nothing_comes_back_the_job_ends_with_the_reason(
    valkey_url: str, prepared: Path, mode: str
) -> None:
    made = manifest(mode, groupSize=2, maxAttempts=1)
    async with worker(valkey_url, prepared, made, lambda _lease: None) as ledger:
        code, err = await ended(await start(valkey_url, prepared, made))
        assert await ledger.finished() is None
    assert code == 2
    assert "the last: the sandbox died; see `rljob logs worker-0`" in err.splitlines()[-1]
    assert not (prepared / "result.json").exists()


@pytest.mark.parametrize("mode", ["eval", "rollout"])
async def test_told_to_stop_it_ends_well_and_the_next_one_goes_on(
    valkey_url: str, prepared: Path, mode: str
) -> None:
    made = manifest(mode, groupSize=2, groups=100)
    async with worker(valkey_url, prepared, made, pause=0.02) as ledger:
        process = await start(valkey_url, prepared, made)
        async with asyncio.timeout(30):
            while (await ledger.snapshot()).progress < 20:
                await asyncio.sleep(0.02)
        process.terminate()
        assert (await ended(process))[0] == 0
        assert await ledger.finished() is None
        assert (await ended(await start(valkey_url, prepared, made)))[0] == 0
        assert await ledger.finished() == "Succeeded"
        assert WeightStore(prepared).list() == [PolicyVersion(1, 0)]
        assert (await ended(await start(valkey_url, prepared, made)))[0] == 0  # finished before


async def test_a_newer_collector_fences_an_older_one(valkey_url: str, prepared: Path) -> None:
    made = manifest("eval")
    process = await start(valkey_url, prepared, made)
    async with await Ledger.connect(valkey_url, made.ledger_name) as ledger:
        async with asyncio.timeout(30):
            while not (await ledger.validation(0)).open:
                await asyncio.sleep(0.05)
        await ledger.open_trainer("newer")
        assert (await ended(process))[0] == 3


async def test_weights_of_another_job_are_never_scored(valkey_url: str, prepared: Path) -> None:
    other = prepared.parent / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    WeightStore(prepared).publish(PolicyVersion(1, 0), other, None)
    code, err = await ended(await start(valkey_url, prepared, manifest("eval")))
    assert code == 2
    assert "holds the weights of another job; name an empty folder" in err.splitlines()[-1]


async def test_an_exported_episode_says_everything_about_itself(
    valkey_url: str, prepared: Path
) -> None:
    made = manifest("rollout", groupSize=2, groups=1)
    async with worker(valkey_url, prepared, made):
        assert (await ended(await start(valkey_url, prepared, made)))[0] == 0
    lines = (prepared / "export" / "trajectories-000001.jsonl").read_text().splitlines()
    episode = json.loads(lines[1])
    assert EpisodeId.parse(episode["episode"]).member == 1
    assert (episode["group"], episode["reward"], episode["outcome"]) == ("t0-0", 1.0, "completed")
    (part,) = episode["chains"]
    assert sum(length for _, length in part["sampled"]) == len(part["logprobs"])
    assert [segment["sampled"] for segment in part["segments"]] == [False, True]
    assert all(segment["text"] for segment in part["segments"])
