"""What the operator promises, on a real cluster with this tree's images and chart.

    one RLJob ───────► its children created, its first step trained          on the real node
    100 RLJobs ──────► all children created; the operator's memory and CPU   on kwok's nodes: pods are Running at once
    they are suspended ─► a minute in which nothing should be written
    the leader is killed ─► another one leads

"Children" are those that wait for nothing: volumes, Secret, policies, Services, the store, … Jobs, pools and rollouts
follow when the store is up and preparing is done. All times begin when kubectl is started.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import httpx
import yaml

from benchmarks import on_cluster
from benchmarks.cluster_reading import (
    Child,
    bare_pod,
    child_of,
    first_step_at,
    is_child,
    kopf_pod,
    last_seen,
    manifest,
    one_value,
    operator_writes,
    server_writes,
    settled_rss_mb,
    waits,
)
from benchmarks.figure import Figure
from benchmarks.on_cluster import SYSTEM, Cluster, note, wait_until
from benchmarks.watching import Watch
from rljob import labels
from rljob.kube import resources
from rljob.kube.resources import Object

SEED = 7
ROUNDS = 3
CHILDREN_SECONDS, RSS_MB, TAKE_OVER_SECONDS = 2.0, 150.0, 20.0
"""Goals."""
JOBS = 100
TEMPLATE_JOBS = 10
"""How many jobs' children the comparator makes; what it takes is multiplied."""
NODES = 8
NETWORK = "10.99"
QUIET_SECONDS = 60.0
SETTLE_SECONDS, BUSY_SECONDS = 10.0, 45.0
WAIT_SECONDS = 180.0
KILLS = 2
LEASE = "rljob-operator"
METRICS_PORT = 8081
KINDS = (
    *(resources.CONFIG_MAP, resources.SECRET, resources.PVC, resources.SERVICE_ACCOUNT),
    *(resources.SERVICE, resources.STATEFUL_SET, resources.JOB, resources.NETWORK_POLICY),
    *(resources.PDB, resources.SANDBOX_POOL),
)
ONE, MANY = "one", "bench-many"


class Round(NamedTuple):
    """Seconds of one job."""

    children: float
    last: float
    first_step: float
    kubectl_children: float
    kubectl_all: float


class Spent(NamedTuple):
    """By a command."""

    seconds: float
    cpu_seconds: float


def figures() -> Iterator[Figure]:
    """None, and a line on stderr, where no cluster can be had."""
    if reason := on_cluster.why_no_cluster():
        note(f"cluster: left out: {reason}")
        return
    with on_cluster.own_cluster() as cluster:
        on_cluster.install_system(cluster)
        bench = Bench(cluster)
        for part in (bench.one_job, bench.many_jobs, bench.quiet_minute, bench.take_over):
            try:
                yield from part()
            except (AssertionError, RuntimeError, httpx.HTTPError, subprocess.SubprocessError) as e:
                note(f"cluster: {part.__name__} was not measured: {str(e)[-2000:]}")


def figure(
    name: str,
    value: float,
    unit: str,
    comparator: str,
    other: float,
    *,
    at_most: float | None = None,
) -> Figure:
    """A figure, with a goal where there is one."""
    return Figure(
        name=name,
        value=value,
        unit=unit,
        comparator=comparator,
        comparator_value=other,
        goal="" if at_most is None else f"at most {at_most:g}",
        holds=None if at_most is None else value <= at_most,
        seed=SEED,
    )


# ── the run ──


class Bench:
    """The parts, in the order in which they are run: each leaves behind what the next one needs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._children: set[Child] = set()
        """Of one job, those that wait for nothing."""

    # one job

    def one_job(self) -> Iterator[Figure]:
        """A few jobs one after another on the real node: children, first step."""
        rounds = [self._round(f"bench-one-{number}") for number in range(ROUNDS)]
        bare_pod = self._bare_pod()
        same = "kubectl create, the same objects"
        yield figure(
            "operator_children_created",
            statistics.median(each.children for each in rounds),
            "s",
            same,
            statistics.median(each.kubectl_children for each in rounds),
            at_most=CHILDREN_SECONDS,
        )
        yield figure(
            "operator_last_child_created",
            statistics.median(each.last for each in rounds),
            "s",
            same,
            statistics.median(each.kubectl_all for each in rounds),
        )
        yield figure(
            "operator_first_step_trained",
            statistics.median(each.first_step for each in rounds),
            "s",
            "a bare pod of the trainer's image, to its end",
            bare_pod,
        )

    def _round(self, namespace: str) -> Round:
        on_cluster.make_namespace(self._cluster, namespace)
        with Watch(self._cluster.kubeconfig, *KINDS, namespace=namespace) as watch:
            began, at = time.monotonic(), time.time()
            self._cluster.apply(manifest(ONE, namespace))
            first_step = wait_until("a step", lambda: self._trained(namespace), WAIT_SECONDS, 0.2)
            items = [item for item in list(watch.objects.values()) if is_child(item, ONE)]
            first = dict(watch.first)
        # The prepare Job may be gone by now.
        early = [item for item in items if not waits(child_of(item, ONE))]
        self._children = {child_of(item, ONE) for item in early}
        children = last_seen(first, namespace, [ONE], self._children)
        mine = [at for seen, at in first.items() if seen.name.startswith(ONE)]
        made = Round(
            children=(children or 0.0) - began,
            last=max(mine) - began,
            first_step=first_step - at,
            kubectl_children=self._create(early, f"{namespace}-early").seconds,
            kubectl_all=self._create(items, f"{namespace}-all").seconds,
        )
        self._forget(namespace)
        return made

    def _trained(self, namespace: str) -> float:
        """When the trainer logged its first step, seconds since the epoch; 0: it has not."""
        selector = f"{labels.COMPONENT}=trainer"
        for pod in self._cluster.list("Pod", namespace, selector):
            path = self._cluster.path("Pod", namespace, pod["metadata"]["name"])
            answer = self._cluster.api("GET", f"{path}/log", timestamps="true")
            if answer.is_success and (at := first_step_at(answer.text)):
                return at
        return 0.0

    def _create(self, items: Iterable[Object], namespace: str) -> Spent:
        """What kubectl takes to make the same objects elsewhere."""
        on_cluster.make_namespace(self._cluster, namespace)
        text = json.dumps(on_cluster.bare(items))
        began, cpu = time.monotonic(), on_cluster.cpu_seconds_of_children()
        self._cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=text)
        spent = Spent(time.monotonic() - began, on_cluster.cpu_seconds_of_children() - cpu)
        self._forget(namespace)
        return spent

    def _forget(self, namespace: str) -> None:
        self._cluster.kubectl("delete", "namespace", namespace, "--wait=false")

    def _bare_pod(self) -> float:
        """From create to Succeeded."""
        namespace = on_cluster.make_namespace(self._cluster, "bench-bare")
        config = self._cluster.get("ConfigMap", "rljob-operator", SYSTEM) or {}
        image = yaml.safe_load(config["data"]["operator.yaml"])["images"]["trainer"]
        pod = bare_pod(image, namespace)
        began = time.monotonic()
        self._cluster.apply(pod)

        def ended() -> bool:
            found = self._cluster.get("Pod", "bare", namespace) or {}
            return found.get("status", {}).get("phase") == "Succeeded"

        wait_until("the bare pod", ended, 60, 0.1)
        seconds = time.monotonic() - began
        self._forget(namespace)
        return seconds

    # many jobs

    def many_jobs(self) -> Iterator[Figure]:
        """A hundred jobs at once; the operator's memory and CPU from before until they are all up."""
        on_cluster.only_fake_nodes(self._cluster, NODES, NETWORK)
        on_cluster.make_namespace(self._cluster, MANY)
        pools = [{"name": "shells", "warm": 1, "max": 4, "runtime": "simulated"}]
        jobs = [f"job-{number:03}" for number in range(JOBS)]
        listed = [manifest(name, MANY, sandboxPools=pools) for name in jobs]
        before = self._operator_metrics()
        with Watch(self._cluster.kubeconfig, *KINDS, namespace=MANY) as watch:
            began = time.monotonic()
            self._cluster.apply({"apiVersion": "v1", "kind": "List", "items": listed})
            wait_until("all children", lambda: self._have(watch, jobs), WAIT_SECONDS, 0.2)
            seconds = (last_seen(dict(watch.first), MANY, jobs, self._children) or 0.0) - began
            peak = self._settle(BUSY_SECONDS)
            some = set(jobs[:TEMPLATE_JOBS])
            items = [
                item
                for item in list(watch.objects.values())
                if any(is_child(item, job) and not waits(child_of(item, job)) for job in some)
            ]
        after = self._operator_metrics()
        cpu = "process_cpu_seconds_total"
        kubectl = self._create(items, "bench-many-bare")
        scale = JOBS / TEMPLATE_JOBS
        same = f"kubectl create, the same objects of {TEMPLATE_JOBS} jobs, times {scale:g}"
        yield figure(
            f"operator_children_of_{JOBS}_jobs", seconds, "s", same, kubectl.seconds * scale
        )
        yield figure(
            f"operator_cpu_of_{JOBS}_jobs",
            one_value(after, cpu) - one_value(before, cpu),
            "CPU s",
            same,
            kubectl.cpu_seconds * scale,
        )
        yield figure(
            f"operator_rss_of_{JOBS}_jobs",
            peak,
            "MB",
            "bare kopf, one empty handler, the same jobs",
            self._bare_kopf(),
            at_most=RSS_MB,
        )

    def _have(self, watch: Watch, jobs: list[str]) -> bool:
        return last_seen(dict(watch.first), MANY, jobs, self._children) is not None

    def _settle(self, at_most: float) -> float:
        """Until the operator has written nothing for a while; its largest memory meanwhile, in MB."""
        peak, quiet_since, last = 0.0, time.monotonic(), -1.0
        end = time.monotonic() + at_most
        while time.monotonic() - quiet_since < SETTLE_SECONDS and time.monotonic() < end:
            text = self._operator_metrics()
            peak = max(peak, one_value(text, "process_resident_memory_bytes") / 1e6)
            if (writes := operator_writes(text)) != last:
                quiet_since, last = time.monotonic(), writes
            time.sleep(1.0)
        return peak

    def _bare_kopf(self) -> float:
        """Resident memory of kopf in the operator's own image and place, some seconds after its start, in MB."""
        leader = self._cluster.get("Pod", self._leader(), SYSTEM) or {}
        pod = kopf_pod(leader)
        name = pod["metadata"]["name"]
        self._cluster.apply(pod)
        try:
            return wait_until("bare kopf", lambda: self._told_rss(name), 90)
        finally:
            self._cluster.delete("Pod", name, SYSTEM, gracePeriodSeconds=0)

    def _told_rss(self, name: str) -> float:
        log = self._cluster.kubectl("logs", name, "-n", SYSTEM, check=False)
        return settled_rss_mb(log, JOBS)

    # quiet

    def quiet_minute(self) -> Iterator[Figure]:
        """The hundred jobs are suspended; then a minute is watched."""
        suspend = {"spec": {"suspend": True}}
        for job in self._cluster.list("RLJob", MANY):
            self._cluster.patch("RLJob", job["metadata"]["name"], MANY, suspend)

        def suspended() -> bool:
            jobs = self._cluster.list("RLJob", MANY)
            return all(job.get("status", {}).get("phase") == "Suspended" for job in jobs)

        wait_until("all jobs are suspended", suspended, WAIT_SECONDS, 1.0)
        self._settle(WAIT_SECONDS)
        before = self._operator_metrics(), self._server_metrics()
        time.sleep(QUIET_SECONDS)
        after = self._operator_metrics(), self._server_metrics()
        everything = server_writes(after[1]) - server_writes(before[1])
        kinds = [kind.plural for kind in (*KINDS, resources.RLJOB)]
        everyone = "all clients' writes of all kinds but Leases and Events"
        yield figure(
            "operator_writes_in_a_quiet_minute",
            operator_writes(after[0]) - operator_writes(before[0]),
            "calls",
            everyone,
            everything,
            at_most=0,
        )
        yield figure(
            "writes_to_jobs_and_children_in_a_quiet_minute",
            server_writes(after[1], kinds) - server_writes(before[1], kinds),
            "calls",
            everyone,
            everything,
            at_most=0,
        )

    # take-over

    def take_over(self) -> Iterator[Figure]:
        """The slowest of a few."""
        lease = self._cluster.get("Lease", LEASE, SYSTEM) or {}
        seconds = [self._kill_leader() for _ in range(KILLS)]
        yield figure(
            "operator_lease_taken_over",
            max(seconds),
            "s",
            "the Lease's own duration",
            lease["spec"]["leaseDurationSeconds"],
            at_most=TAKE_OVER_SECONDS,
        )

    def _kill_leader(self) -> float:
        """SIGKILL: a pod that is deleted, however hard, is asked to end first, and gives its Lease back."""
        holder, pod = self._holder(), self._leader()
        pid = on_cluster.pid_of("rljob_operator.main", f"POD_NAME={pod}")
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_until("another leader", lambda: self._holder() not in {"", holder}, 60, 0.05)
        seconds = time.monotonic() - began
        wait_until("it stands by again", lambda: len(self._running()) > 1, 60)
        return seconds

    def _running(self) -> list[Object]:
        pods = self._cluster.list("Pod", SYSTEM, f"{labels.COMPONENT}=operator")
        return [
            pod
            for pod in pods
            if all("running" in c["state"] for c in pod["status"].get("containerStatuses", []))
        ]

    # whom to ask

    def _holder(self) -> str:
        lease = self._cluster.get("Lease", LEASE, SYSTEM) or {}
        return str(lease.get("spec", {}).get("holderIdentity") or "")

    def _leader(self) -> str:
        return wait_until("a leader", self._holder, 60).rpartition("_")[0]

    def _operator_metrics(self) -> str:
        path = self._cluster.path("Pod", SYSTEM, f"{self._leader()}:{METRICS_PORT}")
        return self._text(f"{path}/proxy/metrics")

    def _server_metrics(self) -> str:
        return self._text("metrics")

    def _text(self, path: str) -> str:
        answer = self._cluster.api("GET", path)
        answer.raise_for_status()
        return answer.text
