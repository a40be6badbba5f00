"""The local driver over fake components: order, restarts, ends, and that nothing is left running."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rljob_operator.policies.verdict import Verdict
from rljob_operator.render.component import Kind
from tests.unit.rljob_operator.conftest import SERVER, Harness, component, server, snapshot

FOREVER = "import time\nwhile True: time.sleep(1)"
COUNTED = """
import os, pathlib, sys
file = pathlib.Path(os.environ["COUNT"]); n = int(file.read_text()) + 1 if file.exists() else 1; file.write_text(str(n))
"""


async def ended(task: asyncio.Task[Verdict], seconds: float = 60) -> Verdict:
    return await asyncio.wait_for(task, seconds)


async def test_a_preparation_runs_to_its_end_before_the_others_start(harness: Harness) -> None:
    prepare = component(
        "prepare", "import time; time.sleep(0.3); print('prepared')", kind=Kind.PREPARE
    )
    trainer = component("trainer", "print('trained')", kind=Kind.JOB, depends=("prepare",))
    harness.observer.finish("Succeeded")
    verdict = await harness.driver(prepare, trainer).run()
    assert (verdict.phase, verdict.exit_code) == ("Succeeded", 0)
    happened = harness.happened()
    assert happened.index('"ended", "component": "prepare"') < happened.index(
        '"started", "component": "trainer"'
    )
    assert harness.audits == 1


async def test_a_killed_service_is_started_again_on_the_same_port(harness: Harness) -> None:
    driver = harness.driver(
        server("gateway-0", role="gateway"), component("trainer", FOREVER, kind=Kind.JOB)
    )
    run = asyncio.create_task(driver.run())
    gateway = driver.supervisors["gateway-0"]
    await harness.until(lambda: gateway.state == "ready")
    os.kill(gateway.pid or 0, signal.SIGKILL)
    await harness.until(lambda: gateway.restarts == 1 and gateway.state == "ready")
    await harness.until(lambda: any("killed by signal 9" in note for note in harness.view.notes))
    driver.stop()
    assert (await ended(run)).exit_code == 130


async def test_failures_past_the_limit_fail_the_job_with_the_last_line(harness: Harness) -> None:
    broken = component("worker-0", "import sys; sys.exit('cannot go on')", role="worker")
    driver = harness.driver(
        broken, component("trainer", FOREVER, kind=Kind.JOB), lifecycle={"backoffLimit": 1}
    )
    verdict = await driver.run()
    assert (verdict.phase, verdict.reason, verdict.exit_code) == (
        "Failed",
        "BackoffLimitExceeded",
        1,
    )
    assert "worker-0 failed 2 times" in verdict.message
    assert "cannot go on" in verdict.message


async def test_a_committed_step_forgives_earlier_failures(
    harness: Harness, tmp_path: object
) -> None:
    script = COUNTED + "import time; time.sleep(1.5 if n < 4 else 600); sys.exit(1)"
    flaky = component("worker-0", script, role="worker", env={"COUNT": f"{tmp_path}/count"})
    driver = harness.driver(
        flaky, component("trainer", FOREVER, kind=Kind.JOB), lifecycle={"backoffLimit": 1}
    )
    run = asyncio.create_task(driver.run())
    worker = driver.supervisors["worker-0"]
    for count in (1, 2, 3):
        await harness.until(lambda count=count: worker.restarts == count or run.done())
        harness.observer.now = snapshot(step=count, progress=count)
    assert worker.restarts == 3
    driver.stop()
    assert (await ended(run)).exit_code == 130


async def test_exit_code_two_fails_the_job_at_once_with_the_components_own_line(
    harness: Harness,
) -> None:
    script = "import sys; print('data.jsonl:3: no prompt; add one', file=sys.stderr); sys.exit(2)"
    verdict = await harness.driver(component("prepare", script, kind=Kind.PREPARE)).run()
    assert (verdict.exit_code, verdict.message) == (2, "data.jsonl:3: no prompt; add one")


async def test_an_engine_that_dies_at_its_start_is_told_with_its_last_lines(
    harness: Harness,
) -> None:
    engine = server("engine-0", "print('no such model'); raise SystemExit(1)", role="engine")
    verdict = await harness.driver(engine, component("trainer", FOREVER, kind=Kind.JOB)).run()
    assert verdict.exit_code == 2
    assert "spec.rollout.engine" in verdict.message
    assert "no such model" in verdict.message


async def test_an_engine_that_is_killed_at_its_start_is_started_again(
    harness: Harness, tmp_path: object
) -> None:
    script = COUNTED + "import signal\nif n == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + SERVER
    env = {"COUNT": f"{tmp_path}/count", "PORT": "${port:engine-0/http}"}
    driver = harness.driver(
        server("engine-0", script, role="engine", env=env),
        component("trainer", FOREVER, kind=Kind.JOB),
    )
    run = asyncio.create_task(driver.run())
    await harness.until(lambda: driver.supervisors["engine-0"].state == "ready" or run.done())
    driver.stop()
    assert (await ended(run)).exit_code == 130


async def test_a_trainer_that_ends_well_before_the_job_has_ended_is_a_crash(
    harness: Harness,
) -> None:
    trainer = component("trainer", "pass", kind=Kind.JOB)
    verdict = await harness.driver(trainer, lifecycle={"backoffLimit": 0}).run()
    assert (verdict.phase, verdict.reason) == ("Failed", "BackoffLimitExceeded")


async def test_a_job_that_its_trainer_gave_up_fails_with_the_trainers_message(
    harness: Harness,
) -> None:
    harness.observer.finish("Failed", "loss is not a number")
    verdict = await harness.driver(component("trainer", "pass", kind=Kind.JOB)).run()
    assert (verdict.phase, verdict.message, verdict.exit_code) == (
        "Failed",
        "loss is not a number",
        1,
    )


async def test_a_fenced_trainer_may_start_again_without_counting(
    harness: Harness, tmp_path: object
) -> None:
    script = COUNTED + "sys.exit(3 if n == 1 else 0)"
    trainer = component("trainer", script, kind=Kind.JOB, env={"COUNT": f"{tmp_path}/count"})
    harness.observer.finish("Succeeded")
    verdict = await harness.driver(trainer, lifecycle={"backoffLimit": 0}).run()
    assert verdict.phase == "Succeeded"


async def test_the_active_deadline_ends_the_job(harness: Harness) -> None:
    spec = {"lifecycle": {"activeDeadlineSeconds": 1}}
    verdict = await harness.driver(component("trainer", FOREVER, kind=Kind.JOB), **spec).run()
    assert (verdict.phase, verdict.reason) == ("Failed", "ActiveDeadlineExceeded")


async def test_a_service_that_does_not_answer_in_time_is_killed_and_counted(
    harness: Harness,
) -> None:
    from rljob_operator.render.component import Probe

    mute = server(
        "gateway-0", FOREVER, role="gateway", probe=Probe("http", "http", "/", deadline_seconds=0.5)
    )
    driver = harness.driver(
        mute, component("trainer", FOREVER, kind=Kind.JOB), lifecycle={"backoffLimit": 0}
    )
    verdict = await driver.run()
    assert "not ready within" in verdict.message


async def test_a_second_stop_does_not_wait_for_a_component_that_ignores_the_first(
    harness: Harness,
) -> None:
    script = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
        + FOREVER
    )
    driver = harness.driver(component("trainer", script, kind=Kind.JOB, grace_seconds=600))
    run = asyncio.create_task(driver.run())
    await harness.until(
        lambda: harness.folder.log("trainer").exists() and "deaf" in harness.log("trainer")
    )
    driver.stop()
    driver.stop()
    assert (await ended(run, 20)).phase == "Stopped"


@pytest.mark.parametrize("shimmed", [False, True])
async def test_grandchildren_end_with_their_component(harness: Harness, shimmed: bool) -> None:
    script = (
        "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '600'])\nprint('started', flush=True)\n"
        + FOREVER
    )
    driver = harness.driver(component("trainer", script, kind=Kind.JOB, makes_namespaces=shimmed))
    run = asyncio.create_task(driver.run())
    await harness.until(
        lambda: harness.folder.log("trainer").exists() and "started" in harness.log("trainer")
    )
    driver.stop()
    await ended(run)  # the fixture looks for what is left
