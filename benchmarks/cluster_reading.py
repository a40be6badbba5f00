"""What the benchmark of the operator reads: children by their names, logs, metrics. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.on_cluster import ROOT
from benchmarks.watching import Seen
from rljob.kube.resources import Object

MANIFEST = ROOT / "examples" / "simulated" / "rljob.yaml"
Child = tuple[str, str]
"""Kind, and name after the job's."""
BARE_KOPF = """
import threading, time, kopf
events = 0

@kopf.on.startup()
def configure(settings, **_):
    settings.scanning.disabled = True
    settings.posting.enabled = False

@kopf.on.event("rljob.dev", "v1alpha1", "rljobs")
def seen(**_):
    global events
    events += 1

def tell():
    while True:
        print("rss", open("/proc/self/statm").read().split()[1], "events", events, flush=True)
        time.sleep(1)

threading.Thread(target=tell, daemon=True).start()
kopf.run(standalone=True, clusterwide=True)
"""
"""What anyone would start from: it tells its resident pages and the events it has heard, every second."""


# ── jobs and their children ──


def manifest(name: str, namespace: str, **spec: Any) -> Object:
    """The simulated example under another name, parts of its spec replaced."""
    made = yaml.safe_load(MANIFEST.read_text())
    made["metadata"] = {"name": name, "namespace": namespace}
    made["spec"] |= spec
    return made


def is_child(item: Object, job: str) -> bool:
    """Owned by the RLJob."""
    owners = item["metadata"].get("ownerReferences", [])
    return any(owner["kind"] == "RLJob" and owner["name"] == job for owner in owners)


def waits(child: Child) -> bool:
    """Comes only when the store is up, or preparing is done."""
    kind, rest = child
    return kind in {"Job", "SandboxPool"} or (kind, rest) == ("StatefulSet", "-rollout")


def child_of(item: Object, job: str) -> Child:
    """Without the job's name."""
    return item["kind"], item["metadata"]["name"].removeprefix(job)


def last_seen(
    first: dict[Seen, float], namespace: str, jobs: Iterable[str], wanted: Iterable[Child]
) -> float | None:
    """When the last of the wanted children of all jobs was seen first; None: some were not."""
    names = [Seen(kind, namespace, job + rest) for job in jobs for kind, rest in wanted]
    if any(name not in first for name in names):
        return None
    return max(first[name] for name in names)


def first_step_at(log: str) -> float:
    """When the first step was logged, by the container runtime's clock: seconds since the epoch; 0: it was not."""
    for line in log.splitlines():
        at, _, said = line.partition(" ")
        if re.search(r"\bevent=\"?trained\b|\"event\": ?\"trained\"", said):
            return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*Z$", r"\1+00:00", at)).timestamp()
    return 0.0


# ── pods to compare with ──


def bare_pod(image: str, namespace: str) -> Object:
    """Starts, does nothing and ends."""
    container = {"name": "bare", "image": image, "command": ["python", "-c", "pass"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "bare", "namespace": namespace},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }


def kopf_pod(operator: Object) -> Object:
    """Bare kopf in the image, with the rights and on the node of an operator's pod."""
    spec = operator["spec"]
    container = {
        "name": "kopf",
        "image": spec["containers"][0]["image"],
        "command": ["python", "-c", BARE_KOPF],
        "env": [{"name": "HOME", "value": "/tmp"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "bare-kopf", "namespace": operator["metadata"]["namespace"]},
        "spec": {
            "nodeName": spec["nodeName"],
            "serviceAccountName": spec["serviceAccountName"],
            "automountServiceAccountToken": True,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
        },
    }


def settled_rss_mb(log: str, num_events: int) -> float:
    """Memory that bare kopf told some seconds after it had heard so many events, in MB; 0: not yet."""
    found = re.findall(r"^rss (\d+) events (\d+)$", log, re.M)
    settled = [int(pages) for pages, events in found if int(events) >= num_events]
    return settled[-1] * os.sysconf("SC_PAGE_SIZE") / 1e6 if len(settled) >= 5 else 0.0


# ── metrics ──

_WRITES = {"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}
_NO_STATE = {"tokenreviews", "subjectaccessreviews", "selfsubjectaccessreviews"}
_ASIDE = {"leases", "events", *_NO_STATE}


def operator_writes(text: str) -> float:
    """Calls that were no reads, in the text of the operator's /metrics."""
    return sum(
        value
        for name, labels_, value in _samples(text)
        if name == "rljob_operator_api_requests_total" and labels_["method"] != "GET"
    )


def server_writes(text: str, kinds: Iterable[str] = ()) -> float:
    """Calls that change objects in the text of the API server's /metrics; Leases and Events aside.

    Args:
        text: As served.
        kinds: Plural names; empty: all.
    """
    wanted = set(kinds)
    return sum(
        value
        for name, of, value in _samples(text)
        if name == "apiserver_request_total"
        and of["verb"] in _WRITES
        and of["resource"] not in _ASIDE
        and of.get("subresource") != "token"
        and (not wanted or of["resource"] in wanted)
    )


def one_value(text: str, name: str) -> float:
    """The only sample of that name. Raises RuntimeError."""
    found = [value for sample, _, value in _samples(text) if sample == name]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} samples of {name}")
    return found[0]


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
