"""What the benchmarks on a cluster make of what they read. They themselves need a cluster, and are read by people."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OPERATOR = """\
# TYPE rljob_operator_api_requests_total counter
rljob_operator_api_requests_total{code="200",method="GET"} 70.0
rljob_operator_api_requests_total{code="201",method="POST"} 3.0
rljob_operator_api_requests_total{code="409",method="PATCH"} 2.0
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 9.0e+07
"""
SERVER = """\
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",resource="rljobs",subresource="status",verb="PATCH"} 5
apiserver_request_total{code="200",resource="rljobs",subresource="",verb="LIST"} 50
apiserver_request_total{code="201",resource="pods",subresource="",verb="POST"} 7
apiserver_request_total{code="200",resource="leases",subresource="",verb="PUT"} 11
apiserver_request_total{code="201",resource="events",subresource="",verb="POST"} 13
apiserver_request_total{code="201",resource="subjectaccessreviews",subresource="",verb="POST"} 17
apiserver_request_total{code="201",resource="serviceaccounts",subresource="token",verb="POST"} 19
"""


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_writes_are_calls_that_change_objects() -> None:
    from benchmarks import cluster_reading as reading

    assert reading.operator_writes(OPERATOR) == 5
    assert reading.server_writes(SERVER) == 12
    assert reading.server_writes(SERVER, ["rljobs", "leases"]) == 5
    assert reading.one_value(OPERATOR, "process_resident_memory_bytes") == 90e6
    with pytest.raises(RuntimeError, match="0 samples"):
        reading.one_value(OPERATOR, "process_cpu_seconds_total")


def test_the_last_child_of_all_jobs_counts() -> None:
    from benchmarks import cluster_reading as reading
    from benchmarks.watching import Seen

    wanted = {("Secret", "-secrets"), ("ServiceAccount", "")}
    first = {
        Seen("Secret", "n", "a-secrets"): 1.0,
        Seen("ServiceAccount", "n", "a"): 2.0,
        Seen("Secret", "n", "b-secrets"): 4.0,
        Seen("ServiceAccount", "other", "b"): 9.0,
    }
    assert reading.last_seen(first, "n", ["a"], wanted) == 2.0
    assert reading.last_seen(first, "n", ["a", "b"], wanted) is None
    first[Seen("ServiceAccount", "n", "b")] = 3.0
    assert reading.last_seen(first, "n", ["a", "b"], wanted) == 4.0


def test_the_first_step_is_when_the_trainer_logged_it() -> None:
    from benchmarks.cluster_reading import first_step_at

    began = "2026-01-02T03:04:05.000000001Z time=2026 level=info event=started\n"
    step = "2026-01-02T03:04:07.250000001Z time=2026 level=info event=trained step={}\n"
    later = step.replace("04:07", "04:09")
    assert first_step_at(began) == 0.0
    assert first_step_at(began + step.format(1) + later.format(2)) == 1767323047.25


def test_children_that_wait_are_told_from_those_that_do_not() -> None:
    from benchmarks.cluster_reading import is_child, waits

    golden = ROOT / "tests/golden/children/simulated.yaml"
    objects = [o for o in yaml.safe_load_all(golden.read_text()) if o and "kind" in o]
    assert all(is_child(o, "simulated") for o in objects)
    assert not is_child(objects[0], "other")
    names = {(o["kind"], o["metadata"]["name"].removeprefix("simulated")) for o in objects}
    assert {child for child in names if waits(child)} == {
        ("Job", "-prepare-1"),
        ("Job", "-trainer-1"),
        ("SandboxPool", "-shells"),
        ("StatefulSet", "-rollout"),
    }


def test_the_same_objects_hold_nothing_of_server_owner_and_controllers() -> None:
    from benchmarks.on_cluster import bare

    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "j",
            "uid": "u",
            "namespace": "n",
            "ownerReferences": [{}],
            "labels": {"a": "b"},
            "annotations": {"batch.kubernetes.io/job-tracking": "", "rljob.dev/x": "y"},
        },
        "spec": {
            "selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": "u"}},
            "parallelism": 1,
            "template": {
                "metadata": {"labels": {"a": "b", "controller-uid": "u", "job-name": "j"}},
                "spec": {},
            },
        },
        "status": {"active": 1},
    }
    (made,) = bare([job])["items"]
    assert made == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j", "labels": {"a": "b"}, "annotations": {"rljob.dev/x": "y"}},
        "spec": {
            "parallelism": 1,
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {}},
        },
    }
    assert job["spec"]["template"]["metadata"]["labels"]["job-name"] == "j"


def test_a_watch_remembers_when_and_how_many_at_once() -> None:
    from benchmarks.watching import Seen, Watch

    watch = Watch(Path("nowhere"))
    pods = [{"metadata": {"name": name, "namespace": "n"}} for name in "abc"]
    for pod in pods[:2]:
        watch.changed("Pod", None, pod)
    at = watch.first[Seen("Pod", "n", "a")]
    watch.changed("Pod", pods[0], {**pods[0], "status": {}})
    watch.changed("Pod", pods[0], None)
    watch.changed("Pod", None, pods[2])
    assert watch.most == 2
    assert {seen.name for seen in watch.objects} == {"b", "c"}
    assert watch.first[Seen("Pod", "n", "a")] == at


async def test_a_guest_is_made_of_what_its_pod_holds() -> None:
    from benchmarks.cluster_sandboxes import deployment, guest_of
    from rljob.api.rljob_types import SandboxLimits, SandboxPoolSpec
    from rljob_sandbox_pool.runtimes.base import SandboxSpec
    from rljob_sandbox_pool.runtimes.pod_identity import Owner
    from rljob_sandbox_pool.runtimes.pod_template import PodConfig, pod

    spec = SandboxSpec(id="p-1", key=b"k" * 32, index=0, limits=SandboxLimits(), image="box:1")
    owner, config = (
        Owner(namespace="n", name="p", uid="u"),
        PodConfig(guest_image="guest:1", sandbox_image="box:1"),
    )
    made = pod(spec, SandboxPoolSpec(), owner, config)
    assert guest_of(made).id == "p-1"
    template = deployment(made)["spec"]["template"]
    assert template["spec"]["containers"] == made["spec"]["containers"]


def test_sandboxes_beside_a_deployment() -> None:
    from benchmarks.cluster_sandboxes import PODS, Measured, compare, num_ready

    figures = list(compare(Measured(40, PODS, 20, 80), Measured(50, PODS + 9, 30, 160)))
    assert [figure.holds for figure in figures] == [True, None, None, None]
    assert [round(figure.ratio, 2) for figure in figures][1:] == [0.8, 0.67, 0.5]
    over = next(compare(Measured(40, PODS + 1, 20, 80), Measured(50, PODS, 30, 160)))
    assert over.holds is False
    text = (
        "# TYPE rljob_sandboxes gauge\n"
        'rljob_sandboxes{pool="p",state="ready"} 3.0\n'
        'rljob_sandboxes{pool="p",state="starting"} 4.0\n'
    )
    assert num_ready(text) == 3


def test_the_ratio_to_nothing_is_null() -> None:
    from benchmarks.cluster import figure

    line = json.loads(figure("writes", 0, "calls", "everyone", 0, at_most=0).line())
    assert (line["ratio"], line["holds"]) == (None, True)
    assert figure("writes", 1, "calls", "everyone", 4, at_most=0).holds is False


@pytest.mark.parametrize("name", ["cluster", "cluster_sandboxes"])
def test_where_no_cluster_can_be_had_one_line_says_why(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import benchmarks.__main__ as benchmarks
    from benchmarks import on_cluster

    monkeypatch.setattr(on_cluster, "why_no_cluster", lambda: "Go is missing")
    assert benchmarks.main([name]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"benchmarks: {name}: left out: Go is missing\n")


def test_an_own_cluster_goes_down_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import on_cluster

    calls: list[tuple[str, str]] = []

    class Harness:
        @staticmethod
        def script(*arguments: str, timeout: float) -> Any:
            import os
            import subprocess

            calls.append((arguments[0], os.environ["RLJOB_CLUSTER_NAME"]))
            if arguments[0] == "up":
                raise KeyboardInterrupt
            return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setenv("RLJOB_CLUSTER_NAME", "mine")
    monkeypatch.setattr(on_cluster, "_harness", Harness)
    with pytest.raises(KeyboardInterrupt), on_cluster.own_cluster():
        pass
    assert calls == [("install", "rlbench"), ("up", "rlbench"), ("down", "rlbench")]
    import os

    assert os.environ["RLJOB_CLUSTER_NAME"] == "mine"


@pytest.fixture(autouse=True)
def _unload() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
