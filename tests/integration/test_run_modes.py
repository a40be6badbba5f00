"""`rljob run` in modes eval and rollout, with simulated parts: what is left and shown; killed, stopped and resumed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fixtures import make_job, simulated_model
from tests.harness.simulated_job import Job
from tests.integration.test_run_simulated import rljob

__all__ = ["make_job", "simulated_model"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MakeJob = Callable[..., Job]
FOUR_EACH = {"source": "recipe://simulated", "samplesPerPrompt": 4, "passAt": [1, 4]}


def result(job: Job) -> dict[str, Any]:
    return json.loads((job.folder / "artifacts" / "result.json").read_text())


def test_an_eval_scores_every_row_and_says_how_well(make_job: MakeJob) -> None:
    job = make_job(mode="eval", spec__data__validation=FOUR_EACH)
    job.start("--plain")
    assert job.end() == 0, job.output
    found, summary = result(job), job.read("summary.json")
    assert (found["n"], found["returned"], found["samples_per_prompt"]) == (80, 80, 4)
    assert found["ci_low"] < found["score"] < found["ci_high"]
    assert found["pass_at"]["1"] == pytest.approx(found["score"])
    assert found["pass_at"]["4"] > found["pass_at"]["1"]
    assert summary["result"] == found
    assert (summary["phase"], summary["lost"], summary["episodes_completed"]) == (
        "Succeeded",
        0,
        80,
    )
    lines = job.output.splitlines()
    assert any(line.strip().startswith("score") and "95 %" in line for line in lines)
    assert any("pass@4" in line for line in lines)
    assert not any(word in job.output for word in ("staleness", "trained twice", "step 0"))
    assert not (job.folder / "curve.png").exists()
    shown = rljob("status", cwd=job.root).stdout
    assert "episode 80 of 80" in shown
    assert "of 80" in rljob("trajectories", cwd=job.root).stdout
    audited = rljob("ledger", "audit", cwd=job.root)
    assert audited.returncode == 0, audited.stdout + audited.stderr
    file = job.folder / "artifacts" / "validation" / "step-000000.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[1:], lines[-1]]) + "\n")
    planted = rljob("ledger", "audit", cwd=job.root)
    assert planted.returncode == 1
    assert f"lost: {json.loads(lines[0])['episode']}" in planted.stdout
    assert f"trained twice: {json.loads(lines[-1])['episode']}" in planted.stdout
    refused = rljob("run", str(job.manifest), "--resume", cwd=job.root)
    assert refused.returncode == 2
    assert "this run has succeeded already; run without --resume" in refused.stderr


def test_whatever_is_killed_a_rollout_collects_every_group_once(make_job: MakeJob) -> None:
    job = make_job(
        mode="rollout",
        spec__rollout__groups=120,
        spec__rollout__engine__env={"RLJOB_SIM_TURN_SECONDS": "0.2"},
        spec__lifecycle={"backoffLimit": 20},
    )
    job.start("--plain")
    for component, groups in (("worker-0", 1), ("collector", 16), ("store", 32), ("gateway-0", 48)):
        job.until(lambda least=groups: job.step >= least)
        assert job.kill(component), component
    assert job.end() == 0, job.output
    found, summary = result(job), job.read("summary.json")
    assert (found["groups"], found["episodes"], found["groups_given_up"]) == (120, 480, 0)
    assert (summary["lost"], summary["trained_twice"], summary["max_staleness"]) == (0, 0, None)
    exported = [
        json.loads(line)
        for file in sorted((job.folder / "artifacts" / "export").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert len({episode["episode"] for episode in exported}) == len(exported) == 480
    assert all(episode["row"]["prompt"] for episode in exported)
    rewards = [episode["reward"] for episode in exported]
    assert found["reward_mean"] == pytest.approx(sum(rewards) / 480)
    assert "lost / collected twice" in job.output


@pytest.mark.parametrize("mode", ["eval", "rollout"])
def test_stopped_and_resumed_it_goes_on_where_it_was(make_job: MakeJob, mode: str) -> None:
    env = {"RLJOB_SIM_TURN_SECONDS": "0.5"}
    changes: dict[str, Any] = {"spec__rollout__engine__env": env}
    if mode == "eval":
        changes["spec__data__validation"] = FOUR_EACH | {"maxRows": 20, "samplesPerPrompt": 8}
    else:
        changes["spec__rollout__groups"] = 64
    job = make_job(mode=mode, **changes)
    job.start("--plain")
    before = job.until(lambda: job.step)
    assert job.process
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert job.read("status.json")["phase"] == "Stopped"
    job.start("--resume", "--plain")
    assert job.until(lambda: job.step) >= before
    assert job.end() == 0, job.output
    found, summary = result(job), job.read("summary.json")
    assert (found["n"] if mode == "eval" else found["episodes"]) == (160 if mode == "eval" else 256)
    assert (summary["phase"], summary["lost"], summary["trained_twice"]) == ("Succeeded", 0, 0)


def test_a_resumed_rollout_keeps_its_number_of_groups(make_job: MakeJob) -> None:
    job = make_job(mode="rollout", spec__rollout__groups=64)
    job.start("--plain")
    job.until(lambda: job.read("status.json"))
    time.sleep(0.5)
    assert job.process
    job.process.send_signal(signal.SIGINT)
    job.end()
    refused = rljob(
        "run", str(job.manifest), "--resume", "--set", "rollout.groups=65", cwd=job.root
    )
    assert refused.returncode == 2
    assert "spec.rollout.groups: is 65, but the run began with 64" in refused.stderr


@pytest.mark.parametrize("mode", ["eval", "rollout"])
def test_the_plan_of_an_example_has_a_collector_and_no_trainer(mode: str) -> None:
    done = rljob("plan", f"examples/{mode}/rljob.yaml", cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "collector" in done.stdout
    assert "trainer " not in done.stdout
