"""The client against servers that lie, stall, hang up and repeat: each ends in a named error."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import REGISTRY

from rljob import claimed_sandbox, sandbox_client
from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import DeadlineError, SandboxError
from rljob.sandbox import ClaimAnswer
from rljob.sandbox_client import SandboxClient


@pytest.fixture(autouse=True)
def no_patience_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_client, "LAST_RELEASES_SECONDS", 0.01)


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(script: Script) -> AsyncIterator[str]:
    """The address of a server that treats every connection by `script`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    tasks: list[asyncio.Task[None]] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(serve(reader, writer)))

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def saying(answer: bytes) -> Script:
    """Reads each request's head and says the same to all."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(answer)
            await writer.drain()

    return script


def http(body: object, status: int = 200, headers: str = "") -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(raw)}\r\n{headers}\r\n".encode() + raw


@asynccontextmanager
async def box_at(url: str) -> AsyncIterator[ClaimedSandbox]:
    client = SandboxClient(url, "broker-token")
    box = ClaimedSandbox(client, ClaimAnswer("claim", "box-1", url, "token", "nonce"))
    yield box
    await box.release()
    await client.aclose()


GOOD = {"exit_code": 0, "stdout": "out", "stderr": "err"}

LIES = {
    "not http": b"SSH-2.0-OpenSSH\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\n\r\n{}",
    "chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
    "unicode length": "HTTP/1.1 200 OK\r\ncontent-length: ٣\r\n\r\n".encode(),
    "endless length": b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000,
    "cut off": b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
    "not json": http(b"hello"),
    "another type": http([1, 2]),
    "a string as exit code": http({**GOOD, "exit_code": "0"}),
    "an exit code past 64 bits": http({**GOOD, "exit_code": 2**80}),
    "output is a number": http({**GOOD, "stdout": 5}),
    "a field is missing": http({"exit_code": 0}),
    "an error without a reason": http(b"", 500),
    "an unheard-of error": http({"error": "sorry", "message": "no"}, 418),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_lie_is_a_SandboxError_and_the_sandbox_is_given_back_as_broken(lie: bytes) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(lie)
        await writer.drain()

    async with server(once) as url, box_at(url) as box:
        with pytest.raises(SandboxError, match="box-1"):
            await box.exec("true")
        assert box.lost


async def test_an_answer_that_fits_is_taken_with_its_defaults() -> None:
    async with server(saying(http(GOOD))) as url, box_at(url) as box:
        result = await box.exec("true")
        assert (result.stdout, result.timed_out, result.truncated) == ("out", False, False)
        assert not box.lost


async def test_how_long_commands_take_is_measured() -> None:
    def count() -> float:
        return REGISTRY.get_sample_value("rljob_sandbox_exec_seconds_count") or 0.0

    async with server(saying(http(GOOD))) as url, box_at(url) as box:
        await box.exec("true")
        before = count()
        await box.exec("true")
        assert count() == before + 1


async def test_more_bytes_than_asked_for_are_a_SandboxError() -> None:
    async with server(saying(http(b"x" * 200))) as url, box_at(url) as box:
        with pytest.raises(SandboxError, match="200 bytes where at most 100"):
            await box.read_file("f", max_bytes=100)


async def test_silence_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    for module in (claimed_sandbox, sandbox_client):
        monkeypatch.setattr(module, "CALL_SECONDS", 0.2)
    monkeypatch.setattr(claimed_sandbox, "GRACE_SECONDS", 0.1)
    async with server(silent) as url, box_at(url) as box:
        with pytest.raises(SandboxError, match=r"no answer to POST /exec within 0\.2 s"):
            await box.exec("true", timeout=0.1)


async def test_no_broker_is_a_DeadlineError_that_says_so(free_port: Callable[[], int]) -> None:
    client = SandboxClient(f"http://127.0.0.1:{free_port()}", "t")
    with pytest.raises(DeadlineError, match="cannot connect"):
        await client.acquire("p", timeout=0.5)
    with pytest.raises(SandboxError, match="cannot connect"):
        await client.pools()
    await client.aclose()


async def test_a_broker_that_lies_is_a_SandboxError() -> None:
    for lie in (http({"claim_id": 5}), http(b"x"), http({"error": "no"}, 400)):
        async with server(saying(lie)) as url:
            client = SandboxClient(url, "t")
            with pytest.raises(SandboxError, match="broker"):
                await client.acquire("p", timeout=5)
            await client.aclose()


async def test_retry_after_is_obeyed_within_bounds() -> None:
    refusals = [("0.05", 503), ("nonsense", 429), ("-5", 503)]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            if refusals:
                after, status = refusals.pop(0)
                writer.write(http({"error": "warming"}, status, f"retry-after: {after}\r\n"))
            else:
                claim = {
                    "claim_id": "c",
                    "sandbox_id": "s",
                    "url": "http://127.0.0.1:1",
                    "token": "t",
                }
                writer.write(http({**claim, "boot_nonce": "n"}))
            await writer.drain()

    async with server(script) as url:
        client = SandboxClient(url, "t")
        box = await client.acquire("p", timeout=30)
        assert (box.id, refusals) == ("s", [])
        await client.aclose()


async def test_a_sandbox_without_an_address_is_a_SandboxError() -> None:
    client = SandboxClient("http://127.0.0.1:1", "t")
    for url in ("ftp://h", "nonsense", "http://", "http://h:99999"):
        with pytest.raises(SandboxError, match="not an http"):
            ClaimedSandbox(client, ClaimAnswer("claim", "box-1", url, "token", "nonce"))
    await client.aclose()


async def test_a_release_that_the_broker_missed_is_told_again() -> None:
    seen: list[bytes] = []

    async def away_at_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
            writer.write(http({"error": "standby"}, 503) if len(seen) < 3 else http({}))
            await writer.drain()

    async with server(away_at_first) as address:
        client = SandboxClient(address, "t")
        assert not await client.release_claim("c1", broken=True)
        while len(seen) < 3:
            await asyncio.sleep(0.05)
        await client.aclose()
    assert set(seen) == {b"DELETE /v1/claims/c1?broken=1 HTTP/1.1"}


async def test_a_release_that_nobody_hears_raises_nothing(free_port: Callable[[], int]) -> None:
    async with box_at(f"http://127.0.0.1:{free_port()}") as box:
        await box.release()
        with pytest.raises(SandboxError, match="already released"):
            await box.write_file("f", b"")
