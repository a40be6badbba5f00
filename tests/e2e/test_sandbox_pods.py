"""Sandboxes as pods of a real cluster, by the chart's own pool manager: claimed, used, reset, adopted, replaced."""

import asyncio
import time
from typing import Any

import pytest

from rljob.errors import DeadlineError, ManifestError, SandboxError
from rljob.sandbox_client import SandboxClient
from tests.harness.cluster import wait_until
from tests.harness.sandbox_pools import CLAIM_SECONDS, JOB, Pools


async def test_a_sandbox_is_claimed_used_reset_and_used_again(pools: Pools) -> None:
    pools.make("default")
    pools.wait_ready("default", 2)
    async with pools.client() as client:
        async with client.claim("default", timeout=CLAIM_SECONDS, env={"LANG": "C"}) as box:
            first = box.id
            assert (await box.exec("echo $LANG; cat", stdin=b"in")).stdout == "C\nin"
            await box.write_file("deep/a.bin", bytes(range(256)))
            assert await box.read_file("/workspace/deep/a.bin") == bytes(range(256))
            assert (
                await box.exec("echo left > /tmp/left; sleep 1000 & sleep 1000", timeout=1)
            ).timed_out
        ids = set()
        for _ in range(6):
            async with client.claim("default", timeout=CLAIM_SECONDS) as box:
                ids.add(box.id)
                assert (await box.exec("ls -A /workspace /tmp | grep -v :")).stdout.split() == []
                running = await box.exec("cat /proc/[0-9]*/comm | sort -u")
                assert "sleep" not in running.stdout
        assert first in ids
    assert len(pools.pods()) <= 3


async def test_a_sandbox_cannot_end_or_read_its_guest(pools: Pools) -> None:
    pools.make("default", warm=1, max=1)
    async with pools.client() as client, client.claim("default", timeout=CLAIM_SECONDS) as box:
        await box.exec("kill -9 1; kill -STOP 1; kill -TERM 1")
        for path in ("environ", "mem", "maps", "fd", "root"):
            result = await box.exec(f"cat /proc/1/{path} 2>&1; ls /proc/1/{path} 2>&1")
            assert "ermission denied" in result.stdout, path
        result = await box.exec("env; cat /proc/self/status")
        assert "RLJOB" not in result.stdout
        assert "CapEff:\t0000000000000000" in result.stdout
        assert "NoNewPrivs:\t1" in result.stdout
        for path in ("/x", "/etc/x", "/opt/rljob/guest/x", "/var/tmp/x"):
            assert (await box.exec(f"touch {path}")).exit_code != 0
        assert (await box.exec("ls /var/run/secrets")).exit_code != 0


async def test_limits_hold_and_the_sandbox_lives(pools: Pools) -> None:
    limits = {"pids": 32, "diskMib": 8, "memoryMib": 64}
    pools.make("default", warm=1, max=1, limits=limits)
    async with pools.client() as client, client.claim("default", timeout=CLAIM_SECONDS) as box:
        bomb = await box.exec("b() { b | b & }; b; sleep 30", timeout=3)
        assert bomb.timed_out
        full = await box.exec("head -c 20000000 /dev/zero > /workspace/big; echo $?")
        assert full.stdout.strip() != "0"
        assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_all_places_taken_is_said_and_a_release_is_given_to_who_waits(pools: Pools) -> None:
    pools.make("default", warm=1, max=2)
    async with pools.client() as client:
        held = [await client.acquire("default", timeout=CLAIM_SECONDS) for _ in range(2)]
        with pytest.raises(DeadlineError, match="all 2 sandboxes"):
            await client.acquire("default", timeout=2)
        waiting = asyncio.create_task(client.acquire("default", timeout=CLAIM_SECONDS))
        await asyncio.sleep(0.5)
        await held.pop().release()
        held.append(await waiting)
        assert len(pools.pods()) == 2
        for box in held:
            await box.release()


async def test_jobs_see_their_own_pools_and_the_shared_ones(pools: Pools) -> None:
    pools.make(f"{JOB}-default", job=JOB, warm=0)
    pools.make("default", warm=0)
    pools.make("other-secret", job="other", warm=0)
    wait_until("observed", lambda: pools.status("other-secret").get("observedGeneration"), 30)
    async with pools.client() as client:
        names = [pool.name for pool in await client.pools()]
        assert names == ["default"]
        with pytest.raises(ManifestError, match="no pool 'secret'"):
            await client.acquire("secret", timeout=5)
        forged = SandboxClient(client.url, f"{pools.namespace}/{JOB}:0000")
        with pytest.raises(SandboxError, match="token is missing or wrong"):
            await forged.acquire("default", timeout=5)
        await forged.aclose()


async def test_a_killed_manager_is_succeeded_and_claims_go_on(pools: Pools) -> None:
    pools.make("default")
    pools.wait_ready("default", 2)
    async with pools.client() as client:
        box = await client.acquire("default", timeout=CLAIM_SECONDS)
        await box.write_file("keep", b"1")
        running = asyncio.create_task(box.exec("sleep 20; echo done", timeout=60))
        before, killed = set(pools.pods()), pools.active()
        pools.cluster.delete("Pod", killed, pools.system, gracePeriodSeconds=0)
        await asyncio.to_thread(
            wait_until, "a successor", lambda: pools.active_now() not in ("", killed), 60
        )
        assert (await running).stdout == "done\n"
        assert await box.read_file("keep") == b"1"
        async with pools.client() as successor:
            (status,) = await successor.pools()
            assert status.claimed == 1
            assert await successor.release_claim(box.claim_id)
            (status,) = await successor.pools()
            assert status.claimed == 0
        assert before <= set(pools.pods())
        with pytest.raises(SandboxError):
            await box.exec("true")
        await box.release()


async def test_a_claim_that_nobody_releases_ends_with_its_time(pools: Pools) -> None:
    pools.make("default", warm=1, max=1)
    async with pools.client() as client:
        box = await client.acquire("default", timeout=CLAIM_SECONDS, ttl_seconds=3)
        other = await client.acquire("default", timeout=CLAIM_SECONDS)
        assert other.id != box.id
        await other.release()
        await box.release()


def test_a_pool_that_goes_leaves_no_pod(pools: Pools) -> None:
    pools.make("default")
    pools.wait_ready("default", 2)
    pools.cluster.delete("SandboxPool", "default", pools.namespace)
    wait_until("no pod", lambda: not pools.pods(), 60)


def test_a_deleted_sandbox_is_replaced(pools: Pools) -> None:
    pools.make("default")
    pools.wait_ready("default", 2)
    name = next(iter(pools.pods()))
    pools.cluster.delete("Pod", name, pools.namespace, gracePeriodSeconds=0)
    wait_until("it is gone", lambda: name not in pools.pods(), 30)
    wait_until("two pods", lambda: len(pools.pods()) == 2, 60)
    pools.wait_ready("default", 2)


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"images": [{"image": "localhost/there-is-none:1"}]}, "ImageUnavailable", "there-is-none"),
        ({"resources": {"requests": {"cpu": "500"}}}, "CapacityLimited", "Insufficient cpu"),
    ],
)
def test_what_keeps_sandboxes_from_coming_up_is_a_condition_without_churn(
    pools: Pools, spec: dict[str, Any], reason: str, words: str
) -> None:
    pools.make("default", **spec)
    wait_until(reason, lambda: pools.condition("default", "Degraded").get("reason") == reason, 90)
    assert words in pools.condition("default", "Degraded")["message"]
    names = set(pools.pods())
    time.sleep(10)
    assert set(pools.pods()) == names
    pools.cluster.patch("SandboxPool", "default", pools.namespace, {"spec": {"warm": 0}})
    wait_until("no pod", lambda: not pools.pods(), 60)


def test_a_quota_is_a_condition_and_its_end_is_noticed(pools: Pools) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}}
    pools.cluster.apply({**quota, "spec": {"hard": {"pods": "1"}}}, pools.namespace)
    pools.make("default")
    wait_until(
        "said", lambda: pools.condition("default", "Degraded").get("reason") == "StartsFailing", 60
    )
    assert "exceeded quota" in pools.condition("default", "Degraded")["message"]
    assert len(pools.pods()) == 1
    pools.cluster.delete("ResourceQuota", "q", pools.namespace)
    pools.wait_ready("default", 2, 120)


async def test_simulated_pools_are_claimed_without_pods(pools: Pools) -> None:
    pools.make("default", runtime="simulated", warm=20, max=30)
    pools.wait_ready("default", 20)
    async with pools.client() as client:
        box = await client.acquire("default", timeout=CLAIM_SECONDS)
        assert await client.release_claim(box.claim_id)
        await box.release()
    assert pools.pods() == {}


def test_scaling_by_the_scale_subresource(pools: Pools) -> None:
    pools.make("default", warm=1, max=3)
    pools.wait_ready("default", 1)
    pools.cluster.kubectl("-n", pools.namespace, "scale", "rlpool/default", "--replicas=2")
    pools.wait_ready("default", 2)
