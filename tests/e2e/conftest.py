"""A real cluster for the suite, the project's images in it, the chart installed. All of it once per session.

cluster      a running cluster (`make cluster-up`'s, else one for this session; `RLJOB_E2E_KUBECONFIG`: that one)
namespace    a fresh one that admits only restricted pods       helm       runs the pinned helm
images       the project's images, loaded                       system     the chart installed in rljob-system

A cluster of one's own must be able to pull the images: the chart's values of RLJOB_E2E_VALUES say where they are.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.chart import CHART, image_options
from tests.harness.cluster import ROOT, Cluster, script, wait_until, why_no_cluster
from tests.harness.cluster_job import ClusterJob, simulated
from tests.harness.sandbox_images import load_all
from tests.harness.sandbox_pools import Pools

CI = bool(os.environ.get("CI"))
EXTERNAL = os.environ.get("RLJOB_E2E_KUBECONFIG")
SYSTEM = "rljob-system"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if EXTERNAL:
        reached = Cluster(Path(EXTERNAL), "kubectl")
        yield reached
        reached.close()
        return
    if reason := why_no_cluster():
        if CI:
            pytest.fail(f"CI must run the e2e suite: {reason}")
        pytest.skip(reason)
    was_up = script("status").returncode == 0
    if not was_up:
        for command in (("install", "--kwok"), ("up", "--kwok", "--with-pid", str(os.getpid()))):
            run = script(*command)
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    kubeconfig = Path(script("kubeconfig").stdout.strip())
    kubectl = script("program", "kubectl").stdout.strip()
    reached = Cluster(kubeconfig, kubectl)
    yield reached
    reached.close()
    if not was_up:
        script("down")


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": restricted}}
    )
    wait_until("its ServiceAccount", lambda: cluster.get("ServiceAccount", "default", name), 90)
    yield name
    for job in (
        cluster.list("RLJob", name)
        if cluster.get("CustomResourceDefinition", "rljobs.rljob.dev")
        else []
    ):
        cluster.delete("RLJob", job["metadata"]["name"], name)
    cluster.delete("Namespace", name)


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> None:
    """Built from images/ and loaded, or already there."""
    if EXTERNAL:
        return
    build = ROOT / "tests" / "e2e" / "images" / "build"
    for command in ("build", "load"):
        run = subprocess.run(
            [sys.executable, str(build), command],
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Callable[..., str]:
    """Output of a helm command against the cluster."""
    made = subprocess.run(
        ["make", "--no-print-directory", "helm-tool"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    binary = Path.home() / ".cache" / "rljob" / "bin" / "helm"

    def run(*args: str, check: bool = True) -> str:
        result = subprocess.run(
            [str(binary), "--kubeconfig", str(cluster.kubeconfig), *args],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if check:
            assert result.returncode == 0, f"helm {' '.join(args)}: {result.stderr}{result.stdout}"
        return result.stdout if check else result.stdout + result.stderr

    return run


@pytest.fixture(scope="session")
def system(cluster: Cluster, images: None, helm: Callable[..., str]) -> str:
    """The chart, installed as README says; its namespace."""
    values = os.environ.get("RLJOB_E2E_VALUES")
    options = ["-f", values] if values else [] if EXTERNAL else list(image_options())
    helm(
        "upgrade", "--install", "rljob", str(CHART), "-n", SYSTEM, "--create-namespace",
        *options, "--wait", "--timeout", "120s",
    )  # fmt: skip
    return SYSTEM


@pytest.fixture
def make_job(cluster: Cluster, namespace: str, system: str) -> Callable[..., ClusterJob]:
    """A job of simulated parts in its own namespace, not yet applied."""

    def make(name: str, turn_seconds: float = 0.05, **spec: Any) -> ClusterJob:
        return ClusterJob(cluster, namespace, simulated(name, turn_seconds, **spec))

    return make


@pytest.fixture
def pools(cluster: Cluster, system: str, namespace: str) -> Iterator[Pools]:
    """Makes SandboxPool objects in a namespace that admits restricted pods only, and claims from them."""
    made = Pools(cluster, system, namespace)
    yield made
    for pool in cluster.list("SandboxPool", namespace):
        cluster.delete("SandboxPool", pool["metadata"]["name"], namespace)


@pytest.fixture(scope="session")
def sandbox_images(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name → tag of images that were made for the sandboxes' tests."""
    if EXTERNAL:
        pytest.skip("the images of this test are loaded into the suite's own cluster only")
    return load_all(tmp_path_factory.mktemp("sandbox-images"))
