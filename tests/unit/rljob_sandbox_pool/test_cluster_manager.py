"""The pool manager of a cluster as a whole, on an API server in memory: what ends it."""

import asyncio
from pathlib import Path

import httpx
import pytest

from rljob.testing.kube import FakeKube, status
from rljob_sandbox_pool.cluster import PoolManager
from rljob_sandbox_pool.cluster_config import Identity, PoolManagerConfig


async def test_a_loop_that_fails_ends_it_although_its_own_pod_cannot_be_labelled(
    tmp_path: Path,
) -> None:
    for name in ("broker_key", "pool_key"):
        (tmp_path / name).write_text("a key of enough characters")
    config = PoolManagerConfig(
        guest_image="guest:1",
        sandbox_image="box:1",
        keys_path=str(tmp_path),
        bind_host="127.0.0.1",
        port=0,
    )
    fake = FakeKube()
    fake.put({"kind": "Pod", "metadata": {"name": "me", "namespace": "system"}})

    def refuse(request: httpx.Request) -> httpx.Response | None:
        is_label = request.method == "PATCH" and b'"true"' in request.content
        return status(403, "Forbidden") if is_label else None

    fake.lasting.append(refuse)
    client, lease_client = fake.client(), fake.client()
    manager = PoolManager(client, lease_client, config, Identity(pod="me", namespace="system"))
    running = asyncio.create_task(manager.run(asyncio.Event()))
    async with asyncio.timeout(10):
        while manager.standby():
            await asyncio.sleep(0.01)
        manager.fleet._loops.append(asyncio.create_task(_fails()))
        with pytest.raises(ExceptionGroup) as ended:
            await running
    assert ended.group_contains(ZeroDivisionError)
    await client.aclose()
    await lease_client.aclose()


async def _fails() -> None:
    raise ZeroDivisionError
