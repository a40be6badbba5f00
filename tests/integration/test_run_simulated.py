"""`rljob` over a simulated job, as a person uses it: run, look, stop, resume, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fixtures import make_job, simulated_model
from tests.harness.simulated_job import Job, alive, read_proc

__all__ = ["make_job", "simulated_model"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MakeJob = Callable[..., Job]


def rljob(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "rljob.cli.main", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, simulated_model: Path) -> Job:
    """One run that has succeeded."""
    job = Job(tmp_path_factory.mktemp("finished"), simulated_model, spec__trainer__steps=4)
    job.start()
    assert job.end() == 0, job.output
    return job


def test_a_run_leaves_everything_a_person_looks_for(finished: Job) -> None:
    folder = finished.folder
    for name in (
        "rljob.yaml",
        "summary.json",
        "curve.png",
        "logs/trainer.log",
        "artifacts/metrics/steps.jsonl",
    ):
        assert (folder / name).stat().st_size > 0, name
    assert list(folder.glob("artifacts/checkpoints/step-*/state.json"))
    assert list(folder.glob("artifacts/batches/step-*/groups.bin"))


def test_the_summary_tells_what_happened(finished: Job) -> None:
    summary = finished.read("summary.json")
    assert (summary["phase"], summary["steps"], summary["reason"]) == ("Succeeded", 4, "StepsDone")
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)
    assert summary["episodes_completed"] == 4 * 8 * 4
    assert summary["max_staleness"] <= 2
    assert summary["validation_last_step"] == 4
    low, high = summary["validation_first_interval"]
    assert low <= summary["validation_first"] <= high
    assert summary["wall_seconds"] > summary["starting_seconds"] > 0


def test_nothing_is_left_running(finished: Job) -> None:
    assert finished.processes() == []


def test_without_a_terminal_the_facts_come_as_lines(finished: Job) -> None:
    lines = [line for line in finished.output.splitlines() if line.startswith("[")]
    assert any("step 4/4" in line for line in lines)
    for word in (
        "eta",
        "reward",
        "validation",
        "running",
        "completed",
        "failed",
        "staleness",
        "tokens/s",
    ):
        assert all(word in line for line in lines), word


def test_status_logs_and_audit_read_the_folder(finished: Job) -> None:
    status = rljob("status", "simulated", cwd=finished.root)
    assert "Succeeded" in status.stdout
    assert "Complete" in status.stdout
    logs = rljob("logs", "trainer", "--tail", "1000", cwd=finished.root)
    assert "event=trained" in logs.stdout
    audit = rljob("ledger", "audit", cwd=finished.root)
    assert audit.returncode == 0
    assert "clean" in audit.stdout


def test_the_audit_finds_a_planted_loss_and_a_planted_duplicate(
    finished: Job, tmp_path: Path
) -> None:
    copy = tmp_path / "runs" / "simulated"
    shutil.copytree(finished.folder, copy)
    _plant(copy / "artifacts")
    audit = rljob("ledger", "audit", cwd=tmp_path)
    assert audit.returncode == 1, audit.stdout
    assert "NOT clean" in audit.stdout
    assert "lost: " in audit.stdout
    assert "trained twice: " in audit.stdout


def _plant(artifacts: Path) -> None:
    """Train the first episode of step 1 again at step 2 in place of that step's first, which is thereby lost."""
    first, second = (
        json.loads((artifacts / f"batches/step-{n:06d}/manifest.json").read_text()) for n in (1, 2)
    )
    second["groups"][0] = first["groups"][0]
    (artifacts / "batches/step-000002/manifest.json").write_text(json.dumps(second))


def test_a_trajectory_is_shown_turn_by_turn(finished: Job) -> None:
    listed = rljob("trajectories", "--step", "2", cwd=finished.root)
    assert listed.returncode == 0, listed.stderr
    batch = json.loads(
        (finished.folder / "artifacts/batches/step-000002/manifest.json").read_text()
    )
    episode = batch["groups"][0]["episodes"][0]["episode"]
    shown = rljob("trajectories", "--show", episode, cwd=finished.root)
    for text in (
        "by version 1-",
        "mean logprob",
        "mask 0",
        "mask 1",
        "sim-answer=",
        '"name": "submit"',
    ):
        assert text in shown.stdout, text


def test_export_gives_a_verified_directory_and_refuses_damaged_weights(
    finished: Job, tmp_path: Path
) -> None:
    done = rljob("export", "--to", str(tmp_path / "model"), cwd=finished.root)
    assert done.returncode == 0, done.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "model").iterdir()
    }
    assert (tmp_path / "model" / "model.safetensors").stat().st_nlink == 1
    again = rljob("export", "--to", str(tmp_path / "model"), cwd=finished.root)
    assert (again.returncode, again.stdout) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("logs", "trainr"), "trainr: there is no such component; did you mean trainer?"),
        (("status", "simulatd"), "simulatd: there is no such run; did you mean simulated?"),
        (("stop",), "simulated: is not running"),
        (("trajectories", "--show", "t0-0.99"), "t0-0.99: there is no such trajectory"),
        (("export", "--to", "x", "--version", "9-9"), "9-9: there is no such version"),
    ],
)
def test_a_wrong_name_is_one_line_and_exit_code_two(
    finished: Job, arguments: tuple[str, ...], said: str
) -> None:
    done = rljob(*arguments, cwd=finished.root)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_a_run_that_lives_is_not_started_twice_and_ends_at_ctrl_c(make_job: MakeJob) -> None:
    job = make_job(spec__trainer__steps=500)
    job.start()
    job.until(lambda: job.step >= 1)
    second = rljob("run", str(job.manifest), cwd=job.root)
    assert second.returncode == 2
    assert "a run of this name is alive" in second.stderr
    assert job.process
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert job.processes() == []


def test_stop_ends_well_and_resume_goes_on(make_job: MakeJob) -> None:
    job = make_job(spec__trainer__steps=12)
    job.start(RLJOB_SIM_STEP_SECONDS="0.3")
    job.until(lambda: job.step >= 4)
    stopped = rljob("stop", cwd=job.root)
    assert stopped.returncode == 0, stopped.stderr
    assert job.end() == 130
    assert job.processes() == []
    assert job.read("summary.json")["phase"] == "Stopped"
    job.start("--resume")
    assert job.end() == 0, job.output
    summary = job.read("summary.json")
    assert (summary["phase"], summary["steps"]) == ("Succeeded", 12)
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)


def test_a_resumed_run_whose_store_is_gone_goes_on_from_its_checkpoint(make_job: MakeJob) -> None:
    job = make_job(spec__trainer__steps=10)
    job.start(RLJOB_SIM_STEP_SECONDS="0.3")
    job.until(lambda: job.step >= 5)
    rljob("stop", cwd=job.root)
    job.end()
    for path in sorted((job.folder / "store").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    job.start("--resume")
    assert job.end() == 0, job.output
    summary = job.read("summary.json")
    assert (summary["phase"], summary["steps"], summary["trained_twice"]) == ("Succeeded", 10, 0)


def test_a_finished_run_goes_on_with_more_steps_or_makes_room_for_a_new_one(
    make_job: MakeJob,
) -> None:
    job = make_job(spec__trainer__steps=2)
    job.start()
    assert job.end() == 0, job.output
    again = rljob("run", str(job.manifest), "--resume", cwd=job.root)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "has succeeded already" in again.stderr
    job.start("--resume", "--set", "trainer.steps=4")
    assert job.end() == 0, job.output
    summary = job.read("summary.json")
    assert (summary["steps"], summary["lost"], summary["trained_twice"]) == (4, 0, 0)
    job.start("--set", "trainer.steps=1")
    assert job.end() == 0, job.output
    assert job.read("summary.json")["steps"] == 1
    assert (job.folder.parent / "simulated.1" / "summary.json").exists()


def test_resume_refuses_a_manifest_that_no_longer_fits(make_job: MakeJob) -> None:
    job = make_job(spec__trainer__steps=1)
    done = rljob("run", str(job.manifest), "--resume", cwd=job.root)
    assert (done.returncode, "there is no run to resume" in done.stderr) == (2, True)


def test_a_sigkill_of_the_driver_leaves_nothing_and_resume_goes_on(make_job: MakeJob) -> None:
    job = make_job(spec__trainer__steps=8)
    job.start(RLJOB_SIM_STEP_SECONDS="0.2")
    job.until(lambda: job.step >= 2)
    assert len(job.processes()) > 6
    assert job.process
    job.process.kill()
    job.process.wait()
    deadline = time.monotonic() + 20
    while job.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.processes() == []
    assert "Killed" in rljob("status", "simulated", cwd=job.root).stdout
    audit = rljob("ledger", "audit", cwd=job.root)
    assert "lost: " not in audit.stdout, audit.stdout
    assert audit.returncode == ("the store is down" in audit.stdout), audit.stdout
    fewer = rljob("run", str(job.manifest), "--resume", "--set", "trainer.steps=1", cwd=job.root)
    assert (fewer.returncode, fewer.stderr.count("\n")) == (2, 1), fewer.stderr
    job.start("--resume")
    assert job.end() == 0, job.output
    assert (job.read("summary.json")["lost"], job.read("summary.json")["trained_twice"]) == (0, 0)


@pytest.mark.parametrize("with_shim", [False, True])
def test_real_sandboxes_die_with_a_driver_that_is_killed(
    make_job: MakeJob, with_shim: bool
) -> None:
    pools = [{"name": "shells", "warm": 2, "max": 40, "runtime": "bubblewrap"}]
    job = make_job(spec__trainer__steps=500, spec__sandboxPools=pools)
    job.start()
    job.until(lambda: job.step >= 1)
    assert job.process
    family = job.family()
    shims = [
        pid for pid, _ in family if b"rljob_operator.drivers.shim" in read_proc(pid, "cmdline")
    ]
    assert len(shims) == 1
    assert len(family) > 20
    for pid in [job.process.pid, *shims * with_shim]:
        os.kill(pid, signal.SIGKILL)
    job.process.wait()
    deadline = time.monotonic() + 20
    # Also what was only being started when the family was looked at.
    while (alive(family) or job.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(family) == set()
    assert job.processes() == []


def test_a_stalled_component_is_named(make_job: MakeJob) -> None:
    job = make_job(spec__trainer__steps=500, spec__lifecycle={"progressDeadlineSeconds": 5})
    job.start()
    job.until(lambda: job.step >= 1)
    gateway = job.until(lambda: job.pid("gateway-0"))
    os.kill(gateway, signal.SIGSTOP)
    try:
        job.until(
            lambda: (
                "gateway-0 is not answering" in _condition(job, "Progressing").get("message", "")
            )
        )
        stalled = _condition(job, "Progressing")
    finally:
        os.kill(gateway, signal.SIGCONT)
    assert (stalled["status"], stalled["reason"]) == ("False", "ProgressDeadlineExceeded")
    assert "no progress for" in job.output
    job.until(lambda: _condition(job, "Progressing").get("status") == "True")


def _condition(job: Job, kind: str) -> dict[str, Any]:
    found = [
        condition
        for condition in job.read("status.json").get("conditions", [])
        if condition["type"] == kind
    ]
    return found[0] if found else {}


def test_sync_trains_only_tokens_of_the_version_being_trained(make_job: MakeJob) -> None:
    job = make_job(spec__trainer__steps=3)
    job.start("--set", "rollout.schedule=sync", "--set", "rollout.maxStaleness=null")
    assert job.end() == 0, job.output
    assert job.read("summary.json")["max_staleness"] == 0


def test_an_external_redis_serves_one_run_of_a_name_at_a_time(
    make_job: MakeJob, own_valkey: Any
) -> None:
    store = {"redis": {"url": own_valkey.url}}
    job = make_job(spec__trainer__steps=500, spec__store=store)
    job.start()
    job.until(lambda: job.step >= 1)
    other = make_job(spec__store=store)
    refused = rljob("run", str(other.manifest), cwd=other.root)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "a living run named simulated uses this Redis" in refused.stderr
    assert "store" not in job.read("status.json")["components"]
    audit = rljob("ledger", "audit", cwd=job.root)
    assert audit.returncode == 0, audit.stdout


def test_a_fresh_run_does_not_begin_on_another_runs_artifacts(
    make_job: MakeJob, tmp_path: Path
) -> None:
    (tmp_path / "artifacts" / "checkpoints").mkdir(parents=True)
    job = make_job(spec__store={"artifacts": f"file://{tmp_path}/artifacts"})
    done = rljob("run", str(job.manifest), cwd=job.root)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("spec.store.artifacts: ")


def test_an_unreachable_redis_is_one_line(make_job: MakeJob) -> None:
    job = make_job(spec__store={"redis": {"url": "redis://127.0.0.1:9/0"}})
    done = rljob("run", str(job.manifest), cwd=job.root)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("spec.store.redis.url: ")
    assert not job.folder.exists()


def test_a_pinned_port_in_use_is_one_line(make_job: MakeJob) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        job = make_job(spec__store={"redis": {"port": sock.getsockname()[1]}})
        done = rljob("run", str(job.manifest), cwd=job.root)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is in use" in done.stderr


def test_a_machine_without_bubblewrap_is_told_before_anything_starts(make_job: MakeJob) -> None:
    job = make_job()
    done = rljob("run", str(job.manifest), cwd=job.root, PATH="/nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("bubblewrap: is not installed")
    assert not job.folder.exists()


def test_too_little_memory_is_told_before_anything_starts(make_job: MakeJob) -> None:
    job = make_job(spec__store={"redis": {"maxMemoryMib": 1_048_576}})
    done = rljob("run", str(job.manifest), cwd=job.root)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("memory: ")


def test_a_malformed_row_is_told_with_its_line(make_job: MakeJob, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"task": "shell", "prompt": "a"}\n{"task": "shell"}\n')
    job = make_job()
    job.start("--set", f"data.train.source=file://{rows}")
    assert job.end() == 2
    assert "rows.jsonl:2" in job.output.splitlines()[-1]
    assert job.processes() == []
