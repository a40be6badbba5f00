"""The operator itself is killed, restarted, cut off: jobs do not notice, and no child is created twice."""

import json
import time
from collections.abc import Callable

import pytest

from tests.e2e.conftest import SYSTEM
from tests.harness.cluster import Cluster, script, wait_until
from tests.harness.cluster_job import ClusterJob

Make = Callable[..., ClusterJob]
OPERATOR = "app.kubernetes.io/component=operator"


def operators(cluster: Cluster) -> list[dict[str, object]]:
    """Running operator pods."""
    return [
        pod
        for pod in cluster.list("Pod", SYSTEM, OPERATOR)
        if not pod["metadata"].get("deletionTimestamp")
    ]


def leader(cluster: Cluster) -> str:
    """Who holds the Lease."""
    lease = cluster.get("Lease", "rljob-operator", SYSTEM)
    return (lease or {}).get("spec", {}).get("holderIdentity") or ""


def kill(cluster: Cluster, pod: str) -> None:
    """Gone at once, without a goodbye."""
    cluster.delete("Pod", pod, SYSTEM, gracePeriodSeconds=0)


def created(job: ClusterJob) -> dict[str, set[str]]:
    """Trainer and prepare Jobs that were ever created, by the events of the job controller's owner."""
    events = job.cluster.list("Event", job.namespace)
    made: dict[str, set[str]] = {}
    for event in events:
        if event.get("reason") == "SuccessfulCreate" and event["involvedObject"]["kind"] in {
            "Job",
            "StatefulSet",
        }:
            made.setdefault(event["involvedObject"]["name"], set()).add(
                event["involvedObject"].get("uid", "")
            )
    return made


def test_two_replicas_have_one_leader_and_the_other_takes_over(
    cluster: Cluster, make_job: Make
) -> None:
    wait_until("two operators", lambda: len(operators(cluster)) == 2, 60)
    first = wait_until("a leader", lambda: leader(cluster), 40)
    victim = next(
        p["metadata"]["name"] for p in operators(cluster) if p["metadata"]["name"] in first
    )
    kill(cluster, victim)
    wait_until("another leader", lambda: leader(cluster) not in {"", first}, 40)
    job = make_job("after", trainer__steps=1, data__validation=None).apply()
    job.until_phase("Succeeded")


def test_an_operator_killed_again_and_again_creates_no_child_twice(
    cluster: Cluster, make_job: Make
) -> None:
    job = make_job("midway", turn_seconds=0.1, trainer__steps=6).apply()
    end = time.monotonic() + 40
    while time.monotonic() < end and job.phase not in {"Succeeded", "Failed"}:
        for pod in operators(cluster):
            kill(cluster, pod["metadata"]["name"])
        time.sleep(8)
    job.until_phase("Succeeded", 240)
    assert all(len(found) == 1 for found in created(job).values()), created(job)
    assert job.status["trainer"]["attempt"] == 1
    job.assert_nothing_lost()


def test_both_operators_restarted_restart_nothing_of_a_job(
    cluster: Cluster, make_job: Make
) -> None:
    job = make_job("steady", turn_seconds=0.3, trainer__steps=12).apply()
    job.until("it trains", lambda: job.step >= 1)
    before = {p["metadata"]["uid"] for c in ("trainer", "rollout", "store") for p in job.pods(c)}
    cluster.kubectl("rollout", "restart", "deployment", "-l", OPERATOR, "-n", SYSTEM)
    cluster.kubectl(
        "rollout",
        "status",
        "deployment",
        "-l",
        OPERATOR,
        "-n",
        SYSTEM,
        "--timeout=90s",
        timeout=100,
    )
    after = {p["metadata"]["uid"] for c in ("trainer", "rollout", "store") for p in job.pods(c)}
    assert after == before
    job.until_phase("Succeeded")


def test_a_missing_right_is_named_at_the_start(
    cluster: Cluster, namespace: str, system: str
) -> None:
    """A namespaced operator whose role lacks a verb ends with a line that names it."""
    answer = cluster.kubectl(
        "auth", "can-i", "--list", f"--as=system:serviceaccount:{SYSTEM}:default", "-n", namespace
    )
    assert "statefulsets" not in answer
    pod = operators(cluster)[0]
    spec = json.loads(json.dumps(pod["spec"]))
    container = spec["containers"][0]
    bare = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "no-rights", "namespace": SYSTEM},
        "spec": {
            "serviceAccountName": "default", "restartPolicy": "Never", "securityContext": spec["securityContext"],
            "volumes": [v for v in spec["volumes"] if "projected" not in v],
            "containers": [{
                "name": "operator", "image": container["image"], "command": container.get("command"),
                "args": container.get("args"), "env": container.get("env"),
                "securityContext": container["securityContext"],
                "volumeMounts": [m for m in container["volumeMounts"] if "serviceaccount" not in m["mountPath"]],
            }],
        },
    }  # fmt: skip
    cluster.apply(bare)
    try:
        wait_until(
            "it ends",
            lambda: cluster.get("Pod", "no-rights", SYSTEM)["status"]["phase"] == "Failed",
            60,
        )
        log = cluster.kubectl("logs", "no-rights", "-n", SYSTEM)
        assert "statefulsets" in log
        status = cluster.get("Pod", "no-rights", SYSTEM)["status"]["containerStatuses"][0]
        assert status["state"]["terminated"]["exitCode"] == 2
    finally:
        cluster.delete("Pod", "no-rights", SYSTEM, gracePeriodSeconds=0)


def test_an_api_server_that_is_away_for_a_minute_is_survived(
    cluster: Cluster, make_job: Make
) -> None:
    if script("status").returncode:
        pytest.skip("the cluster is not one of this machine's")
    job = make_job("outage", turn_seconds=0.3, trainer__steps=16).apply()
    job.until("it trains", lambda: job.step >= 1)
    script("hold", "apiserver")
    time.sleep(60)
    script("release", "apiserver")
    wait_until("the API server is back", lambda: cluster.api("GET", "readyz").is_success, 60)
    job.until_phase("Succeeded", 240)
    assert all(len(found) == 1 for found in created(job).values()), created(job)
    assert job.status["trainer"]["attempt"] == 1
    job.assert_nothing_lost()
