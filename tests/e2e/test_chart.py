"""The chart on a real cluster: installed, tested, upgraded, taken away and put back; in all namespaces, and in one.

as it is ─► helm test ─► upgrade ─► uninstall ─► one namespace ─► install again, for the suites that follow
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import SYSTEM
from tests.harness.chart import CHART, Object, Rendered, image_options, rights
from tests.harness.cluster import Cluster, wait_until
from tests.harness.cluster_job import ClusterJob, simulated

Helm = Callable[..., str]
Make = Callable[..., ClusterJob]

RELEASE = "rljob"
ELSEWHERE = "e2e-chart"
"""Namespace of a second installation, that serves one namespace only."""
OPERATOR = "app.kubernetes.io/part-of=rljob,app.kubernetes.io/component=operator"


def install(helm: Helm, chart: Path = CHART, namespace: str = SYSTEM, *options: str) -> None:
    """Install or upgrade, and wait until every pod is ready."""
    helm(
        *("upgrade", "--install", RELEASE, str(chart), "-n", namespace, "--create-namespace"),
        *(*image_options(), *options, "--wait", "--timeout", "180s"),
    )


def keys(cluster: Cluster) -> dict[str, str]:
    secret = cluster.get("Secret", "rljob-keys", SYSTEM)
    assert secret
    return secret["data"]


def lives(job: ClusterJob) -> dict[str, int]:
    """uid → restarts of the pods that do a job's work."""
    return {
        pod["metadata"]["uid"]: sum(
            one["restartCount"]
            for kind in ("containerStatuses", "initContainerStatuses")
            for one in pod["status"].get(kind, [])
        )
        for component in ("store", "rollout", "trainer")
        for pod in job.pods(component)
    }


def running(make_job: Make, name: str) -> ClusterJob:
    """A job that trains and has much left to do."""
    job = make_job(name, turn_seconds=0.3, trainer__steps=40).apply()
    job.until("it trains", lambda: job.step >= 1)
    return job


@pytest.fixture
def without_system(system: str, helm: Helm) -> Iterator[None]:
    """Nothing is installed meanwhile."""
    helm("uninstall", RELEASE, "-n", SYSTEM, "--wait")
    yield
    install(helm)


@pytest.mark.parametrize("values", ["default", "namespaced"])
def test_the_api_server_accepts_every_object(
    cluster: Cluster, helm: Helm, namespace: str, values: str
) -> None:
    objects = Rendered("-f", str(CHART / "ci" / f"{values}-values.yaml")).objects
    for one in objects:
        if "namespace" in one["metadata"]:
            one["metadata"]["namespace"] = namespace
    text = yaml.safe_dump_all(objects)
    told = cluster.kubectl(
        "apply", "--dry-run=server", "--validate=strict", "--force-conflicts", "--server-side", "-f", "-", stdin=text
    )  # fmt: skip
    assert len(told.splitlines()) == len(objects)


def test_helm_test_passes(system: str, helm: Helm) -> None:
    told = helm("test", RELEASE, "-n", SYSTEM, "--timeout", "120s")
    assert "Phase:          Succeeded" in told


def test_an_upgrade_keeps_keys_and_restarts_no_pod_of_a_job(
    cluster: Cluster, helm: Helm, make_job: Make
) -> None:
    job = running(make_job, "upgraded")
    before, old_keys = lives(job), keys(cluster)
    old = {pod["metadata"]["uid"] for pod in cluster.list("Pod", SYSTEM, OPERATOR)}
    install(helm, CHART, SYSTEM, "--set-json", 'operator.podAnnotations={"example.com/try":"2"}')
    wait_until(
        "new operators",
        lambda: not old & {p["metadata"]["uid"] for p in cluster.list("Pod", SYSTEM, OPERATOR)},
        60,
    )
    step = job.step
    job.until("it trains on", lambda: job.step > step)
    assert lives(job) == before
    assert keys(cluster) == old_keys
    install(helm)


def test_an_upgrade_brings_new_crds(
    cluster: Cluster, helm: Helm, system: str, tmp_path: Path
) -> None:
    def columns() -> list[str]:
        crd = cluster.get("CustomResourceDefinition", "rljobs.rljob.dev")
        assert crd
        return [one["name"] for one in crd["spec"]["versions"][0]["additionalPrinterColumns"]]

    older = tmp_path / "rljob"
    shutil.copytree(CHART, older)
    file = older / "files" / "crds" / "rljobs.yaml"
    crd = yaml.safe_load(file.read_text())
    now = columns()
    crd["spec"]["versions"][0]["additionalPrinterColumns"].pop()
    file.write_text(f"# older\n{yaml.safe_dump(crd, sort_keys=False)}")
    install(helm, older)
    assert columns() == now[:-1]
    install(helm)
    assert columns() == now


def test_uninstalling_keeps_crds_keys_and_running_jobs(
    cluster: Cluster, helm: Helm, make_job: Make
) -> None:
    job = running(make_job, "kept")
    before, old_keys = lives(job), keys(cluster)
    helm("uninstall", RELEASE, "-n", SYSTEM, "--wait")
    try:
        assert cluster.list("Deployment", SYSTEM) == []
        assert cluster.list("Service", SYSTEM) == []
        assert cluster.get("CustomResourceDefinition", "rljobs.rljob.dev")
        assert job.resource["spec"]["trainer"]["steps"] == 40
        assert lives(job) == before
    finally:
        install(helm)
    assert keys(cluster) == old_keys
    step = job.step
    job.until("the new operator goes on", lambda: job.step > step)
    assert lives(job) == before


def test_one_namespace_is_served_with_rights_there_alone(
    cluster: Cluster, helm: Helm, namespace: str, without_system: None
) -> None:
    options = [
        f'namespaces=["{namespace}"]',
        "crds.enabled=false",
        "aggregateRoles.enabled=false",
        "operator.replicas=1",
        "sandboxPool.replicas=1",
    ]
    install(helm, CHART, ELSEWHERE, *(part for one in options for part in ("--set-json", one)))
    try:
        served = ClusterJob(cluster, namespace, simulated("served", trainer__steps=2)).apply()
        other = ClusterJob(cluster, ELSEWHERE, simulated("other", trainer__steps=2)).apply()
        served.until_phase("Succeeded")
        assert other.status == {}
        account = f"--as=system:serviceaccount:{ELSEWHERE}:rljob-operator"
        told = cluster.kubectl(
            "auth", "can-i", "list", "pods", account, "-n", ELSEWHERE, check=False
        )
        assert told.startswith("no")
        cluster.delete("RLJob", "other", ELSEWHERE)
    finally:
        helm("uninstall", RELEASE, "-n", ELSEWHERE, "--wait")
        cluster.delete("Namespace", ELSEWHERE)


def test_a_missing_verb_is_named_and_the_upgrade_brings_it_back(
    cluster: Cluster, helm: Helm, system: str, tmp_path: Path
) -> None:
    older = tmp_path / "rljob"
    shutil.copytree(CHART, older)
    rules = older / "templates" / "operator" / "_rules.tpl"
    text = rules.read_text()
    whole = "  resources: [jobs]\n  verbs: [get, list, watch, create, delete]\n"
    assert whole in text
    rules.write_text(text.replace(whole, whole.replace(", create", "")))
    helm("upgrade", RELEASE, str(older), "-n", SYSTEM, *image_options())
    cluster.kubectl("delete", "pods", "-l", OPERATOR, "-n", SYSTEM, "--wait=false")

    def named() -> bool:
        return any("rbac: the operator may not create jobs.batch" in log for log in logs(cluster))

    wait_until("a line that names the verb", named, 90)
    install(helm)
    assert ("batch", "jobs", "create") in rights([role(cluster, "rljob-operator")])


def logs(cluster: Cluster) -> list[str]:
    """What the operators say, and said before they were restarted."""
    return [
        cluster.kubectl("logs", pod["metadata"]["name"], "-n", SYSTEM, *previous, check=False)
        for pod in cluster.list("Pod", SYSTEM, OPERATOR)
        for previous in ([], ["--previous"])
    ]


def role(cluster: Cluster, name: str) -> Object:
    answer = cluster.api("GET", f"apis/rbac.authorization.k8s.io/v1/clusterroles/{name}")
    return answer.json()
