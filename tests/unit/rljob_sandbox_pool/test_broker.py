"""The broker over real connections and simulated sandboxes: who may do what, the relay, bodies and slow peers."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from rljob.api.rljob_types import SandboxPool
from rljob.errors import SandboxError
from rljob.http1 import Answer, HttpClient
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool import aserver, broker
from rljob_sandbox_pool.broker import Tenant, make_server
from rljob_sandbox_pool.manager import Manager
from rljob_sandbox_pool.pool import Pool
from rljob_sandbox_pool.relay import MAX_BODY_BYTES
from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime


class Two:
    """Two jobs that share a pool."""

    def __init__(self, pool: Pool) -> None:
        self.tenants = {name: Tenant(name, {"shared": pool}) for name in ("one", "two")}

    def tenant(self, token: str) -> Tenant | None:
        return self.tenants.get(token)

    def standby(self) -> str:
        return ""

    def unready(self) -> str:
        return ""


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """A broker with a pool `shared` of the jobs `one` and `two`, whose tokens are their names."""
    spec = SandboxPool.model_validate(
        {"name": "p", "warm": 2, "max": 4, "runtime": "simulated", "limits": {"diskMib": 64}}
    )
    manager = Manager([spec], {"simulated": SimulatedRuntime()}, token="t", pool_key="k")
    await manager.start("127.0.0.1", 0)
    server = make_server(Two(manager.pools["p"]))
    port = server.bind("127.0.0.1", 0)
    await server.listen()
    yield f"http://127.0.0.1:{port}"
    server.stop()
    await manager.close()


async def ask(
    address: str, method: str, target: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, object]]:
    """Status and JSON of one answer."""
    client = HttpClient(address, {name.replace("_", "-"): text for name, text in headers.items()})
    try:
        answer: Answer = await client.request(method, target, body, timeout_seconds=20)
    finally:
        await client.aclose()
    return answer.status, json.loads(answer.body)


@contextlib.asynccontextmanager
async def relayed(address: str, token: str = "one") -> AsyncIterator[SandboxClient]:
    client = SandboxClient(address, token, relay=HttpClient(address, {"x-rljob-token": token}))
    yield client
    await client.aclose()


async def test_a_token_may_come_in_either_header(address: str) -> None:
    for headers in ({"authorization": "Bearer one"}, {"x_rljob_token": "one"}):
        assert (await ask(address, "GET", "/v1/pools", **headers))[0] == 200
    both = {"authorization": "Bearer of the API server", "x_rljob_token": "one"}
    assert (await ask(address, "GET", "/v1/pools", **both))[0] == 200
    for headers in (
        {},
        {"authorization": "one"},
        {"x_rljob_token": "three"},
        {"x_rljob_token": ""},
    ):
        status, refusal = await ask(address, "GET", "/v1/pools", **headers)
        assert (status, refusal["error"]) == (401, "unauthorized")


async def test_a_job_lists_its_own_claims_only(address: str) -> None:
    one, two = (
        SandboxClient(address, "one", owner="worker-3", boot_id="b"),
        SandboxClient(address, "two"),
    )
    box = await one.acquire("shared", ttl_seconds=100, timeout=20)
    (claim,) = await one.claims()
    assert (claim.claim_id, claim.sandbox_id) == (box.claim_id, box.id)
    assert (claim.pool, claim.owner) == ("shared", "worker-3")
    assert 90 < claim.seconds_left <= 100
    assert await two.claims() == []
    await box.release()
    assert await one.claims() == []
    await one.aclose()
    await two.aclose()


async def test_the_guest_of_a_claim_is_reached_by_way_of_the_broker(address: str) -> None:
    async with relayed(address) as client, client.claim("shared", timeout=20) as box:
        assert (await box.exec("exit 3")).exit_code == 3
        await box.write_file("a b.txt", b"\0\xff")
        assert await box.read_file("a b.txt") == b"\0\xff"
        with pytest.raises(FileNotFoundError):
            await box.read_file("missing")
        assert await box.healthy()
        await box.reset()
        assert not box.lost


async def test_an_answer_and_a_body_as_large_as_files_may_be_pass(address: str) -> None:
    data = secrets.token_bytes(1024) * 30 * 1024
    async with relayed(address) as client, client.claim("shared", timeout=20) as box:
        await box.write_file("large", data)
        assert await box.read_file("large", max_bytes=len(data)) == data


async def test_a_claim_of_another_job_is_none(address: str) -> None:
    async with relayed(address) as client, client.claim("shared", timeout=20) as box:
        path = f"/v1/claims/{box.claim_id}"
        for method, target in (("POST", f"{path}/guest/exec"), ("DELETE", path)):
            status, refusal = await ask(address, method, target, b"{}", x_rljob_token="two")
            assert (status, refusal["error"]) == (404, "unknown_claim")
        assert await box.healthy()
    with pytest.raises(SandboxError, match="already released"):
        await box.healthy() or await box.exec("true")
    status, refusal = await ask(address, "GET", f"{path}/guest/healthz", x_rljob_token="one")
    assert (status, refusal["error"]) == (404, "unknown_claim")


async def test_a_tunnel_is_not_passed_on(address: str) -> None:
    async with relayed(address) as client, client.claim("shared", timeout=20) as box:
        target = f"/v1/claims/{box.claim_id}/guest/tunnel"
        status, refusal = await ask(address, "POST", target, b"{}", x_rljob_token="one")
        assert (status, refusal["error"]) == (400, "not_relayed")


async def test_a_sandbox_that_died_is_a_named_error(address: str) -> None:
    async with relayed(address) as client, client.claim("shared", timeout=20) as box:
        running = asyncio.create_task(box.exec("sleep 100", timeout=100))
        await asyncio.sleep(0.1)
        await ask(address, "DELETE", f"/v1/claims/{box.claim_id}?broken=1", x_rljob_token="one")
        with pytest.raises(SandboxError):
            await running
        assert box.lost


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "bad_request"),
        ({"request_id": ""}, "bad_request"),
        ({"request_id": "x" * 65}, "bad_request"),
        ({"request_id": "c", "pool": 5}, "bad_request"),
        ({"request_id": "c", "pool": "none"}, "unknown_pool"),
        ({"request_id": "c", "pool": "shared", "env": {"A": "x" * 70_000}}, "bad_request"),
        ({"request_id": "c", "pool": "shared", "env": {"A=B": "x"}}, "bad_request"),
        ({"request_id": "c", "pool": "shared", "env": []}, ""),
        ({"request_id": "c", "pool": "shared", "ttl_seconds": "long"}, "bad_request"),
        ({"request_id": "c", "pool": "shared", "idle_seconds": "long"}, "bad_request"),
        ({"request_id": "c", "pool": "shared", "priority": "first"}, "bad_request"),
        ({"request_id": "c", "pool": "shared", "priority": True}, "bad_request"),
        ({"request_id": "c", "pool": "shared", "priority": 1e9, "ttl_seconds": 1e99}, ""),
        ({"request_id": "c", "pool": "shared", "idle_seconds": None, "owner": "", "more": 1}, ""),
        ({"request_id": "c", "pool": "shared", "owner": "x" * 129}, "bad_request"),
    ],
)
async def test_fields_of_a_claim_are_checked(
    address: str, fields: dict[str, object], error: str
) -> None:
    body = json.dumps({"wait_seconds": 20, **fields}).encode()
    status, answer = await ask(address, "POST", "/v1/claims", body, x_rljob_token="one")
    assert answer.get("error", "") == error
    assert status == {"": 200, "bad_request": 400, "unknown_pool": 404}[error]


async def test_a_claim_that_is_not_used_ends_by_itself(address: str) -> None:
    client = SandboxClient(address, "one")
    box = await client.acquire("shared", idle_seconds=1.0, timeout=20)
    async with asyncio.timeout(20):
        while await client.claims():
            await asyncio.sleep(0.1)
    with pytest.raises(SandboxError):
        await box.exec("true")
    await box.release()
    await client.aclose()


async def test_a_client_of_one_claim_leaves_no_connection_open(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLJOB_SANDBOX_TOKEN", "one")
    client = SandboxClient(address)
    async with client.claim(pool="shared", env={"A": "b"}) as box:
        assert (await box.exec(["echo", "hi"], timeout=20)).stdout == "hi\n"
    assert not client._http._idle


# ── bodies ──


LARGE = b"x" * (aserver.SMALL_BYTES + 1)


@pytest.mark.parametrize(
    ("target", "token", "status", "error"),
    [
        ("/v1/claims", "one", 413, "too_large"),
        ("/v1/claims/c/guestexec", "one", 413, "too_large"),
        ("/v1/claims/c/guest/files", "three", 401, "unauthorized"),
        ("/v1/claims/c/guest/files", "one", 404, "unknown_claim"),
    ],
)
async def test_only_what_is_for_a_guest_may_be_large(
    address: str, target: str, token: str, status: int, error: str
) -> None:
    said, refusal = await ask(address, "PUT", target, LARGE, x_rljob_token=token)
    assert (said, refusal["error"]) == (status, error)


async def test_who_shows_no_token_is_refused_before_much_is_read(address: str) -> None:
    status, refusal = await ask(address, "POST", "/v1/claims", b"x" * 20_000, x_rljob_token="three")
    assert (status, refusal["error"]) == (401, "unauthorized")
    said, writer = await head(address, 20_000, token="three")
    assert said.startswith(b"HTTP/1.1 401")
    writer.close()


async def head(address: str, length: int, token: str = "one") -> tuple[bytes, asyncio.StreamWriter]:
    """Begin a request with a body of that length; what is said to its head alone, at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(
        f"PUT /v1/claims/c/guest/files HTTP/1.1\r\nx-rljob-token: {token}\r\n"
        f"content-length: {length}\r\n\r\n".encode()
    )
    said = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            said = await reader.readuntil(b"\r\n\r\n")
    return said, writer


async def test_a_body_past_the_limit_is_refused_by_its_head(address: str) -> None:
    said, writer = await head(address, MAX_BODY_BYTES + 1)
    assert said.startswith(b"HTTP/1.1 413")
    writer.close()


async def test_large_bodies_are_bounded_together(address: str) -> None:
    writers = []
    for _ in range(aserver.MAX_LARGE_BYTES // MAX_BODY_BYTES):
        said, writer = await head(address, MAX_BODY_BYTES)
        assert said == b""
        writers.append(writer)
    said, writer = await head(address, MAX_BODY_BYTES)
    assert said.startswith(b"HTTP/1.1 429")
    assert b"retry-after" in said
    for each in [*writers, writer]:
        each.close()
    await asyncio.sleep(0.1)
    said, writer = await head(address, MAX_BODY_BYTES)
    assert said == b""
    writer.close()


# ── slow peers ──


async def connected(address: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(data)
    return reader, writer


@pytest.mark.parametrize(
    "data", [b"", b"GET /v1/po", b"POST /v1/claims HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"]
)
async def test_who_sends_no_whole_request_is_hung_up_on(
    address: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aserver, "IDLE_SECONDS", 0.2)
    reader, writer = await connected(address, data)
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_bytes_that_drip_in_win_no_time(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aserver, "IDLE_SECONDS", 0.3)
    reader, writer = await connected(address, b"GET /healthz HTTP/1.1\r\n")
    async with asyncio.timeout(10):
        while not reader.at_eof():
            writer.write(b"a: b\r\n")
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.05):
                    await reader.read(1)
    writer.close()


async def test_who_takes_no_answer_is_hung_up_on(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aserver, "IDLE_SECONDS", 0.3)
    data = b"x" * 20_000_000
    async with relayed(address) as client, client.claim("shared", timeout=20) as box:
        await box.write_file("large", data)
        target = f"/v1/claims/{box.claim_id}/guest/files?path=large&max_bytes={len(data)}"
        ask = f"GET {target} HTTP/1.1\r\nx-rljob-token: one\r\n\r\n"
        reader, writer = await connected(address, ask.encode())
        await asyncio.sleep(1.5)
        read = 0
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1_000_000):
                read += len(piece)
        assert read < len(data)
        writer.close()


@pytest.mark.parametrize("key", ["request_id", "owner", "boot_id"])
async def test_a_claim_names_nothing_that_is_no_utf_8(address: str, key: str) -> None:
    """Half of a character pair is JSON, and nothing that the API server or a guest could be told."""
    body = {"request_id": "a", "pool": "shared", "owner": "o", "boot_id": "b", key: "x\ud800"}
    status, answer = await ask(
        address, "POST", "/v1/claims", json.dumps(body).encode(), authorization="Bearer one"
    )
    assert (status, answer["error"]) == (400, "bad_request")
    assert key in str(answer["message"])


async def test_strangers_that_only_hold_connections_lock_nobody_out(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aserver, "MAX_CONNECTIONS", 3)
    host, port = address.removeprefix("http://").split(":")
    strangers = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    body = {"request_id": "a", "pool": "shared", "wait_seconds": 5}
    for name in "abcd":
        held = json.dumps({**body, "request_id": name}).encode()
        assert (await ask(address, "POST", "/v1/claims", held, x_rljob_token="one"))[0] == 200
    waiting = json.dumps({**body, "request_id": "e"}).encode()
    claim = asyncio.create_task(ask(address, "POST", "/v1/claims", waiting, x_rljob_token="two"))
    await asyncio.sleep(0.1)
    for _ in range(4):
        strangers.append(await asyncio.open_connection(host, int(port)))
    assert (await ask(address, "DELETE", "/v1/claims/a", x_rljob_token="one"))[0] == 200
    assert (await claim)[0] == 200
    for _, writer in strangers:
        writer.close()


async def test_claims_of_one_job_that_wait_leave_connections_to_others(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "MAX_PENDING", 2)

    def claim(name: str, token: str, wait: float) -> Coroutine[Any, Any, tuple[int, Any]]:
        body = {"request_id": name, "pool": "shared", "wait_seconds": wait}
        return ask(address, "POST", "/v1/claims", json.dumps(body).encode(), x_rljob_token=token)

    for name in "abcd":
        assert (await claim(name, "one", 5))[0] == 200
    tasks = [asyncio.create_task(claim(name, "one", 1)) for name in "ef"]
    await asyncio.sleep(0.2)
    status, answer = await claim("g", "one", 1)
    assert (status, answer["error"]) == (429, "busy")
    assert (await claim("g", "two", 0))[1]["error"] != "busy"
    await asyncio.gather(*tasks)
