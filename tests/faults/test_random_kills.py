"""Ten random kills over one run, one exactly between publish and commit: nothing lost, nothing trained twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.harness.simulated_job import Job

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

COMPONENTS = ["store", "trainer", "worker-0", "engine-0", "gateway-0", "sandbox-pool"]


def assert_clean(job: Job) -> None:
    summary = job.read("summary.json")
    assert summary["phase"] == "Succeeded"
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)
    assert summary["steps"] == summary["steps_wanted"]


def kill_between_publish_and_commit(job: Job) -> None:
    """Hold the store while the trainer trains, until the next version is published, and kill the trainer then."""
    weights = job.folder / "artifacts" / "weights"

    def published() -> set[str]:
        return {path.name for path in weights.glob("*-*") if not path.name.startswith(".")}

    for _ in range(50):
        store, before = job.until(lambda: job.pid("store")), published()
        os.kill(store, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                if published() - before:
                    assert job.kill("trainer")
                    return
                time.sleep(0.002)
        finally:
            os.kill(store, signal.SIGCONT)
        time.sleep(0.05)
        assert job.alive, job.output
    pytest.fail("no version was published while the store was held")


@pytest.mark.parametrize("seed", [1])
def test_ten_random_kills_lose_nothing_and_train_nothing_twice(
    make_job: Callable[..., Job], seed: int
) -> None:
    dice = random.Random(seed)
    job = make_job(spec__trainer__steps=30, spec__lifecycle={"backoffLimit": 20})
    job.start(RLJOB_SIM_STEP_SECONDS="0.3")
    job.until(lambda: job.step >= 1)
    kill_between_publish_and_commit(job)
    victims = [*COMPONENTS, *dice.choices(COMPONENTS, k=3)]
    dice.shuffle(victims)
    for victim in victims:
        time.sleep(dice.uniform(0.0, 2.0))
        job.until(lambda victim=victim: job.kill(victim))
    assert job.end() == 0, job.output
    assert_clean(job)
    restarts = job.read("summary.json")["restarts"]
    assert sum(restarts.values()) >= 10, restarts


def test_kills_from_the_first_second_on_with_real_sandboxes(make_job: Callable[..., Job]) -> None:
    dice = random.Random(11)
    job = make_job(
        spec__trainer__steps=12,
        spec__lifecycle={"backoffLimit": 30},
        spec__sandboxPools=[{"name": "shells", "warm": 2, "max": 40, "runtime": "bubblewrap"}],
    )
    job.start(RLJOB_SIM_STEP_SECONDS="0.2")
    killed, deadline = 0, time.monotonic() + 120
    while killed < 14 and job.alive and time.monotonic() < deadline:
        time.sleep(dice.uniform(0.0, 1.5))
        killed += job.kill(dice.choice(["prepare", *COMPONENTS]))
    assert job.end() == 0, job.output
    assert killed >= 10
    assert_clean(job)
