"""What is passed on between a caller and a guest: pieces as they come, ends as they are, nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rljob.http1 import HttpClient, HttpError
from rljob.sandbox import ClaimAnswer
from rljob_sandbox_pool.aserver import HttpServer, StreamedResponse
from rljob_sandbox_pool.guest.wire import Request
from rljob_sandbox_pool.relay import relay

Guest = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
)


@asynccontextmanager
async def passing_on(guest: Guest, seconds_left: float = 20.0) -> AsyncIterator[HttpClient]:
    """A client of a server that passes everything on to a guest with this script."""
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await guest(reader, writer)
        finally:
            writer.close()

    listening = await asyncio.start_server(
        lambda reader, writer: tasks.append(asyncio.create_task(serve(reader, writer))),
        "127.0.0.1",
        0,
    )
    port = listening.sockets[0].getsockname()[1]
    claim = ClaimAnswer("claim", "box", f"http://127.0.0.1:{port}", "token", "nonce")

    async def handle(request: Request) -> StreamedResponse:
        return await relay(request, request.path, claim, seconds_left)

    server = HttpServer(handle)
    client = HttpClient(f"http://127.0.0.1:{server.bind('127.0.0.1', 0)}", {"x-rljob-token": "t"})
    await server.listen()
    yield client
    await client.aclose()
    server.stop()
    listening.close()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)


async def test_the_guest_gets_the_claims_token_and_none_of_the_callers_headers() -> None:
    heads: list[str] = []

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        assert await reader.readexactly(4) == b"body"
        writer.write(
            b"HTTP/1.1 404 X\r\ncontent-length: 2\r\nset-cookie: x\r\nx-rljob-next: a\r\n\r\nno"
        )
        await writer.drain()

    async with passing_on(guest) as client:
        asked = client.request("PUT", "/files?path=a%20b&x=%FF", b"body", headers={"x-other": "y"})
        answer = await asked
    assert (answer.status, answer.body) == (404, b"no")
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-rljob-next"] == "a"
    assert heads[0].startswith("put /files?path=a+b&x=%ff http/1.1\r\n")
    assert "authorization: bearer token\r\n" in heads[0]
    assert "x-rljob-claim: claim\r\nx-rljob-boot: nonce\r\n" in heads[0]
    assert "x-other" not in heads[0]
    assert "x-rljob-token" not in heads[0]


async def test_pieces_are_passed_on_as_they_come() -> None:
    more = asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"3\r\none\r\n")
        await more.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        await writer.drain()

    async with (
        passing_on(guest) as client,
        client.stream("POST", "/exec", timeout_seconds=5) as streamed,
    ):
        assert streamed.headers["content-type"] == "application/x-ndjson"
        assert await anext(streamed.pieces) == b"one"
        more.set()
        assert [piece async for piece in streamed.pieces] == [b"two"]


@pytest.mark.parametrize("answered", [b"", CHUNKED + b"3\r\none\r\n"])
async def test_a_caller_that_hangs_up_is_hung_up_for(answered: bytes) -> None:
    asked, hung_up = asyncio.Event(), asyncio.Event()

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answered)
        asked.set()
        await reader.read()
        hung_up.set()

    async with passing_on(guest) as client:
        call = asyncio.create_task(client.request("POST", "/exec", timeout_seconds=20))
        await asked.wait()
        call.cancel()
        async with asyncio.timeout(10):
            await hung_up.wait()


async def test_an_answer_that_breaks_off_does_not_look_whole() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"3\r\none\r\n5\r\ntw")
        await writer.drain()

    async with passing_on(guest) as client:
        with pytest.raises(HttpError, match="hung up"):
            await client.request("POST", "/exec", timeout_seconds=10)


async def test_a_guest_that_hangs_up_or_lies_is_a_bad_gateway() -> None:
    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0\r\n\r\n")
        await writer.drain()

    async with passing_on(guest) as client:
        answer = await client.request("GET", "/healthz", timeout_seconds=10)
    assert (answer.status, b"sandbox_lost" in answer.body) == (502, True)


async def test_a_guest_that_is_silent_until_its_claim_is_over_is_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rljob_sandbox_pool.relay.GRACE_SECONDS", 0.1)

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with passing_on(guest, seconds_left=0.1) as client:
        answer = await client.request("GET", "/healthz", timeout_seconds=10)
    assert (answer.status, b"sandbox_lost" in answer.body) == (504, True)
