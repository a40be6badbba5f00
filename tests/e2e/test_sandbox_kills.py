"""Pool manager and operator killed at random while several jobs claim: one owner at a time, nothing left behind.

`RLJOB_E2E_CLAIMS=2000` is the long form.
"""

import asyncio
import os
import random
import socket
import subprocess

import pytest

from rljob.broker_token import job_token
from rljob.errors import SandboxError
from rljob.sandbox_client import SandboxClient
from tests.harness.cluster import wait_until
from tests.harness.sandbox_pools import Pools

NUM_CLAIMS = int(os.environ.get("RLJOB_E2E_CLAIMS", "150"))
NUM_CLIENTS, WARM, MAX = 4, 4, 6
TTL_SECONDS = 60.0
KILL_SECONDS = (8.0, 20.0)
_HOLD = "set -C; echo {me} > /workspace/owner && sleep 0.05 && cat /workspace/owner"


async def forward(pools: Pools, port: int) -> None:
    """kubectl port-forward, again whenever it ends or leads to a pod that serves no more."""
    while True:
        pod = await asyncio.to_thread(pools.active_now)
        if not pod:
            await asyncio.sleep(0.5)
            continue
        argv = pools.cluster.kubectl_argv("-n", pools.system, "port-forward", pod, f"{port}:8080")
        forwarding = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while forwarding.poll() is None and await asyncio.to_thread(pools.active_now) == pod:
                await asyncio.sleep(0.5)
        finally:
            forwarding.kill()
            forwarding.wait()


async def kill_at_random(pools: Pools, chance: random.Random) -> None:
    """The active pool manager or an operator, without a grace period."""
    while True:
        await asyncio.sleep(chance.uniform(*KILL_SECONDS))
        kind = chance.choice(("sandbox-pool", "sandbox-pool", "operator"))
        selector = f"app.kubernetes.io/component={kind}"
        found = await asyncio.to_thread(pools.cluster.list, "Pod", pools.system, selector)
        names = [pod["metadata"]["name"] for pod in found]
        active = await asyncio.to_thread(pools.active_now)
        name = active if kind == "sandbox-pool" and active else chance.choice(names)
        await asyncio.to_thread(
            pools.cluster.delete, "Pod", name, pools.system, gracePeriodSeconds=0
        )


class Claiming:
    """What the clients saw."""

    def __init__(self) -> None:
        self.left = NUM_CLAIMS
        self.done = self.lost = 0
        self.doubles: list[str] = []

    async def run(self, client: SandboxClient, me: str) -> None:
        """Claim, hold, look whether the sandbox is ours alone, release; until all claims are made."""
        while self.left > 0:
            self.left -= 1
            try:
                async with client.claim("default", timeout=120, ttl_seconds=TTL_SECONDS) as box:
                    mine = f"{me}-{self.left}"
                    result = await box.exec(_HOLD.format(me=mine), timeout=20)
            except SandboxError:
                self.lost += 1  # the sandbox went with its pod: a named error, another claim
                continue
            self.done += 1
            if result.stdout.strip() != mine:
                self.doubles.append(f"{mine} in {box.id}: {result.stdout!r} {result.stderr!r}")


async def count_at_most(pools: Pools) -> None:
    """Never more pods than the pool's max."""
    while True:
        pods = await asyncio.to_thread(pools.pods)
        living = [
            name for name, pod in pods.items() if not pod["metadata"].get("deletionTimestamp")
        ]
        assert len(living) <= MAX, living
        await asyncio.sleep(0.5)


@pytest.mark.timeout(1800)
async def test_random_kills_leave_one_owner_at_a_time_and_no_orphan(pools: Pools) -> None:
    pools.make("default", warm=WARM, max=MAX)
    pools.wait_ready("default", WARM)
    claiming, chance = Claiming(), random.Random(5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    background = [
        asyncio.create_task(forward(pools, port)),
        asyncio.create_task(kill_at_random(pools, chance)),
        asyncio.create_task(count_at_most(pools)),
    ]
    jobs = [f"job-{number}" for number in range(NUM_CLIENTS)]
    clients = [
        SandboxClient(
            f"http://127.0.0.1:{port}",
            job_token(pools.key, pools.namespace, job),
            owner=job,
            boot_id="1",
        )
        for job in jobs
    ]
    try:
        await asyncio.gather(
            *(claiming.run(client, job) for client, job in zip(clients, jobs, strict=True))
        )
        background[1].cancel()
        for client in clients:
            await client.aclose()
    finally:
        for task in background:
            task.cancel()
        ended = await asyncio.gather(*background, return_exceptions=True)
    assert not [each for each in ended if isinstance(each, AssertionError)], ended
    assert claiming.doubles == []
    assert claiming.done > NUM_CLAIMS * 0.8
    wait_until(
        "all are back", lambda: pools.status("default").get("claimed") == 0, TTL_SECONDS + 90
    )
    pools.wait_ready("default", WARM, 120)
    assert len(pools.pods()) <= MAX
