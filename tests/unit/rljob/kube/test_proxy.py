"""A broker by way of the API server: what is sent, what comes back, what each of the two refuses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from rljob import claimed_sandbox
from rljob.errors import DeadlineError, MachineError, ManifestError, SandboxError
from rljob.http1 import HttpError
from rljob.kube.config import KubeConfig
from rljob.kube.proxy import ServicePort, ServiceProxy
from rljob.sandbox import ClaimAnswer
from rljob.sandbox_client import SandboxClient

PREFIX = "/api/v1/namespaces/rljob-system/services/rljob-sandbox-pool:broker/proxy"
CLAIM = {
    "claim_id": "c/1",
    "sandbox_id": "s1",
    "url": "http://10.0.0.1:8070",
    "token": "t",
    "boot_nonce": "n",
}
EXEC = {"exit_code": 3, "stdout": "out", "stderr": ""}
STATUS = {"kind": "Status", "status": "Failure", "reason": "Forbidden", "message": "no, thanks"}

Answer = Callable[[httpx.Request], httpx.Response]


def says(status: int, body: object) -> httpx.Response:
    """An answer that is read from the network, as it were."""

    async def pieces() -> AsyncIterator[bytes]:
        yield body if isinstance(body, bytes) else json.dumps(body).encode()

    return httpx.Response(status, content=pieces())


def proxy(answer: Answer, token: Callable[[], str] | None = lambda: "mine") -> ServiceProxy:
    return ServiceProxy(
        KubeConfig("https://api:6443", token=token),
        ServicePort("rljob-system", "rljob-sandbox-pool", "broker"),
        {"x-rljob-token": "the job's"},
        transport=httpx.MockTransport(answer),
    )


def client(answer: Answer) -> SandboxClient:
    return SandboxClient("broker", "", relay=proxy(answer))


async def test_a_claim_and_its_sandbox_are_reached_through_the_api_server() -> None:
    seen: list[tuple[str, str]] = []

    def api(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode().removeprefix(PREFIX)
        seen.append((request.method, path))
        assert request.headers["authorization"] == "Bearer mine"
        assert request.headers["x-rljob-token"] == "the job's"
        assert "x-rljob-claim" not in request.headers
        if path == "/v1/claims":
            return says(200, CLAIM)
        if path.endswith("/exec"):
            assert json.loads(request.content)["command"] == ["true"]
            return says(200, EXEC)
        return says(200, b"data" if "files?" in path else b"{}")

    broker = client(api)
    async with broker.claim("p") as box:
        assert (await box.exec(["true"])).exit_code == 3
        assert await box.read_file("a b") == b"data"
        assert (box.url, box.headers) == ("", {})
    await broker.aclose()
    assert seen == [
        ("POST", "/v1/claims"),
        ("POST", "/v1/claims/c%2F1/guest/exec"),
        ("GET", "/v1/claims/c%2F1/guest/files?path=a+b&max_bytes=10000000"),
        ("DELETE", "/v1/claims/c%2F1"),
    ]


async def test_pieces_come_as_they_are_sent() -> None:
    more = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        await more.wait()
        yield b"two"

    through = proxy(lambda request: httpx.Response(200, content=body()))
    async with through.stream("POST", "/x", timeout_seconds=5) as streamed:
        assert await anext(streamed.pieces) == b"one"
        more.set()
        assert [piece async for piece in streamed.pieces] == [b"two"]
    await through.aclose()


async def test_what_the_api_server_refuses_is_said_at_once() -> None:
    broker = client(lambda request: says(403, STATUS))
    with pytest.raises(MachineError, match="rljob-sandbox-user"):
        await broker.acquire("p", timeout=30)
    with pytest.raises(SandboxError, match="the API server says: no, thanks"):
        await broker.pools()
    await broker.aclose()


async def test_a_service_without_pods_is_waited_for() -> None:
    broker = client(lambda request: says(503, {**STATUS, "message": "no endpoints"}))
    with pytest.raises(DeadlineError, match="no endpoints"):
        await broker.acquire("p", timeout=0.3)
    await broker.aclose()


async def test_a_call_that_was_not_passed_on_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimed_sandbox, "AGAIN_PAUSE_SECONDS", 0.01)
    standby = {"error": "standby", "message": "another one serves"}
    refusals = [says(503, standby), says(503, STATUS), says(429, {"error": "busy"})]
    broker = client(lambda request: refusals.pop(0) if refusals else says(200, EXEC))
    box = broker.attach(ClaimAnswer(**CLAIM))
    assert (await box.exec(["true"])).exit_code == 3
    assert not refusals
    monkeypatch.setattr(claimed_sandbox, "AGAIN_SECONDS", 0.05)
    broker = client(lambda request: says(503, standby))
    with pytest.raises(SandboxError, match="another one serves"):
        await broker.attach(ClaimAnswer(**CLAIM)).exec(["true"])


async def test_a_pool_that_the_broker_does_not_know_is_the_callers_mistake() -> None:
    refusal = {"error": "unknown_pool", "message": "there is no pool 'p'; there are q"}
    broker = client(lambda request: says(404, refusal))
    with pytest.raises(ManifestError, match="there are q"):
        await broker.acquire("p", timeout=30)
    await broker.aclose()


def unreachable(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def cut(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (unreachable, "cannot connect to https://api:6443: refused"),
        (cut, "hung up"),
        (lambda request: says(200, b"x" * 100), "past the limit of 10 bytes"),
    ],
)
async def test_what_breaks_is_named(answer: Answer, reason: str) -> None:
    through = proxy(answer)
    with pytest.raises(HttpError, match=reason):
        await through.request("GET", "/x", max_body_bytes=10)
    with pytest.raises(HttpError, match=reason):
        async with through.stream("GET", "/x", max_body_bytes=10) as streamed:
            [piece async for piece in streamed.pieces]
    await through.aclose()


async def test_a_token_that_cannot_be_read_is_named() -> None:
    def gone() -> str:
        raise FileNotFoundError("token")

    through = proxy(lambda request: httpx.Response(200), gone)
    with pytest.raises(HttpError, match="the token cannot be read"):
        await through.request("GET", "/x")
    await through.aclose()
