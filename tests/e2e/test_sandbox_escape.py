"""What a command in a sandbox of a job must not reach, on a real cluster with its policies enforced.

Every address is dialled twice: from the node, where it must answer, and from inside the sandbox, where it must not.
"""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rljob import labels
from rljob.sandbox_client import ClaimedSandbox
from tests.harness.cluster import SCRIPT, Cluster, script
from tests.harness.cluster_job import ClusterJob
from tests.harness.sandbox_pools import CLAIM_SECONDS, SANDBOXES, Pools

METADATA, PUBLIC = "169.254.169.254", "203.0.113.7"
"""Where clouds tell a node's credentials; an address that stands for the internet. Both on the node's loopback."""
OUTSIDE_PORT = 80
API_SERVER_PORT = 6443
KUBELET_PORT = 10250
_SERVER = (
    "import http.server, sys, threading; "
    f"server = http.server.HTTPServer(('0.0.0.0', {OUTSIDE_PORT}), "
    "http.server.BaseHTTPRequestHandler); "
    "threading.Thread(target=server.serve_forever, daemon=True).start(); sys.stdin.read()"
)
"""Until its standard input ends: a signal would end nsenter alone, which is not the server."""
Address = tuple[str, int]


@pytest.fixture
def outside(cluster: Cluster) -> Iterator[dict[str, Address]]:
    """What answers beyond the pods' network."""
    for host in (METADATA, PUBLIC):
        added = script("in", "ip", "address", "add", f"{host}/32", "dev", "lo")
        assert added.returncode == 0, added.stderr
    argv = [sys.executable, str(SCRIPT), "in", sys.executable, "-c", _SERVER]
    server = subprocess.Popen(argv, stdin=subprocess.PIPE)
    try:
        yield {"metadata": (METADATA, OUTSIDE_PORT), "internet": (PUBLIC, OUTSIDE_PORT)}
    finally:
        server.communicate(timeout=20)
        for host in (METADATA, PUBLIC):
            script("in", "ip", "address", "del", f"{host}/32", "dev", "lo")


def addresses(cluster: Cluster, pools: Pools, job: ClusterJob, own: str) -> dict[str, Address]:
    """Name → address of all that listens in the cluster, the sandbox itself left out."""
    (node,) = [
        address["address"]
        for item in cluster.list("Node")
        if "kwok" not in str(item["metadata"].get("annotations"))
        for address in item["status"]["addresses"]
        if address["type"] == "InternalIP"
    ]
    service = cluster.get("Service", "kubernetes", "default") or {}
    (worker,) = job.pods("rollout")
    (store,) = job.pods("store")
    found = {
        "API server": (node, API_SERVER_PORT),
        "API server's service": (service["spec"]["clusterIP"], 443),
        "kubelet": (node, KUBELET_PORT),
        "store": (store["status"]["podIP"], labels.STORE_PORT),
    }
    ports = {
        "gateway": labels.GATEWAY_PORT,
        "gateway's control": labels.GATEWAY_CONTROL_PORT,
        "engine": labels.ENGINE_PORT,
        "worker's metrics": labels.METRICS_PORT,
        "gateway's metrics": labels.GATEWAY_METRICS_PORT,
    }
    found |= {name: (worker["status"]["podIP"], port) for name, port in ports.items()}
    for pod in cluster.list("Pod", pools.namespace, SANDBOXES):
        if pod["metadata"]["name"] != own and "podIP" in pod["status"]:
            found[f"sandbox {pod['metadata']['name']}"] = (
                pod["status"]["podIP"],
                labels.GUEST_PORT,
            )
    for pod in cluster.list("Pod", pools.system):
        port = labels.BROKER_PORT if "sandbox-pool" in pod["metadata"]["name"] else 8081
        found[pod["metadata"]["name"]] = (pod["status"]["podIP"], port)
    return found


def answers_node(address: Address) -> bool:
    """Whether the node gets a connection."""
    code = f"import socket; socket.create_connection({address!r}, 3)"
    return script("in", sys.executable, "-c", code).returncode == 0


async def reached(box: ClaimedSandbox, targets: dict[str, Address]) -> set[str]:
    """Those that answer the sandbox; all are dialled at once."""
    names = list(targets)
    line = "".join(
        f"(nc -w 5 {host} {port} </dev/null >/dev/null 2>&1 && echo {number}) & "
        for number, (host, port) in enumerate(targets.values())
    )
    result = await box.exec(line + "wait", timeout=60)
    assert (result.exit_code, result.stderr) == (0, "")
    return {names[int(number)] for number in result.stdout.split()}


async def test_nothing_answers_a_sandbox_but_what_its_pool_asks_for(
    cluster: Cluster,
    pools: Pools,
    make_job: Callable[..., ClusterJob],
    sandbox_images: dict[str, str],
    outside: dict[str, Address],
) -> None:
    image = [{"image": sandbox_images["shell"]}]
    own: list[dict[str, Any]] = [
        {"name": "shells", "warm": 2, "max": 40, "images": image},
        {"name": "agents", "warm": 1, "max": 2, "images": image, "egress": "gateway"},
    ]
    job = make_job("escape", trainer__steps=500, sandboxPools=own)
    (task,) = job.manifest["spec"]["tasks"]
    job.manifest["spec"]["tasks"].append({**task, "name": "other", "sandbox": {"pool": "agents"}})
    job.apply().until("it trains", lambda: job.step >= 1, 240)
    async with pools.client("escape", relayed=True) as client:
        async with client.claim("shells", timeout=CLAIM_SECONDS) as box:
            targets = addresses(cluster, pools, job, box.id) | outside
            open_ports = {name for name, address in targets.items() if answers_node(address)}
            # Sandboxes come and go; the engine may listen for its own pod alone.
            must = {"API server", "kubelet", "store", "gateway", "worker's metrics", *outside}
            assert must <= open_ports
            assert any(name.startswith("sandbox ") for name in open_ports)
            assert await reached(box, targets) == set()
            own_guest = {"own guest": ("127.0.0.1", labels.GUEST_PORT)}
            assert await reached(box, own_guest) == {"own guest"}
            names = await box.exec("nslookup kubernetes.default.svc.cluster.local", timeout=20)
            assert names.exit_code != 0
        async with client.claim("agents", timeout=CLAIM_SECONDS) as box:
            others = {name: at for name, at in targets.items() if name != f"sandbox {box.id}"}
            assert await reached(box, others) == {"gateway"}


async def test_the_internet_and_rules_of_ones_own_open_no_more_than_they_say(
    cluster: Cluster,
    pools: Pools,
    sandbox_images: dict[str, str],
    outside: dict[str, Address],
) -> None:
    image = [{"image": sandbox_images["shell"]}]
    pools.make("public", images=image, warm=1, egress="public")
    to = {"ipBlock": {"cidr": f"{METADATA}/32"}}
    rule = {"to": [to], "ports": [{"port": OUTSIDE_PORT, "protocol": "TCP"}]}
    pools.make("custom", images=image, warm=1, egress="custom", egressRules=[rule])
    service = cluster.get("Service", "kubernetes", "default") or {}
    targets = outside | {"API server": (service["spec"]["clusterIP"], 443)}
    async with pools.client() as client:
        async with client.claim("public", timeout=CLAIM_SECONDS) as box:
            assert await reached(box, targets) == {"internet"}
        async with client.claim("custom", timeout=CLAIM_SECONDS) as box:
            assert await reached(box, targets) == {"metadata"}


async def test_nothing_of_the_node_is_in_reach_of_a_command(
    pools: Pools, sandbox_images: dict[str, str]
) -> None:
    pools.make("default", images=[{"image": sandbox_images["shell"]}], warm=1)
    refused = [
        "mount -t tmpfs none /workspace",
        "mount -t proc proc /tmp",
        "unshare -U true",
        "unshare -m true",
        "chroot / true",
        "mknod /workspace/disk b 254 0",
        "ls /sys/fs/cgroup/kubepods",
        "echo 1 > /sys/fs/cgroup/cgroup.procs",
        "echo 1 > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
        "cat /proc/kcore",
        "ls /proc/1/root",
        "hostname else",
        "ping -c 1 127.0.0.1",
        "nsenter -t 1 -m true",
        "cat /var/run/secrets/kubernetes.io/serviceaccount/token",
        "cat /var/lib/kubelet/config.yaml",
        "ls /var/lib/containerd /run/containerd",
    ]
    async with pools.client() as client, client.claim("default", timeout=CLAIM_SECONDS) as box:
        done = [line for line in refused if (await box.exec(line, timeout=20)).exit_code == 0]
        assert done == []
        seen = (await box.exec("cat /proc/[0-9]*/comm")).stdout.split()
        assert "kubelet" not in seen
        assert len(seen) < 10
        assert (await box.exec("find /dev -type b")).stdout == ""


def test_the_node_reaches_what_the_sandboxes_must_not(cluster: Cluster) -> None:
    """The suite's dialling itself works: a port that nobody listens on is not taken for an open one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    assert not answers_node(("127.0.0.1", free))
