"""Metrics, health and log lines of a component, each over its real socket or its real stderr."""

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import REGISTRY

from rljob import telemetry
from rljob.errors import MachineError
from rljob.settings import Settings


def settings(port: int) -> Settings:
    return Settings(
        component="worker-0", job_file="job.json", artifacts="a", work_dir="w", metrics_port=port
    )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def trouble() -> list[str]:
    return []


@pytest.fixture
def url(trouble: list[str]) -> Iterator[str]:
    with telemetry.serve(settings(free_port()), lambda: "; ".join(trouble)) as server:
        yield f"http://127.0.0.1:{server.port}"


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=10, trust_env=False)


def test_metrics_are_served_with_their_labels(url: str) -> None:
    telemetry.EPISODES.inc(3, outcome="completed", task="demo")
    telemetry.STAGE_SECONDS.observe(0.3, stage="run")
    telemetry.REWARD_MEAN.set(0.5)
    text = get(f"{url}/metrics").text
    assert 'rljob_episodes_total{outcome="completed",task="demo"} 3.0' in text
    assert 'rljob_stage_seconds_bucket{le="0.5",stage="run"} 1.0' in text
    assert "rljob_reward_mean 0.5" in text


def test_health_names_the_component_and_its_trouble(url: str, trouble: list[str]) -> None:
    assert get(f"{url}/healthz").json() == {"component": "worker-0", "ok": True, "problem": ""}
    trouble.append("the engine is gone")
    answer = get(f"{url}/healthz")
    assert (answer.status_code, answer.json()["problem"]) == (503, "the engine is gone")


def test_other_paths_are_not_found(url: str) -> None:
    assert get(f"{url}/other").status_code == 404


def test_port_zero_serves_nothing() -> None:
    before = threading.active_count()
    with telemetry.serve(settings(0)) as server:
        assert server.port == 0
        assert threading.active_count() == before


def test_closing_frees_the_port_and_may_be_repeated() -> None:
    server = telemetry.serve(settings(free_port()))
    port = server.port
    server.close()
    server.close()
    with pytest.raises(httpx.ConnectError):
        get(f"http://127.0.0.1:{port}/healthz")


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            MachineError, match="cannot serve metrics: Address already in use; free"
        ):
            telemetry.serve(settings(taken.getsockname()[1]))


def test_names_are_unique_prefixed_and_end_as_prometheus_wants() -> None:
    names = [metric.name for metric in telemetry.METRICS]
    assert len(set(names)) == len(names)
    for metric in telemetry.METRICS:
        assert re.fullmatch(r"rljob_[a-z_]+", metric.name), metric.name
        assert metric.name.endswith("_total") == isinstance(metric, telemetry.Counter), metric.name
        assert metric.doc.endswith("."), metric.name


def test_every_metric_can_be_made() -> None:
    for metric in telemetry.METRICS:
        labels = dict.fromkeys(metric.labels, "x")
        if isinstance(metric, telemetry.Histogram):
            metric.observe(1, **labels)
        elif isinstance(metric, telemetry.Counter | telemetry.Gauge):
            metric.inc(1, **labels)
    served = {family.name for family in REGISTRY.collect()}
    assert {metric.name.removesuffix("_total") for metric in telemetry.METRICS} <= served


def test_a_wrong_label_is_an_error() -> None:
    with pytest.raises(ValueError, match="label"):
        telemetry.EPISODES.inc(outcom="completed")


def test_importing_it_loads_neither_library() -> None:
    code = (
        "import sys, rljob.telemetry as t; "
        "print(sorted({'prometheus_client', 'structlog', 'pydantic'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


LOGGING = """
import logging, sys, warnings
from rljob import telemetry
telemetry.configure_logging("trainer")
log = telemetry.get_logger(step=3)
log.info("trained", loss=0.5, note="two words", token="hush")
log.debug("unseen")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
logging.getLogger("lib").warning("from %s\\nbelow", "lib")
logging.getLogger("lib").info("unseen")
warnings.warn("careful", stacklevel=1)
"""


def test_every_event_is_one_line_on_stderr() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOGGING], capture_output=True, text=True, timeout=60, check=True
    )
    trained, failed, foreign, warning = run.stderr.splitlines()
    assert run.stdout == ""
    assert re.match(r"time=\S+Z level=info component=trainer event=trained ", trained)
    assert 'step=3 loss=0.5 note="two words" token=***' in trained
    assert "level=error" in failed
    assert "ZeroDivisionError" in failed
    assert 'level=warning component=trainer event="from lib\\nbelow"' in foreign
    assert "careful" in warning


def test_logging_can_go_elsewhere_and_be_more_talkative() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import io; from rljob import telemetry; out = io.StringIO();"
            "telemetry.configure_logging('x', level='DEBUG', stream=out);"
            "telemetry.get_logger().debug('seen'); print(out.getvalue())",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "level=debug component=x event=seen" in run.stdout
    assert run.stderr == ""
