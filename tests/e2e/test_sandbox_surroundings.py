"""Around the sandboxes of a real cluster: policies of each egress, writable paths, labels, pre-pull, orphans."""

import base64
from collections.abc import Callable
from typing import Any

from rljob import labels
from rljob.sandbox_client import ClaimedSandbox, SandboxClient
from tests.harness.cluster import Cluster, wait_until
from tests.harness.cluster_job import ClusterJob
from tests.harness.sandbox_pools import CLAIM_SECONDS, SANDBOXES, Pools

API_SERVER_PORT, KUBELET_PORT = 6443, 10250
NAME = "kubernetes.default.svc.cluster.local"


def node_address(cluster: Cluster) -> str:
    (node,) = [
        address["address"]
        for item in cluster.list("Node")
        if "kwok" not in str(item["metadata"].get("annotations"))
        for address in item["status"]["addresses"]
        if address["type"] == "InternalIP"
    ]
    return node


async def reaches(box: ClaimedSandbox, host: str, port: int) -> bool:
    dialled = await box.exec(["nc", "-w", "3", host, str(port)], timeout=20)
    return dialled.exit_code == 0


async def looks_up(box: ClaimedSandbox) -> bool:
    return (await box.exec(f"nslookup {NAME}", timeout=30)).exit_code == 0


def custom(host: str) -> dict[str, Any]:
    ports = [{"port": API_SERVER_PORT, "protocol": "TCP"}]
    return {
        "egress": "custom",
        "egressRules": [{"to": [{"ipBlock": {"cidr": f"{host}/32"}}], "ports": ports}],
    }


async def test_a_sandbox_reaches_what_its_pool_says_and_nothing_else(
    cluster: Cluster, pools: Pools, sandbox_images: dict[str, str]
) -> None:
    node, image = node_address(cluster), [{"image": sandbox_images["shell"]}]
    specs = {
        "none": {},
        "dns": {"egress": "dns"},
        "public": {"egress": "public"},
        "custom": custom(node),
    }
    for name, spec in specs.items():
        pools.make(name, images=image, warm=1, max=1, **spec)
    found: dict[str, tuple[bool, bool, bool]] = {}
    async with pools.client() as client:
        for name in specs:
            async with client.claim(name, timeout=CLAIM_SECONDS) as box:
                found[name] = (
                    await looks_up(box),
                    await reaches(box, node, API_SERVER_PORT),
                    await reaches(box, node, KUBELET_PORT),
                )
    assert found == {
        "none": (False, False, False),
        "dns": (True, False, False),
        "public": (True, False, False),
        "custom": (False, True, False),
    }


async def test_another_egress_holds_for_sandboxes_that_are_there(
    cluster: Cluster, pools: Pools, sandbox_images: dict[str, str]
) -> None:
    node, image = node_address(cluster), [{"image": sandbox_images["shell"]}]
    pools.make("default", images=image, warm=1, max=1, **custom(node))
    async with pools.client() as client, client.claim("default", timeout=CLAIM_SECONDS) as box:
        assert await reaches(box, node, API_SERVER_PORT)
        closed = {"spec": {"egress": "none", "egressRules": None}}
        cluster.patch("SandboxPool", "default", pools.namespace, closed)

        def egress() -> bool:
            policy = cluster.get("NetworkPolicy", "default.sandboxes", pools.namespace) or {}
            return "egress" not in policy["spec"]

        wait_until("the policy follows", egress, 30)
        for _ in range(20):
            if not await reaches(box, node, API_SERVER_PORT):
                return
        raise AssertionError("the policy is not enforced")


async def test_only_a_gateway_pool_reaches_the_gateways_and_nothing_else(
    pools: Pools, make_job: Callable[..., ClusterJob], sandbox_images: dict[str, str]
) -> None:
    image = [{"image": sandbox_images["shell"]}]
    own = [{"name": "shells", "warm": 1, "max": 40, "images": image, "egress": "gateway"}]
    job = make_job("open", trainer__steps=500, sandboxPools=own).apply()
    job.until("it trains", lambda: job.step >= 1, 240)
    async with (
        pools.client("open", relayed=True) as client,
        client.claim("shells", timeout=CLAIM_SECONDS) as box,
    ):
        (worker,) = job.pods("rollout")
        host = worker["status"]["podIP"]
        assert await reaches(box, host, labels.GATEWAY_PORT)
        for port in (labels.GATEWAY_CONTROL_PORT, labels.ENGINE_PORT, labels.METRICS_PORT):
            assert not await reaches(box, host, port), port
        assert not await looks_up(box)


async def test_writable_paths_begin_as_the_image_has_them_and_come_back(
    pools: Pools, sandbox_images: dict[str, str]
) -> None:
    pools.make(
        "default",
        images=[{"image": sandbox_images["shell"]}],
        writablePaths=["/usr/share", "/data"],
        recycle={"canary": "ls /usr/share"},
        warm=1,
        max=1,
    )
    tree = "find /usr/share /data | sort | cksum"
    async with pools.client() as client:
        async with client.claim("default", timeout=CLAIM_SECONDS) as box:
            first, before = box.id, (await box.exec(tree)).stdout
            assert int((await box.exec("find /usr/share | wc -l")).stdout) > 5
            changed = await box.exec(
                "rm -r $(find /usr/share -type f | head -n 1) && touch /data/x /usr/share/y"
            )
            assert changed.exit_code == 0, changed.stderr
            assert (await box.exec("touch /usr/x")).exit_code != 0
            assert (await box.exec("touch /opt/rljob/seeds/0/x")).exit_code != 0
        async with client.claim("default", timeout=CLAIM_SECONDS) as box:
            assert box.id == first
            assert (await box.exec(tree)).stdout == before


async def test_a_writable_root_is_replaced_with_its_sandbox(
    cluster: Cluster, pools: Pools, sandbox_images: dict[str, str]
) -> None:
    label = "pod-security.kubernetes.io/enforce"
    cluster.patch("Namespace", pools.namespace, None, {"metadata": {"labels": {label: "baseline"}}})
    kind = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass"}
    cluster.apply({**kind, "metadata": {"name": "rljob-e2e"}, "handler": "runc"})
    spec = {"readOnlyRoot": False, "recycle": {"strategy": "recreate"}}
    spec |= {"podSecurity": "baseline", "runtimeClassName": "rljob-e2e"}
    pools.make("default", images=[{"image": sandbox_images["root"]}], warm=1, max=2, **spec)
    ids = set()
    async with pools.client() as client:
        for _ in range(2):
            async with client.claim("default", timeout=CLAIM_SECONDS) as box:
                ids.add(box.id)
                assert (await box.exec("ls /bin/left")).exit_code != 0
                assert (await box.exec("touch /bin/left")).exit_code == 0
                assert (await box.exec("touch /opt/rljob/guest/left")).exit_code != 0
    assert len(ids) == 2


async def test_kubectl_shows_who_holds_what(cluster: Cluster, pools: Pools) -> None:
    pools.make("default", warm=1, max=2)

    def shown() -> list[list[str]]:
        wanted = f"{labels.STATE},{labels.HOLDER_JOB}"
        text = cluster.kubectl(
            "get", "pods", "-n", pools.namespace, "-l", SANDBOXES, "-L", wanted, "--no-headers"
        )
        return sorted(line.split()[5:] for line in text.splitlines())

    async with pools.client() as client, client.claim("default", timeout=CLAIM_SECONDS) as box:
        held = [["claimed", "job-1"], ["ready"]]
        wait_until("labels", lambda: shown() == held, 60)
        notes = pools.pods()[box.id]["metadata"]["annotations"]
        assert notes[labels.CLAIM] == box.claim_id
    wait_until("labels", lambda: {row[0] for row in shown()} == {"ready"}, 60)


def test_images_are_pulled_on_every_node_for_as_long_as_that_is_wanted(
    cluster: Cluster, pools: Pools, sandbox_images: dict[str, str]
) -> None:
    images = [{"image": sandbox_images[name]} for name in ("distroless", "musl")]
    pools.make("default", images=images, prePull=True, warm=0)
    pulling = f"{labels.COMPONENT}=pre-pull"

    def running() -> bool:
        found = cluster.list("Pod", pools.namespace, pulling)
        real = [pod for pod in found if "kwok" not in pod["spec"].get("nodeName", "")]
        return bool(real) and all(pod["status"].get("phase") == "Running" for pod in real)

    wait_until("images are there", running, 90)
    cluster.patch("SandboxPool", "default", pools.namespace, {"spec": {"prePull": False}})
    wait_until("gone", lambda: not cluster.list("Pod", pools.namespace, pulling), 60)


async def test_the_secret_of_a_pool_opens_it(cluster: Cluster, pools: Pools) -> None:
    pools.make("default", warm=1, max=1)
    pools.make("other", warm=0)
    secret = wait_until(
        "the Secret", lambda: cluster.get("Secret", "default-claims", pools.namespace), 30
    )
    data = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert data["url"].startswith("http://rljob-sandbox-pool.")
    with pools.broker() as address:
        client = SandboxClient(address, data["token"])
        try:
            assert [pool.name for pool in await client.pools()] == ["default"]
            async with client.claim("default", timeout=CLAIM_SECONDS) as box:
                assert (await box.exec("echo in")).stdout == "in\n"
        finally:
            await client.aclose()


def test_a_sandbox_pod_that_belongs_to_nobody_goes(cluster: Cluster, pools: Pools) -> None:
    pools.make("default", warm=1, max=1)
    pools.wait_ready("default", 1)
    (pod,) = pools.pods().values()
    kept = {key: pod["metadata"]["labels"][key] for key in (labels.COMPONENT, labels.MANAGED_BY)}
    metadata = {"name": "orphan", "namespace": pools.namespace, "labels": kept}
    spec = {key: value for key, value in pod["spec"].items() if key != "nodeName"}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    assert "orphan" in pools.pods()
    wait_until("it is gone", lambda: "orphan" not in pools.pods(), 150)
    assert pod["metadata"]["name"] in pools.pods()
