"""Metrics, health and log lines of a component, each over its real socket or its real stderr."""

import ast
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from prometheus_client import REGISTRY

from rljob import telemetry
from rljob.errors import MachineError
from rljob.ledger import LedgerSnapshot
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


def test_a_snapshot_and_a_step_are_shown(url: str) -> None:
    snapshot = SimpleNamespace(
        stream_entries=7,
        stream_pending=3,
        memory_bytes=2**20,
        counts={"ready_groups": 2, "dead": 1},
    )
    telemetry.show_ledger(cast("LedgerSnapshot", snapshot))
    telemetry.show_step({"reward_mean": 0.25, "staleness_max": 2, "loss": -0.5, "note": "x"})
    text = get(f"{url}/metrics").text
    for line in (
        "rljob_stream_entries 7.0",
        "rljob_stream_pending 3.0",
        "rljob_stream_backlog_groups 2.0",
        'rljob_ledger_count{what="dead"} 1.0',
        'rljob_staleness_versions{stat="max"} 2.0',
        'rljob_trainer_value{name="loss"} -0.5',
        "rljob_reward_mean 0.25",
    ):
        assert line in text


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


ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for folder in ("rljob", "operator", "sandbox_pool", "rollout_worker", "services", "trainer")
    for path in (ROOT / folder).rglob("*.py")
]
NAMES = {name: m for name, m in vars(telemetry).items() if m in telemetry.METRICS}


def uses() -> Iterator[tuple[str, str, set[str]]]:
    """Where the tree gives a metric a value: (place, name of the metric, labels named there)."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Attribute(attr=name) | ast.Name(id=name),
                        attr="inc" | "set" | "observe",
                    )
                ) if name in NAMES:
                    labels = {word.arg or "" for word in node.keywords} - {"amount", "value"}
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", name, labels


def test_every_use_names_exactly_the_labels_of_its_metric() -> None:
    found = list(uses())
    assert found
    wrong = [place for place, name, labels in found if labels != set(NAMES[name].labels)]
    assert wrong == []


def test_every_metric_gets_its_value_somewhere() -> None:
    assert sorted(set(NAMES) - {name for _, name, _ in uses()}) == []
    for helper in ("show_ledger", "show_step"):
        assert [path for path in SOURCES if f"telemetry.{helper}(" in path.read_text()], helper
