"""A cluster for one benchmark, from nothing to nothing, and what a benchmark asks of it.

    why_no_cluster ─► one line on stderr, no figures
    own_cluster ──► up --kwok (a name and a network of its own, ends with this process) ──► … ──► down, also on Ctrl-C
    installed ────► images of this tree, built and loaded ─► the chart

Shared with the end-to-end suite: tests/harness/cluster.py. It is loaded by its path, since some distribution brings a
package named `tests` of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

from rljob.kube.resources import Object

Cluster: TypeAlias = Any
"""The class of that name in tests/harness/cluster.py."""
T = TypeVar("T")
ROOT = Path(__file__).parents[1]
SYSTEM = "rljob-system"
NODE = "node1"
"""The cluster's only real node."""
POD_ROOM = 200
"""Pods that a fake node takes; its addresses are a /24."""
INSTALL_SECONDS, IMAGES_SECONDS, HELM_SECONDS = 2400, 3000, 300
OWN = {"RLJOB_CLUSTER_NAME": "rlbench", "RLJOB_CLUSTER_NET": "10.86"}
"""Beside any other cluster of this machine."""


def _load(name: str) -> ModuleType:
    path = ROOT / "tests" / "harness" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"rljob_harness_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_harness: Any = _load("cluster")


def wait_until(what: str, probe: Callable[[], T], seconds: float, every: float = 0.5) -> T:
    """The first true value of `probe`. Raises AssertionError when the time is over."""
    return _harness.wait_until(what, probe, seconds, every)


def why_no_cluster() -> str:
    """Why none can be had on this machine; empty: one can."""
    return _harness.why_no_cluster()


def note(text: str) -> None:
    """One line for whoever watches; figures go to stdout."""
    print(f"benchmarks: {text}", file=sys.stderr, flush=True)


@contextmanager
def own_cluster() -> Iterator[Cluster]:
    """A cluster with nothing in it. Raises RuntimeError with what its script said."""
    before = {name: os.environ.get(name) for name in (*OWN, "RLJOB_CLUSTER_STATE")}
    os.environ.update(OWN)
    os.environ.pop("RLJOB_CLUSTER_STATE", None)
    try:
        _script("install", "--kwok")
        _script("up", "--kwok", "--with-pid", str(os.getpid()))
        kubeconfig = Path(_script("kubeconfig").strip())
        reached = _harness.Cluster(kubeconfig, _script("program", "kubectl").strip())
        try:
            yield reached
        finally:
            reached.close()
    finally:
        _harness.script("down", timeout=120)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def install_system(cluster: Cluster) -> None:
    """Images of this tree and the chart, as README says. Raises RuntimeError."""
    build = ROOT / "tests" / "e2e" / "images" / "build"
    _command([sys.executable, str(build), "load"], IMAGES_SECONDS)
    helm = _command([sys.executable, str(ROOT / "tests" / "e2e" / "helm")], HELM_SECONDS).strip()
    options = _load("chart").image_options()
    chart = ["install", "rljob", str(ROOT / "charts" / "rljob"), "-n", SYSTEM, "--create-namespace"]
    waiting = ["--wait", "--timeout", f"{HELM_SECONDS - 60}s"]
    reached = ["--kubeconfig", str(cluster.kubeconfig)]
    _command([helm, *reached, *chart, *options, *waiting], HELM_SECONDS)


def _script(*arguments: str) -> str:
    run = _harness.script(*arguments, timeout=INSTALL_SECONDS)
    if run.returncode:
        raise RuntimeError(f"cluster {arguments[0]}: {(run.stdout + run.stderr)[-1000:]}")
    return run.stdout


def _command(argv: list[str], seconds: float) -> str:
    run = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
    if run.returncode:
        raise RuntimeError(f"{' '.join(argv)[:200]}: {(run.stdout + run.stderr)[-2000:]}")
    return run.stdout


# ── what is in it ──


def make_namespace(cluster: Cluster, name: str) -> str:
    """A fresh namespace, ready for pods."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    wait_until("its account", lambda: cluster.get("ServiceAccount", "default", name), 30, 0.1)
    return name


def fake_nodes(num: int, network: str) -> Object:
    """A List of nodes that kwok plays: their pods are Running at once and never run.

    Args:
        num: How many.
        network: First two numbers of their pods' addresses: node i gives out NETWORK.i.0/24.
    """
    size = {"cpu": "128", "memory": "512Gi", "pods": str(POD_ROOM), "ephemeral-storage": "4Ti"}
    nodes = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": f"fake-{index}",
                "annotations": {"kwok.x-k8s.io/node": "fake"},
                "labels": {"kubernetes.io/hostname": f"fake-{index}", "type": "kwok"},
            },
            "spec": {
                "podCIDR": f"{network}.{index}.0/24",
                "podCIDRs": [f"{network}.{index}.0/24"],
            },
            "status": {"capacity": size, "allocatable": size},
        }
        for index in range(1, num + 1)
    ]
    return {"apiVersion": "v1", "kind": "List", "items": nodes}


def only_fake_nodes(cluster: Cluster, num: int, network: str) -> None:
    """From here on new pods go to fake nodes; what runs on the real one stays."""
    cluster.apply(fake_nodes(num, network))
    cluster.patch("Node", NODE, None, {"spec": {"unschedulable": True}})

    def ready() -> bool:
        nodes = [n for n in cluster.list("Node") if n["metadata"]["name"] != NODE]
        return len(nodes) == num and all(_is_ready(node) for node in nodes)

    wait_until(f"{num} fake nodes", ready, 60)


def _is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


_SET_BY_THE_SERVER = (
    *("creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"),
    *("generation", "managedFields", "namespace", "ownerReferences", "resourceVersion", "uid"),
)
_PER_OBJECT = {
    "Service": ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"),
    "PersistentVolumeClaim": ("volumeName",),
    "Job": ("selector",),
}
_JOB_CONTROLLER = re.compile(r"controller-uid|batch\.kubernetes\.io/|^job-name$")


def bare(objects: Iterable[Object]) -> Object:
    """A List of the same objects as anyone would have written them: nothing of owner, server and controllers in it."""
    return {"apiVersion": "v1", "kind": "List", "items": [_bare(item) for item in objects]}


def _bare(item: Object) -> Object:
    metadata = {k: v for k, v in item["metadata"].items() if k not in _SET_BY_THE_SERVER}
    annotations = dict(metadata.pop("annotations", {}))
    for name in [name for name in annotations if "kubernetes.io" in name]:
        del annotations[name]
    made = {k: v for k, v in item.items() if k not in {"metadata", "status"}}
    made["metadata"] = metadata | ({"annotations": annotations} if annotations else {})
    if "spec" in made:
        dropped = _PER_OBJECT.get(item["kind"], ())
        made["spec"] = {k: v for k, v in made["spec"].items() if k not in dropped}
    if item["kind"] == "Job":
        template = made["spec"]["template"]
        kept = {
            k: v
            for k, v in template["metadata"].get("labels", {}).items()
            if not _JOB_CONTROLLER.search(k)
        }
        made["spec"]["template"] = {
            **template,
            "metadata": {**template["metadata"], "labels": kept},
        }
    return made


# ── processes ──


def pid_of(*words: str) -> int:
    """The one process of this machine (containers included) whose command line or environment holds all words."""
    found = [pid for pid in _pids() if all(word in _told(pid) for word in words)]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} processes with {', '.join(words)}")
    return found[0]


def _pids() -> list[int]:
    found = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [pid for pid in found if pid != os.getpid()]


def _told(pid: int) -> str:
    try:
        folder = Path(f"/proc/{pid}")
        text = (folder / "cmdline").read_bytes() + b"\0" + (folder / "environ").read_bytes()
    except OSError:  # it has ended
        return ""
    return text.replace(b"\0", b"\n").decode("utf-8", "replace")


def rss_mb(pid: int) -> float:
    """Resident memory of a process, in 10⁶ bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds_of_children() -> float:
    """Of all commands that this process has run and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
