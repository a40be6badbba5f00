"""Two thousand sandbox pods of one pool are made, and a tenth of them killed: never one too many; how fast it recovers.

    the pool manager, its own process ──► API server ──► kwok: pods are Running at once, on addresses in 127.77.0.0/16
          └── keyed challenge, over HTTP ──► guests of this process, one listening on each pod's address

Faked: nodes and containers (kwok), and that a guest runs inside its pod. Its protocol is the real one (`guest.app`),
with the key that is in its pod. The pool manager is the real one with its real configuration, outside the cluster so
that it reaches these addresses.

The comparator is a Deployment of as many pods of the same spec on the same nodes, which kube-controller-manager keeps
(it may make 200 calls a second; the pool manager is held to 50 starts a second).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from benchmarks import on_cluster
from benchmarks.figure import Figure
from benchmarks.on_cluster import Cluster
from benchmarks.watching import Watch
from rljob import labels
from rljob.kube.resources import POD, Object, name_of
from rljob_sandbox_pool.aserver import HttpServer
from rljob_sandbox_pool.guest.app import Guest
from rljob_sandbox_pool.guest.pod import VARIABLE
from rljob_sandbox_pool.guest.wire import Request, Response
from rljob_sandbox_pool.runtimes.simulated import SimulatedBackend

SEED = 7
PODS = 2000
KILLED = 0.1
"""Share of them that is deleted at random."""
KILLERS = 8
"""Deletions at a time."""
NODES = 12
NETWORK = "127.77"
WAIT_SECONDS = 240.0
POLL_SECONDS = 0.1
NAMESPACE, POOL = "bench-pool", "many"
DEPLOYMENT_NAMESPACE, DEPLOYMENT = "bench-deployment", "many"
SELECTOR = f"{labels.COMPONENT}=sandbox"


def figures() -> Iterator[Figure]:
    """None, and a line on stderr, where no cluster can be had."""
    if reason := on_cluster.why_no_cluster():
        on_cluster.note(f"cluster_sandboxes: left out: {reason}")
        return
    with on_cluster.own_cluster() as cluster:
        yield from _figures(cluster)


class Measured(NamedTuple):
    """One way of keeping pods."""

    created_per_second: float
    most: int
    """Pods at once, over all of it."""
    refilled_per_second: float
    rss_mb: float


def _figures(cluster: Cluster) -> Iterator[Figure]:
    for crd in ("rljobs", "sandboxpools"):
        cluster.apply((on_cluster.ROOT / f"charts/rljob/files/crds/{crd}.yaml").read_text())
    on_cluster.make_namespace(cluster, NAMESPACE)
    on_cluster.make_namespace(cluster, DEPLOYMENT_NAMESPACE)
    on_cluster.only_fake_nodes(cluster, NODES, NETWORK)
    ours, pod = _pool(cluster)
    theirs = _deployment(cluster, pod)
    yield from compare(ours, theirs)


def compare(ours: Measured, theirs: Measured) -> Iterator[Figure]:
    """Ours beside the Deployment's."""
    yield Figure(
        name="sandbox_pods_at_once",
        value=ours.most,
        unit="pods",
        comparator="Deployment",
        comparator_value=theirs.most,
        goal=f"at most {PODS}",
        holds=ours.most <= PODS,
        seed=SEED,
    )
    for name, unit, comparator, value, other in (
        ("created", "pods/s", "Deployment", ours.created_per_second, theirs.created_per_second),
        ("refilled", "pods/s", "Deployment", ours.refilled_per_second, theirs.refilled_per_second),
        ("manager_rss", "MB", "kube-controller-manager", ours.rss_mb, theirs.rss_mb),
    ):
        yield Figure(
            name=f"sandbox_pods_{name}",
            value=value,
            unit=unit,
            comparator=comparator,
            comparator_value=other,
            seed=SEED,
        )


# ── the pool ──


def _pool(cluster: Cluster) -> tuple[Measured, Object]:
    """And one of its pods, for the comparator."""
    guests = Guests()
    watch = Watch(
        cluster.kubeconfig,
        POD,
        namespace=NAMESPACE,
        selector=SELECTOR,
        on_change=guests.changed,
    )
    with (
        watch as pods,
        _manager(cluster) as manager,
    ):
        pool = {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "SandboxPool",
            "metadata": {"name": POOL, "namespace": NAMESPACE},
            "spec": {"warm": PODS, "max": PODS},
        }
        measured = _measure(
            cluster, pods, NAMESPACE, lambda: cluster.apply(pool), manager.num_ready, manager.rss_mb
        )
        pod = next(iter(list(pods.objects.values())))
        cluster.delete("SandboxPool", POOL, NAMESPACE)
        on_cluster.wait_until("no sandbox pods", lambda: not pods.objects, WAIT_SECONDS)
    return measured, pod


class Manager(NamedTuple):
    """The pool manager's process."""

    pid: int
    metrics_port: int

    def num_ready(self) -> int:
        """Sandboxes whose guests have proved themselves."""
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        return num_ready(text)

    def rss_mb(self) -> float:
        """Its memory."""
        return on_cluster.rss_mb(self.pid)


def num_ready(text: str) -> int:
    """Ready sandboxes in the text of /metrics."""
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "rljob_sandboxes" and sample.labels["state"] == "ready"
    )


@contextmanager
def _manager(cluster: Cluster) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="rljob-benchmark-") as folder:
        home = Path(folder)
        for key in ("broker_key", "pool_key"):
            (home / key).write_text(secrets.token_hex(32))
        port, metrics_port = _free_port(), _free_port()
        config = {
            "guest_image": "localhost/guest:1",
            "sandbox_image": "localhost/sandbox:1",
            "operator_namespace": NAMESPACE,
            "namespaces": [NAMESPACE],
            "keys_path": str(home),
            "bind_host": "127.0.0.1",
            "port": port,
            "metrics_port": metrics_port,
        }
        (home / "pool.yaml").write_text(json.dumps(config))
        argv = [sys.executable, "-m", "rljob_sandbox_pool.cluster", "--config", home / "pool.yaml"]
        with (home / "log").open("wb") as log:
            env = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
            process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
        try:
            _wait_for_lead(cluster, process, home / "log")
            yield Manager(process.pid, metrics_port)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_lead(cluster: Cluster, process: subprocess.Popen[bytes], log: Path) -> None:
    def leads() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the pool manager ended: {log.read_text()[-2000:]}")
        lease = cluster.get("Lease", "rljob-sandbox-pool", NAMESPACE)
        return bool(lease and lease["spec"].get("holderIdentity"))

    on_cluster.wait_until("the pool manager leads", leads, 60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Guests:
    """What answers at the pods' addresses. Its methods run in the watch's event loop."""

    def __init__(self) -> None:
        self._servers: dict[str, HttpServer] = {}

    def changed(self, old: Object | None, new: Object | None) -> None:
        """A pod came, got its address, or is gone."""
        name = name_of(new or old or {})
        if new is None:
            if server := self._servers.pop(name, None):
                server.stop()
            return
        address = new.get("status", {}).get("podIP")
        if address and name not in self._servers:
            self._servers[name] = _listen(address, guest_of(new))

    def __len__(self) -> int:
        return len(self._servers)


def guest_of(pod: Object) -> Guest:
    """The guest that its pod's own configuration makes."""
    env = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    config = json.loads(env[VARIABLE])
    backend = SimulatedBackend(1000, lambda: None)
    return Guest(config["id"], bytes.fromhex(config["key"]), backend)


def _listen(address: str, guest: Guest) -> HttpServer:
    async def handle(request: Request) -> Response:
        reply: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def answered(response: Response) -> None:
            if not reply.done():  # else whoever asked has hung up
                reply.set_result(response)

        guest.handle(request, answered)
        return await reply

    server = HttpServer(handle)
    server.bind(address, labels.GUEST_PORT)
    listening = asyncio.get_running_loop().create_task(server.listen())
    listening.add_done_callback(lambda done: done.exception())
    return server


# ── both ──


def _measure(
    cluster: Cluster,
    pods: Watch,
    namespace: str,
    create: Callable[[], None],
    num_ready: Callable[[], int],
    rss: Callable[[], float],
) -> Measured:
    began = time.monotonic()
    create()
    _until_ready(pods, num_ready)
    created = PODS / (time.monotonic() - began)
    names = sorted(seen.name for seen in list(pods.objects))
    killed = random.Random(SEED).sample(names, int(PODS * KILLED))
    began = time.monotonic()
    with ThreadPoolExecutor(KILLERS) as pool:
        list(pool.map(lambda name: cluster.delete("Pod", name, namespace), killed))
    _until_ready(pods, num_ready, gone=frozenset(killed))
    refilled = len(killed) / (time.monotonic() - began)
    return Measured(created, pods.most, refilled, rss())


def _until_ready(
    pods: Watch, num_ready: Callable[[], int], gone: frozenset[str] = frozenset()
) -> None:
    def ready() -> bool:
        left = any(seen.name in gone for seen in list(pods.objects))
        return not left and len(pods.objects) == PODS and num_ready() == PODS

    on_cluster.wait_until(f"{PODS} pods are ready", ready, WAIT_SECONDS, POLL_SECONDS)


# ── the Deployment ──


def deployment(pod: Object) -> Object:
    """As many pods of the same spec."""
    spec = {k: v for k, v in pod["spec"].items() if k not in {"nodeName", "serviceAccountName"}}
    marks = {"app": DEPLOYMENT, labels.COMPONENT: "sandbox"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": DEPLOYMENT, "namespace": DEPLOYMENT_NAMESPACE},
        "spec": {
            "replicas": PODS,
            "selector": {"matchLabels": {"app": DEPLOYMENT}},
            "template": {
                "metadata": {"labels": marks},
                "spec": spec | {"restartPolicy": "Always"},
            },
        },
    }


def _deployment(cluster: Cluster, pod: Object) -> Measured:
    def num_available() -> int:
        found = cluster.get("Deployment", DEPLOYMENT, DEPLOYMENT_NAMESPACE) or {}
        return int(found.get("status", {}).get("availableReplicas", 0))

    def rss() -> float:
        config = f"--kubeconfig={cluster.kubeconfig.parent}/kcm.kubeconfig"
        return on_cluster.rss_mb(on_cluster.pid_of("kube-controller-manager", config))

    with Watch(cluster.kubeconfig, POD, namespace=DEPLOYMENT_NAMESPACE, selector=SELECTOR) as pods:
        return _measure(
            cluster,
            pods,
            DEPLOYMENT_NAMESPACE,
            lambda: cluster.apply(deployment(pod)),
            num_available,
            rss,
        )
