"""Around the sandboxes of a real cluster: policies of each egress, writable paths, the Secret, orphans."""

import base64
from typing import Any

from rljob import labels
from rljob.sandbox_client import ClaimedSandbox, SandboxClient
from tests.harness.cluster import Cluster, wait_until
from tests.harness.sandbox_pools import CLAIM_SECONDS, Pools

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
