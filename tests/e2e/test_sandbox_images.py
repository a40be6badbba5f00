"""Images of all kinds as sandboxes of a real cluster: no Python, no glibc, no shell, files that only root reads."""

import pytest

from tests.harness.cluster import Cluster, wait_until
from tests.harness.sandbox_pools import CLAIM_SECONDS, Pools

TREE = "find /testbed -exec stat -c '%n %a %h %s %Y %N' {} + | sort; cat /testbed/src/* /testbed/private"


async def test_an_image_whose_python_is_too_old(
    pools: Pools, sandbox_images: dict[str, str]
) -> None:
    pools.make("default", images=[{"image": sandbox_images["shell"]}], warm=1)
    async with pools.client() as client, client.claim("default", timeout=CLAIM_SECONDS) as box:
        assert (await box.exec("python3 --version")).stdout == "Python 2.4\n"
        await box.write_file("deep/a.bin", bytes(range(256)))
        assert (await box.exec("wc -c < deep/a.bin")).stdout.strip() == "256"
        assert (await box.exec("sleep 60 & sleep 60", timeout=1)).timed_out
        await box.reset()
        assert (await box.exec("ls -A /workspace")).stdout == ""


async def test_an_image_with_musl_alone(pools: Pools, sandbox_images: dict[str, str]) -> None:
    pools.make("default", images=[{"image": sandbox_images["musl"]}], warm=1)
    async with pools.client() as client, client.claim("default", timeout=CLAIM_SECONDS) as box:
        loader = await box.exec(["/lib/ld-musl-x86_64.so.1"])
        assert "musl libc" in loader.stderr
        assert (await box.exec("ls /lib/x86_64-linux-gnu/libc.so.6")).exit_code != 0
        assert (await box.exec("echo $((6 * 7))")).stdout == "42\n"


async def test_an_image_without_a_shell(pools: Pools, sandbox_images: dict[str, str]) -> None:
    pools.make("default", images=[{"image": sandbox_images["distroless"]}], warm=1)
    async with pools.client() as client, client.claim("default", timeout=CLAIM_SECONDS) as box:
        assert (await box.exec(["/app/busybox", "echo", "a b"])).stdout == "a b\n"
        missing = await box.exec("echo never")
        assert missing.exit_code == 127
        await box.write_file("a", b"1")
        assert await box.read_file("a") == b"1"
        await box.reset()
        with pytest.raises(FileNotFoundError):
            await box.read_file("a")


async def test_the_root_file_system_is_read_only_everywhere(
    pools: Pools, sandbox_images: dict[str, str]
) -> None:
    pools.make("default", images=[{"image": sandbox_images["shell"]}], warm=1)
    async with pools.client() as client, client.claim("default", timeout=CLAIM_SECONDS) as box:
        found = await box.exec(
            "find / -xdev -type d 2>/dev/null | while read -r d; do "
            'if [ -w "$d" ] && touch "$d/.t" 2>/dev/null; then echo "$d"; fi; done'
        )
        # Volumes of the pod; a touch of the last one is what a reset would find.
        assert set(found.stdout.split()) == {"/workspace", "/tmp", "/run/rljob"}


@pytest.fixture
def runc(cluster: Cluster) -> str:
    """A RuntimeClass; it stands for one that isolates, which no test machine has."""
    kind = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass"}
    cluster.apply({**kind, "metadata": {"name": "rljob-e2e"}, "handler": "runc"})
    return "rljob-e2e"


async def test_an_image_of_root_is_used_as_root_and_brought_back(
    cluster: Cluster, pools: Pools, sandbox_images: dict[str, str], runc: str
) -> None:
    label = "pod-security.kubernetes.io/enforce"
    cluster.patch("Namespace", pools.namespace, None, {"metadata": {"labels": {label: "baseline"}}})
    pools.make(
        "default",
        images=[{"image": sandbox_images["root"]}],
        podSecurity="baseline",
        runtimeClassName=runc,
        writablePaths=["/testbed"],
        warm=1,
        max=1,
    )
    async with pools.client() as client:
        async with client.claim("default", timeout=CLAIM_SECONDS) as box:
            first = box.id
            assert (await box.exec("id -u; cat /testbed/private")).stdout == "0\nonly root\n"
            before = (await box.exec(TREE)).stdout
            assert "/testbed/link" in before
            changed = await box.exec(
                "cd /testbed; echo B=2 >> src/a.py; rm -r private; ln -sf /etc/passwd link; "
                "mkdir new; touch new/x; chmod 777 src/run.sh; chown 7:7 src; sleep 100 & "
            )
            assert changed.exit_code == 0, changed.stderr
            for path in ("environ", "mem", "fd"):
                assert (await box.exec(f"cat /proc/1/{path} | head -c 10")).stdout == "", path
            await box.exec("kill -9 1; kill -STOP 1")
            assert (await box.exec("echo alive")).stdout == "alive\n"
        async with client.claim("default", timeout=CLAIM_SECONDS) as box:
            assert box.id == first
            assert (await box.exec(TREE)).stdout == before
            assert (await box.exec("stat -c %u:%g /testbed/src")).stdout == "0:0\n"


def test_a_runtime_class_that_is_not_there_is_named(pools: Pools) -> None:
    pools.make("default", runtimeClassName="there-is-none")
    said = wait_until("said", lambda: pools.condition("default", "Degraded").get("message", ""), 60)
    assert "there-is-none" in said
    assert pools.pods() == {}


def test_images_are_pulled_before_they_are_wanted_even_those_without_a_shell(
    cluster: Cluster, pools: Pools, sandbox_images: dict[str, str]
) -> None:
    images = [{"image": sandbox_images[name]} for name in ("distroless", "musl")]
    pools.make("default", images=images, warm=0, prePull=True)

    def pulled() -> bool:
        found = cluster.list("DaemonSet", pools.namespace)
        status = found[0].get("status", {}) if found else {}
        return status.get("numberReady", 0) >= 1

    wait_until("pulled on the node", pulled, 120)
    pools.cluster.patch("SandboxPool", "default", pools.namespace, {"spec": {"prePull": False}})
    wait_until("no DaemonSet", lambda: not cluster.list("DaemonSet", pools.namespace), 60)
