"""The trainer as a process: its exit codes, and `kill -9` again and again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rljob.api.rljob_types import Checkpoint
from rljob.codec import pack
from rljob.ids import PolicyVersion
from rljob.ledger import CompletionInfo, Lease, Ledger, LedgerConfig
from rljob.ledger.audit import audit
from rljob.settings import Settings
from rljob.weights import WeightStore
from rljob_trainer.batch import read_archive
from rljob_trainer.checkpoint import Checkpoints
from rljob_trainer.metrics import read_lines
from rljob_trainer.testing import chain, job, trajectory

STEPS = 6
JOB = job(steps=STEPS, groupsPerStep=2, checkpoint={"everySteps": 2}, validation={"everySteps": 3})


@pytest.fixture
def prepared(artifacts: Path) -> Path:
    (artifacts / "prepared").mkdir()
    manifest = {"train": {"rows": 100, "sha256": "d"}, "validation": {"rows": 3, "sha256": "e"}}
    (artifacts / "prepared" / "manifest.json").write_text(json.dumps(manifest))
    return artifacts


async def start(
    url: str, artifacts: Path, step_seconds: float = 0.05, **changes: Any
) -> asyncio.subprocess.Process:
    work = artifacts.parent / "work"
    work.mkdir(exist_ok=True)
    trainer = JOB.spec.trainer.model_copy(update=changes)
    manifest = JOB.model_copy(update={"spec": JOB.spec.model_copy(update={"trainer": trainer})})
    (work / "job.json").write_text(manifest.model_dump_json())
    settings = Settings(
        component="trainer",
        job_file=str(work / "job.json"),
        artifacts=str(artifacts),
        work_dir=str(work),
        redis_url=url,
    )
    environment = {**os.environ, **settings.to_env(), "RLJOB_SIM_STEP_SECONDS": str(step_seconds)}
    command = [sys.executable, "-m", "rljob_trainer.main"]
    return await asyncio.create_subprocess_exec(
        *command, env=environment, stderr=asyncio.subprocess.PIPE
    )


async def ended(process: asyncio.subprocess.Process, seconds: float = 60) -> tuple[int, str]:
    _, err = await asyncio.wait_for(process.communicate(), seconds)
    return process.returncode or 0, err.decode()


@contextlib.asynccontextmanager
async def rollouts(url: str, artifacts: Path) -> AsyncIterator[Ledger]:
    """A worker that answers every lease at once and logs what was answered."""
    ledger = await Ledger.connect(url, JOB.name)
    await ledger.initialise(LedgerConfig.from_job(JOB, num_rows=100, data_hash="d"))
    (artifacts / "completions").mkdir()
    task = asyncio.create_task(_work(ledger, artifacts / "completions" / "w.jsonl"))
    try:
        yield ledger
    finally:
        task.cancel()
        await asyncio.wait([task])
        await ledger.aclose()


async def _work(ledger: Ledger, log: Path) -> None:
    await ledger.open_worker("w", "boot")
    while True:
        version = (await ledger.policy()).version
        for lease in (await ledger.lease("w", "boot", version, 4)).leases if version else ():
            with log.open("a") as file:
                file.write(json.dumps(await _complete(ledger, lease, version)) + "\n")
        await asyncio.sleep(0.01)


async def _complete(ledger: Ledger, lease: Lease, version: PolicyVersion) -> dict[str, object]:
    reward = float(lease.episode.member % 2)
    made = chain(n=version.n, incarnation=version.incarnation, seed=lease.row_index)
    payload = pack(trajectory(str(lease.episode), reward, [made], attempt=lease.attempt))
    info = CompletionInfo(
        reward=reward, outcome="completed", min_version=version.n, max_version=version.n
    )
    answer = await ledger.complete("w", "boot", lease.episode, lease.attempt, payload, info)
    known = {"time": 0.0, "episode": str(lease.episode), "attempt": lease.attempt, "answer": answer}
    return {
        **known,
        "reward": reward,
        "outcome": "completed",
        "sha256": hashlib.sha256(payload).hexdigest(),
    }


@pytest.mark.timeout(240)
async def test_killed_again_and_again_the_job_ends_with_every_group_trained_once(
    valkey_url: str, prepared: Path
) -> None:
    rng, kills = random.Random(5), 0
    async with rollouts(valkey_url, prepared) as ledger:
        while True:
            process = await start(valkey_url, prepared)
            with contextlib.suppress(TimeoutError):
                # Patience grows, so that even the slowest machine comes to the end.
                assert (await ended(process, rng.uniform(0.8, 2.5) * (1 + kills / 4)))[0] == 0
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            kills += 1
        report = await audit(prepared, ledger)
        assert report.ok, report
        assert await ledger.finished() == "Succeeded"
    assert kills >= 1
    rows = [
        group.group.row_index
        for step in range(1, STEPS + 1)
        for group in read_archive(prepared, step)
    ]
    assert len(rows) == len(set(rows)) == STEPS * 2
    assert [line["step"] for line in read_lines(prepared / "metrics" / "steps.jsonl")] == list(
        range(1, STEPS + 1)
    )
    assert {0, STEPS} <= {
        line["step"] for line in read_lines(prepared / "metrics" / "validation.jsonl")
    }


@pytest.mark.verl
@pytest.mark.timeout(300)
async def test_verl_trains_a_model_that_stays_whole(valkey_url: str, prepared: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    config = Qwen3Config(
        **sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False
    )
    Qwen3ForCausalLM(config).save_pretrained(prepared / "prepared" / "model")
    async with rollouts(valkey_url, prepared) as ledger:
        process = await start(valkey_url, prepared, backend="verl")
        code, err = await ended(process, 240)
        assert code == 0, err[-3000:]
        policy = await ledger.policy()
    assert policy.version == PolicyVersion(1, STEPS)
    assert WeightStore(prepared).verify(policy.version).digest == policy.digest
    lines = read_lines(prepared / "metrics" / "steps.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(line.startswith("time=") for line in err.splitlines()), err


async def trained(ledger: Ledger, step: int) -> None:
    async with asyncio.timeout(60):
        while (await ledger.policy()).step < step:
            await asyncio.sleep(0.02)


@pytest.mark.timeout(120)
async def test_told_to_stop_it_keeps_what_it_has_trained_and_the_next_one_trains_none_of_it_again(
    valkey_url: str, prepared: Path
) -> None:
    rare = Checkpoint(every_steps=100)
    async with rollouts(valkey_url, prepared) as ledger:
        process = await start(valkey_url, prepared, 0.3, checkpoint=rare)
        await trained(ledger, 2)
        process.terminate()
        assert (await ended(process))[0] == 0
        kept = Checkpoints(prepared, 3).newest()
        assert kept is not None
        assert kept.step >= 2
        assert kept.step >= (await ledger.policy()).step
        code, err = await ended(await start(valkey_url, prepared, checkpoint=rare))
        assert code == 0
        assert (await audit(prepared, ledger)).ok
    assert f"checkpoint={kept.step} " in err
    assert f"event=trained step={kept.step} " not in err
    assert f"event=trained step={kept.step + 1} " in err
    steps = [line["step"] for line in read_lines(prepared / "metrics" / "steps.jsonl")]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.timeout(120)
async def test_told_twice_to_stop_it_ends_in_the_middle_of_a_step(
    valkey_url: str, prepared: Path
) -> None:
    async with rollouts(valkey_url, prepared) as ledger:
        process = await start(valkey_url, prepared, 60)
        async with asyncio.timeout(30):
            while not (await ledger.snapshot()).counts["trained"]:
                await asyncio.sleep(0.05)
        await asyncio.sleep(2)  # its batch is acknowledged: the step begins
        process.terminate()
        await asyncio.sleep(0.5)
        assert process.returncode is None
        process.terminate()
        assert (await ended(process, 10))[0] == 0
        assert await ledger.finished() is None


async def test_told_to_stop_it_ends_well(valkey_url: str, prepared: Path) -> None:
    process = await start(valkey_url, prepared)
    ledger = await Ledger.connect(valkey_url, JOB.name)
    async with asyncio.timeout(30):
        while (await ledger.policy()).version is None:
            await asyncio.sleep(0.05)
    process.terminate()
    assert (await ended(process))[0] == 0
    assert await ledger.finished() is None
    await ledger.aclose()


async def test_a_newer_trainer_fences_an_older_one(valkey_url: str, prepared: Path) -> None:
    process = await start(valkey_url, prepared)
    ledger = await Ledger.connect(valkey_url, JOB.name)
    async with asyncio.timeout(30):
        while (await ledger.policy()).version is None:
            await asyncio.sleep(0.05)
    await ledger.open_trainer("newer")
    assert (await ended(process))[0] == 3
    await ledger.aclose()


async def test_without_prepared_data_it_says_what_to_do(valkey_url: str, artifacts: Path) -> None:
    code, err = await ended(await start(valkey_url, artifacts))
    assert code == 2
    assert err.splitlines()[-1].endswith(
        "not prepared (No such file or directory); run the prepare component first"
    )
