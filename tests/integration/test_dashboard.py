"""The dashboard and the alerts against a real Prometheus that scraped a real run of the simulated example."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from dashboards.__main__ import TARGET, rendered
from rljob import telemetry
from rljob_operator import operator_metrics
from tests.harness.chart import CHART, Rendered
from tests.harness.cluster import wait_until
from tests.harness.fixtures import simulated_model
from tests.harness.prometheus import Prometheus, program
from tests.harness.simulated_job import Job

__all__ = ["simulated_model"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMESPACE, WINDOW = "team-a", "8s"
RULES = CHART / "files" / "rules.yaml"
DASHBOARDS = {name.removesuffix(".json"): json.loads(text) for name, text in rendered().items()}
COMPONENTS = {"sandbox-pool", "gateway-0", "worker-0", "trainer"}


class Scraped(NamedTuple):
    """What a Prometheus holds of one run."""

    prometheus: Prometheus
    start: float
    end: float
    job: str
    steps: int = 0
    """Steps and completed episodes, as the run's own summary has them."""
    completed: int = 0

    def values(self, expression: str) -> list[float]:
        """All values of an expression during the run, its variables filled in."""
        for variable, value in (
            ("$__rate_interval", WINDOW),
            ("$namespace", NAMESPACE),
            ("$job", self.job),
            ("$pool", ".*"),
        ):
            expression = expression.replace(variable, value)
        found = self.prometheus.query_range(expression, self.start, self.end)
        return [float(value) for series in found for _, value in series["values"]]


def metrics_ports(job: Job) -> dict[str, int]:
    """Component → port, as the environment of its process says."""
    found: dict[str, int] = {}
    for pid in job.processes():
        try:
            text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        env = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
        if port := int(env.get("RLJOB_METRICS_PORT") or 0):
            found[env["RLJOB_COMPONENT"]] = port
    return found


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory, simulated_model: Path) -> Iterator[Scraped]:
    """A run, scraped every second until every query has data of it and ten steps are to be seen."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("dashboard")
    job = Job(folder, simulated_model, spec__trainer__steps=2000)
    with Prometheus(folder / "prometheus") as prometheus:
        start = time.time()
        job.start()
        try:
            job.until(lambda: metrics_ports(job).keys() >= COMPONENTS)
            labels = {"namespace": NAMESPACE, "job": job.name}
            prometheus.scrape(list(metrics_ports(job).values()), labels)
            job.until(
                lambda: all(_is_to_be_seen(Scraped(prometheus, start, time.time(), job.name)))
            )
            assert job.process
            job.process.send_signal(signal.SIGINT)
            job.end()
        finally:
            job.close()
        summary = job.read("summary.json")
        end, totals = time.time(), (summary["steps"], summary["episodes_completed"])
        yield Scraped(prometheus, start, end, job.name, *totals)


def _is_to_be_seen(scraped: Scraped) -> Iterator[bool]:
    for panel in (panel for name in DASHBOARDS for panel in panels(name)):
        for target in panel["targets"]:
            values = [value for value in scraped.values(target["expr"]) if not math.isnan(value)]
            least = {"Step": 10, "Completed": 1}.get(panel["title"], -math.inf)
            yield bool(values) and max(values) >= least


# ── the dashboard ──


def panels(dashboard: str) -> Iterator[dict[str, Any]]:
    for panel in DASHBOARDS[dashboard]["panels"]:
        yield from panel.get("panels") or ([] if panel["type"] == "row" else [panel])


QUERIES = [
    pytest.param(target["expr"], id=f"{dashboard}-{panel['title']}-{target['refId']}")
    for dashboard in DASHBOARDS
    for panel in panels(dashboard)
    for target in panel["targets"]
]


def test_the_dashboards_in_the_chart_are_those_of_the_source() -> None:
    """`python -m dashboards` writes it anew."""
    assert {path.name: path.read_text() for path in TARGET.glob("*.json")} == rendered()


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_has_data_of_a_real_run(scraped: Scraped, expression: str) -> None:
    values = [value for value in scraped.values(expression) if not math.isnan(value)]
    assert values, expression
    if expression.endswith("or vector(0)"):
        assert set(values) == {0.0}, "nothing failed in this run"


def test_totals_on_the_dashboard_are_those_of_the_run(scraped: Scraped) -> None:
    shown = {
        panel["title"]: max(scraped.values(panel["targets"][0]["expr"]))
        for panel in panels("rollout-completion")
        if panel["title"] in {"Step", "Completed", "Completion rate", "Failed attempts"}
    }
    assert 10 <= shown["Step"] <= scraped.steps, "the last scrape may come before the last step"
    assert 0 < shown["Completed"] <= scraped.completed
    assert (shown["Completion rate"], shown["Failed attempts"]) == (1.0, 0.0)


def test_sandboxes_on_the_dashboard_are_those_of_the_run(scraped: Scraped) -> None:
    shown = {
        panel["title"]: scraped.values(panel["targets"][0]["expr"])
        for panel in panels("sandboxes")
        if panel["title"] in {"Ready", "Claimed", "Quarantined", "Warm hits"}
    }
    assert max(shown["Ready"]) > 0
    assert max(shown["Claimed"]) > 0
    assert set(shown["Quarantined"]) == {0.0}
    assert all(0 <= share <= 1 for share in shown["Warm hits"] if not math.isnan(share))


@pytest.mark.parametrize(
    ("dashboard", "label"), [("rollout-completion", "job"), ("sandboxes", "pool")]
)
def test_the_variables_find_the_job_and_its_pools(
    scraped: Scraped, dashboard: str, label: str
) -> None:
    variables = {one["name"]: one for one in DASHBOARDS[dashboard]["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", label]
    values = {"namespace": NAMESPACE, "job": scraped.job, "pool": "shells"}
    for name in ("namespace", label):
        query = variables[name]["query"]["query"]
        metric, of = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
        metric = metric.replace("$namespace", NAMESPACE)
        found = scraped.prometheus.query_range(metric, scraped.start, scraped.end)
        assert {series["metric"][of] for series in found} == {values[name]}


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_panels_explain_themselves_and_lie_in_no_others_way(dashboard: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(dashboard):
        assert panel["description"].endswith((".", "?")), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        box = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert max(x for x, _ in taken) < 24


def test_the_pool_managers_series_get_the_labels_of_their_job(tmp_path: Path) -> None:
    """One process serves the pools of all jobs; the chart's PodMonitor tells their series apart."""
    monitor = Rendered("--set", "podMonitor.enabled=true").one("PodMonitor", "rljob-sandbox-pool")
    relabel = [
        {
            re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key): value
            for key, value in one.items()
        }
        for one in monitor["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    ]
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "metrics").write_text('rljob_sandboxes{pool="team-a/j/j-shells",state="ready"} 4\n')
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    began = time.time()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        with Prometheus(tmp_path / "prometheus", relabel) as prometheus:
            prometheus.scrape([page.server_port], {"namespace": "rljob-system", "job": "manager"})
            query = 'rljob_sandboxes{namespace="team-a",job="j"}'
            found = wait_until(
                "a scrape", lambda: prometheus.query_range(query, began, time.time()), 20
            )
        page.shutdown()
    assert [one["metric"]["pool"] for one in found] == ["j-shells"]


# ── names ──


def exported() -> set[str]:
    """Every series name that a component or the operator exports."""
    known = {one.name for one in telemetry.METRICS}
    known |= {*operator_metrics.JOB_GAUGES, "rljob_operator_jobs"}
    histograms = {one.name for one in telemetry.METRICS if isinstance(one, telemetry.Histogram)}
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    return known - histograms | parts


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


@pytest.mark.parametrize(
    "expression",
    [*QUERIES, *(pytest.param(rule["expr"], id=rule["alert"]) for rule in rules())],
)
def test_no_expression_names_a_metric_that_nobody_exports(expression: str) -> None:
    names = set(re.findall(r"\brljob_\w+", expression))
    assert names or "up{" in expression
    assert names <= exported()


# ── alerts ──


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_no_alert_fires_in_a_good_run_and_each_sees_its_series(
    scraped: Scraped, rule: dict[str, Any]
) -> None:
    firing = scraped.values(rule["expr"])
    if rule["expr"].startswith("absent("):
        return  # the operator does not run here
    assert firing == []
    components = {one.name for one in telemetry.METRICS} - {
        value.name
        for value in vars(operator_metrics).values()
        if isinstance(value, telemetry.Gauge | telemetry.Counter | telemetry.Histogram)
    }
    for name in set(re.findall(r"\brljob_\w+", rule["expr"])) & components:
        assert scraped.values(name), name


OF_JOB = 'namespace="n",job="j"'
FIRES: list[tuple[str, dict[str, str], str]] = [
    # alert, series → values of each minute (a+bxn: from a, b more each minute, n times), its labels then
    ("RLJobOperatorDown", {'rljob_operator_leader{pod="a"}': "0x90"}, ""),
    ("RLJobSandboxPoolDown", {'up{job="rljob-system/rljob-sandbox-pool",pod="a"}': "0x90"}, ""),
    ("RLJobOperatorWatchStale", {'rljob_operator_watch_age_seconds{kind="Pod"}': "0+60x90"}, 'kind="Pod"'),
    ("RLJobOperatorErrors", {'rljob_operator_reconciles_total{result="error"}': "0+1x90"}, ""),
    ("RLJobFailed", {'rljob_operator_jobs{phase="Failed"}': "1x65 2x25"}, ""),
    (
        "RLJobStreamStalled",
        {
            f'rljob_attempts_total{{{OF_JOB},answer="accepted"}}': "0+5x10 50x80",
            f'rljob_episodes_running{{{OF_JOB},stage="run"}}': "8x90",
        },
        OF_JOB,
    ),
    (
        "RLJobTrainerStalled",
        {f"rljob_stream_backlog_groups{{{OF_JOB}}}": "3x90", f"rljob_trainer_step{{{OF_JOB}}}": "4x90"},
        OF_JOB,
    ),
    (
        "RLJobCompletionRateLow",
        {
            f'rljob_attempts_total{{{OF_JOB},answer="accepted"}}': "0+5x90",
            f'rljob_attempts_total{{{OF_JOB},answer="retry"}}': "0+2x90",
        },
        OF_JOB,
    ),
    ("RLJobGroupsDead", {f'rljob_ledger_count{{{OF_JOB},what="dead"}}': "0x60 1x30"}, OF_JOB),
    (
        "RLJobSandboxesExhausted",
        {
            f'rljob_sandbox_claims_total{{{OF_JOB},pool="p",result="exhausted"}}': "0+1x90",
            f'rljob_sandboxes{{{OF_JOB},pool="p",state="ready"}}': "0x90",
        },
        f'{OF_JOB},pool="p"',
    ),
    (
        "RLJobWeightSwitchFails",
        {f'rljob_weight_switches_total{{{OF_JOB},verdict="failed"}}': "0+1x90"},
        OF_JOB,
    ),
]  # fmt: skip
HEALTHY = {
    'rljob_operator_leader{pod="a"}': "1x90",
    'rljob_operator_leader{pod="b"}': "0x90",
    'up{job="rljob-system/rljob-sandbox-pool",pod="a"}': "1x90",
    'rljob_operator_watch_age_seconds{kind="Pod"}': "20x90",
    'rljob_operator_reconciles_total{result="ok"}': "0+9x90",
    'rljob_operator_jobs{phase="Failed"}': "1x90",
    f'rljob_attempts_total{{{OF_JOB},answer="accepted"}}': "0+9x90",
    f'rljob_attempts_total{{{OF_JOB},answer="retry"}}': "0+1x90",
    f'rljob_episodes_running{{{OF_JOB},stage="run"}}': "8x90",
    f"rljob_stream_backlog_groups{{{OF_JOB}}}": "3x90",
    f"rljob_trainer_step{{{OF_JOB}}}": "0+1x90",
    f'rljob_ledger_count{{{OF_JOB},what="dead"}}': "1x90",
    f'rljob_sandbox_claims_total{{{OF_JOB},pool="p",result="exhausted"}}': "0+1x90",
    f'rljob_sandboxes{{{OF_JOB},pool="p",state="ready"}}': "2x90",
    f'rljob_weight_switches_total{{{OF_JOB},verdict="new"}}': "0+1x90",
}


def expectation(alerts: str, series: dict[str, str], expected: list[str]) -> dict[str, Any]:
    """One case for promtool: what fires of `alerts` in the 70th minute."""
    samples = [{"labels": f"ALERTS{{{labels}}}", "value": 1} for labels in expected]
    query = f'ALERTS{{alertstate="firing",alertname=~"{alerts}"}}'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "70m", "exp_samples": samples}],
    }


def promtool(folder: Path, *cases: dict[str, Any]) -> None:
    (folder / "rules.yaml").write_text(RULES.read_text())
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": list(cases)}
    (folder / "test.yaml").write_text(yaml.safe_dump(tests))
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "test.yaml"]):
        run = subprocess.run(
            [program("promtool"), *command], cwd=folder, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in rules()}
    assert [alert for alert, _, _ in FIRES] == list(severities)
    cases = [
        expectation(
            alert,
            series,
            [
                f'alertname="{alert}",alertstate="firing",severity="{severities[alert]}"'
                + (f",{labels}" if labels else "")
            ],
        )
        for alert, series, labels in FIRES
    ]
    promtool(tmp_path, *cases)


def test_nothing_fires_while_all_is_well(tmp_path: Path) -> None:
    promtool(tmp_path, expectation(".+", HEALTHY, []))
