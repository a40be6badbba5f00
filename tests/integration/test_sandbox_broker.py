"""The broker under what a network does: a thousand peers at once, peers that stall, lost answers, its own death."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rljob.api.rljob_types import SandboxPool
from rljob.errors import SandboxError
from rljob.http1 import HttpClient
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool.manager import Manager
from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime

PEERS = 1000
DEADLINE_SECONDS = 60.0


@contextlib.asynccontextmanager
async def broker(**spec: object) -> AsyncIterator[tuple[str, Manager]]:
    pool = SandboxPool.model_validate({"name": "p", "runtime": "simulated", **spec})
    manager = Manager([pool], {"simulated": SimulatedRuntime()}, token="t", pool_key="k")
    try:
        yield await manager.start("127.0.0.1", 0), manager
    finally:
        await manager.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def connect(
    address: str, data: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(data)
    return reader, writer


async def test_a_thousand_connections_at_once_are_all_answered() -> None:
    request = b"GET /v1/pools HTTP/1.1\r\nauthorization: Bearer t\r\n\r\n"
    async with broker(warm=1, max=1) as (address, _):
        peers = await asyncio.gather(*(connect(address) for _ in range(PEERS)))
        for _, writer in peers:
            writer.write(request)
        async with asyncio.timeout(DEADLINE_SECONDS):
            heads = await asyncio.gather(*(r.readuntil(b"\r\n\r\n") for r, _ in peers))
        assert {head[:12] for head in heads} == {b"HTTP/1.1 200"}
        for _, writer in peers:
            writer.close()


async def test_a_thousand_claims_at_once_share_few_sandboxes_one_owner_at_a_time() -> None:
    held: set[str] = set()
    async with broker(warm=8, max=8) as (address, manager):
        client = SandboxClient(address, "t")

        async def use(_: int) -> None:
            async with client.claim("p", timeout=DEADLINE_SECONDS) as box:
                assert box.id not in held
                held.add(box.id)
                await asyncio.sleep(0)
                held.remove(box.id)

        await asyncio.gather(*(use(number) for number in range(PEERS)))
        await client.aclose()
        counts = manager.pools["p"].counts()
        assert counts.total <= 8
        assert counts.claimed == 0


STALLED = {
    "says nothing": b"",
    "stops in the head": b"POST /v1/claims HTTP/1.1\r\nauthoriz",
    "stops in the body": b"POST /v1/claims HTTP/1.1\r\ncontent-length: 500\r\n\r\n{",
    "never reads": b"GET /healthz HTTP/1.1\r\n\r\n" * 10,
}


async def test_peers_that_stall_keep_nobody_else_waiting() -> None:
    async with broker(warm=2, max=2) as (address, _):
        stalled = [await connect(address, STALLED[name]) for name in STALLED for _ in range(100)]
        client = SandboxClient(address, "t")
        async with asyncio.timeout(DEADLINE_SECONDS), client.claim("p") as box:
            assert (await box.exec("echo served")).stdout == "served\n"
        await client.aclose()
        for _, writer in stalled:
            writer.transport.abort()


def claim_request(claim_id: str, **fields: object) -> bytes:
    body = json.dumps({"request_id": claim_id, "pool": "p", "wait_seconds": 20, **fields}).encode()
    head = f"POST /v1/claims HTTP/1.1\r\nauthorization: Bearer t\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def ask_again(address: str, claim_id: str) -> dict[str, str]:
    """The answer of the repeated request, which may come while the first is still being forgotten."""
    http = HttpClient(address, {"authorization": "Bearer t"})
    body = json.dumps({"request_id": claim_id, "pool": "p", "wait_seconds": 20}).encode()
    try:
        while True:
            answer = await http.request("POST", "/v1/claims", body, timeout_seconds=30)
            if answer.status == 200:
                return json.loads(answer.body)
            assert json.loads(answer.body)["error"] == "pending"
    finally:
        await http.aclose()


async def test_a_claim_whose_answer_was_lost_is_answered_again_with_the_same_sandbox() -> None:
    async with broker(warm=3, max=3) as (address, _):
        client = SandboxClient(address, "t")
        _, writer = await connect(address, claim_request("lost"))
        await until(lambda: has_claims(client, 1))
        first = (await client.claims())[0].sandbox_id
        writer.transport.abort()
        again = await ask_again(address, "lost")
        assert again["sandbox_id"] == first
        assert len(await client.claims()) == 1
        assert await client.release_claim("lost")
        await client.aclose()


async def has_claims(client: SandboxClient, num: int) -> bool:
    return len(await client.claims()) == num


async def test_hanging_up_at_any_moment_of_a_claim_loses_no_sandbox() -> None:
    chance = random.Random(5)
    async with broker(warm=4, max=4) as (address, manager):
        client = SandboxClient(address, "t")

        async def hang_up(number: int) -> None:
            _, writer = await connect(address, claim_request(f"c{number}"))
            await asyncio.sleep(chance.random() * 0.05)
            writer.transport.abort()
            await client.release_claim(f"c{number}")

        await asyncio.gather(*(hang_up(number) for number in range(100)))
        await until(lambda: has_claims(client, 0))

        async def is_whole() -> bool:
            return manager.pools["p"].counts().ready == 4

        await until(is_whole)
        await client.aclose()


# ── its death ──


def serve(folder: Path, port: int) -> subprocess.Popen[bytes]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RLJOB_")}
    kept |= {"RLJOB_SANDBOX_STATE": str(folder), "RLJOB_SANDBOX_TOKEN": "t"}
    command = [sys.executable, "-m", "rljob.cli.main", "sandbox", "serve", "--name", "p"]
    return subprocess.Popen(
        [*command, "--warm", "2", "--max", "2", "--port", str(port)],
        env=kept,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")
async def test_a_broker_killed_in_the_middle_of_claims_delays_them_and_loses_none(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    port = free_port()
    process = serve(tmp_path, port)
    client = SandboxClient(f"http://127.0.0.1:{port}", "t")
    served: list[str] = []

    async def use(number: int) -> None:
        while True:
            async with client.claim("p", timeout=DEADLINE_SECONDS) as box:
                with contextlib.suppress(SandboxError):
                    assert (await box.exec(f"echo {number}")).stdout == f"{number}\n"
                    served.append(box.id)
                    return

    async with asyncio.timeout(DEADLINE_SECONDS):
        using = [asyncio.create_task(use(number)) for number in range(40)]
        while len(served) < 8:
            await asyncio.sleep(0.001)
        process.kill()
        process.wait()
        assert len(served) < 40
        process = serve(tmp_path, port)
        await asyncio.gather(*using)
    assert len(served) == 40
    await until(lambda: has_claims(client, 0))
    await client.aclose()
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 30) == 0
