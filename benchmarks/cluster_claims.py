"""Claims and commands in pods of a real node, beside what a cluster offers for the same.

    Poisson arrivals at 20/s, then a burst: pod of the claimer ─► broker       beside   one GET to the API server; a pod
                                                                                        made for the claim
    `true`: pod of the claimer ─► guest in its pod                             beside   the exec subresource over one
                                                                                        WebSocket; kubectl exec

A cluster of its own with this tree's images and chart. The claimer may do what a rollout worker may; what stands beside
it is asked from outside, as close to the API server. As many sandboxes as the one node holds.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from websockets.asyncio.client import connect

from benchmarks import on_cluster
from benchmarks.claims import GOAL_P50_MS, GOAL_P99_MS, Measured, Size, arrivals
from benchmarks.figure import Figure
from benchmarks.local_pool import SEED, percentile
from benchmarks.on_cluster import SYSTEM, Cluster, wait_until
from rljob import labels
from rljob.kube.config import from_kubeconfig
from rljob.kube.resources import Object

NAMESPACE, POOL, CLAIMER = "bench-claims", "many", "claimer"
SIZE = Size(claims_per_second=20, seconds=60, burst=60, cold_starts=4)
EXECS, KUBECTL_EXECS = 200, 20
GOAL_RATIO = 1 / 20
"""Of an exec through the API server, at most, at the median."""
WARM_SECONDS, CLAIMER_SECONDS = 600.0, 300.0
_COMMAND = ["true"]


class Exec(NamedTuple):
    """Milliseconds of `true`, by way."""

    ours: list[float]
    subresource: list[float]
    kubectl: list[float]


def figures() -> Iterator[Figure]:
    """None, and a line on stderr, where no cluster can be had."""
    if reason := on_cluster.why_no_cluster():
        on_cluster.note(f"cluster_claims: left out: {reason}")
        return
    with on_cluster.own_cluster() as cluster:
        on_cluster.install_system(cluster)
        on_cluster.make_namespace(cluster, NAMESPACE)
        ours, gets, execs, cold = _measure(cluster)
    yield from compare(ours, gets, cold)
    yield from compare_exec(execs)


def compare(ours: Measured, gets: list[float], cold: list[float]) -> Iterator[Figure]:
    """Claims."""
    get, pod = ("GET to the API server", gets), ("a pod until it is ready", cold)
    for name, values, share, (comparator, others), goal in (
        ("cluster_claim_p50", ours.arrivals, 0.5, get, GOAL_P50_MS),
        ("cluster_claim_p99", ours.arrivals, 0.99, get, GOAL_P99_MS),
        ("cluster_claim_p50", ours.arrivals, 0.5, pod, None),
        ("cluster_claim_burst_p50", ours.burst, 0.5, pod, None),
    ):
        value = percentile(values, share)
        yield Figure(
            name=name,
            value=value,
            unit="ms",
            comparator=comparator,
            comparator_value=percentile(others, share),
            goal=f"at most {goal:g} ms" if goal else "",
            holds=value <= goal if goal else None,
            seed=SEED,
        )


def compare_exec(execs: Exec) -> Iterator[Figure]:
    """Commands."""
    value = percentile(execs.ours, 0.5)
    for comparator, others in (
        ("exec through the API server", execs.subresource),
        ("kubectl exec", execs.kubectl),
    ):
        beside = percentile(others, 0.5)
        yield Figure(
            name="cluster_exec_true_p50",
            value=value,
            unit="ms",
            comparator=comparator,
            comparator_value=beside,
            goal=f"at most {GOAL_RATIO:g} of the comparator",
            holds=value <= GOAL_RATIO * beside,
            seed=SEED,
        )


def _measure(cluster: Cluster) -> tuple[Measured, list[float], Exec, list[float]]:
    _make_pool(cluster)
    found = _in_pod(cluster)
    pods = cluster.list("Pod", NAMESPACE, f"{labels.COMPONENT}=sandbox")
    name = pods[0]["metadata"]["name"]
    argv = cluster.kubectl_argv("-n", NAMESPACE, "exec", name, "--", *_COMMAND)
    execs = Exec(
        ours=found.pop("execs"),
        subresource=asyncio.run(_exec_all(cluster, name)),
        kubectl=[_run_ms(argv) for _ in range(KUBECTL_EXECS)],
    )
    path = cluster.path("SandboxPool", NAMESPACE, POOL)
    gets = asyncio.run(arrivals(lambda: asyncio.to_thread(cluster.api, "GET", path), SIZE))
    return Measured(**found), gets, execs, _cold(cluster)


def _make_pool(cluster: Cluster) -> None:
    requests = {"requests": {"cpu": "5m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
    limits = {"memoryMib": 128, "diskMib": 16, "pids": 64}
    spec = {"warm": SIZE.burst, "max": SIZE.burst, "limits": limits, "resources": requests}
    kind = {"apiVersion": "rljob.dev/v1alpha1", "kind": "SandboxPool"}
    cluster.apply({**kind, "metadata": {"name": POOL, "namespace": NAMESPACE}, "spec": spec})

    def num_ready() -> int:
        found = cluster.get("SandboxPool", POOL, NAMESPACE) or {}
        return int(found.get("status", {}).get("ready", 0))

    wait_until(f"{SIZE.burst} warm sandboxes", lambda: num_ready() == SIZE.burst, WARM_SECONDS)


def _in_pod(cluster: Cluster) -> dict[str, list[float]]:
    """What the claimer measures."""
    place = {"namespace": NAMESPACE, "name": CLAIMER}
    code = {path.name: path.read_text() for path in Path(__file__).parent.glob("*.py")}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": place, "data": code})
    marks = {"labels": {labels.COMPONENT: "rollout", "app.kubernetes.io/part-of": "rljob"}}
    manager = cluster.list("Pod", SYSTEM, f"{labels.COMPONENT}=sandbox-pool")[0]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": _claimer(manager)}
    cluster.apply({**pod, "metadata": place | marks})

    def phase() -> str:
        return (cluster.get("Pod", CLAIMER, NAMESPACE) or {}).get("status", {}).get("phase", "")

    ends = {"Succeeded", "Failed"}
    wait_until("the claimer ends", lambda: phase() in ends, SIZE.seconds + CLAIMER_SECONDS)
    said = cluster.kubectl("-n", NAMESPACE, "logs", CLAIMER)
    if phase() == "Failed":
        raise RuntimeError(f"the claimer: {said[-2000:]}")
    cluster.delete("Pod", CLAIMER, NAMESPACE)
    return json.loads(said.splitlines()[-1])


def _claimer(manager: Object) -> Object:
    """Spec of a pod in the image of the pool manager, and with no more rights."""
    like = manager["containers"][0]
    secret = f"{POOL}-claims"
    told = {
        f"RLJOB_SANDBOX_{key.upper()}": {"secretKeyRef": {"name": secret, "key": key}}
        for key in ("url", "token")
    }
    env: list[Object] = [{"name": name, "valueFrom": value} for name, value in told.items()]
    asked = json.dumps({"pool": POOL, "size": SIZE, "execs": EXECS})
    container = {
        "name": CLAIMER,
        **{key: like[key] for key in ("image", "imagePullPolicy", "securityContext")},
        "command": ["python", "-m", "benchmarks.claims_in_pod", asked],
        "env": [*env, {"name": "PYTHONPATH", "value": "/code"}],
        "volumeMounts": [{"name": "code", "mountPath": "/code/benchmarks"}],
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": manager.get("securityContext", {}),
        "containers": [container],
        "volumes": [{"name": "code", "configMap": {"name": CLAIMER}}],
    }


async def _exec_all(cluster: Cluster, pod: str) -> list[float]:
    return [await _exec_ms(cluster, pod) for _ in range(EXECS // 4)]


async def _exec_ms(cluster: Cluster, pod: str) -> float:
    """What the exec subresource takes, from the connection to the command's status."""
    config = from_kubeconfig(cluster.kubeconfig)
    query = urlencode([("stdout", "1"), ("stderr", "1"), *(("command", word) for word in _COMMAND)])
    base = config.server.replace("https://", "wss://", 1)
    url = f"{base}/api/v1/namespaces/{NAMESPACE}/pods/{pod}/exec?{query}"
    protocols: Sequence[Any] = ["v5.channel.k8s.io"]
    began = time.perf_counter()
    async with connect(url, ssl=config.tls, subprotocols=protocols) as socket:
        async for message in socket:
            if isinstance(message, bytes) and message[:1] == b"\3":  # the channel of the status
                status: Object = json.loads(message[1:])
                if status["status"] != "Success":
                    raise RuntimeError(f"exec: {status}")
                return 1000 * (time.perf_counter() - began)
    raise RuntimeError("exec: no status")


def _run_ms(argv: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, capture_output=True, check=True)
    return 1000 * (time.perf_counter() - began)


def _cold(cluster: Cluster) -> list[float]:
    """Pods like the pool's, made one after another, until each is ready."""
    like = cluster.list("Pod", NAMESPACE, f"{labels.COMPONENT}=sandbox")[0]
    cluster.delete("SandboxPool", POOL, NAMESPACE)
    none = lambda: not cluster.list("Pod", NAMESPACE)  # noqa: E731
    wait_until("no sandbox is left", none, WARM_SECONDS)
    return [_cold_ms(cluster, like, f"cold-{number}") for number in range(SIZE.cold_starts)]


def _cold_ms(cluster: Cluster, like: Object, name: str) -> float:
    left_out = {"nodeName", "serviceAccountName", "serviceAccount", "tolerations", "priority"}
    spec = {key: value for key, value in like["spec"].items() if key not in left_out}
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": spec}

    def runs() -> bool:
        status = (cluster.get("Pod", name, NAMESPACE) or {}).get("status", {})
        return any("running" in each["state"] for each in status.get("containerStatuses", []))

    began = time.perf_counter()
    cluster.apply({**pod, "metadata": {"name": name, "namespace": NAMESPACE}})
    wait_until(f"{name} runs", runs, 120, 0.05)
    ms = 1000 * (time.perf_counter() - began)
    cluster.delete("Pod", name, NAMESPACE, gracePeriodSeconds=0)
    return ms
