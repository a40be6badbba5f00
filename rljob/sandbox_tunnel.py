"""One address, reachable from inside a sandbox that reaches nothing else.

    async with tunnel(box, "http://gateway:8080/v1") as url:
        await box.exec(["agent"], env={"OPENAI_BASE_URL": url})        # http://127.0.0.1:<a free port>/v1

A port on the sandbox's loopback is relayed over one connection to its guest; each connection to it becomes one from
here to the address. The sandbox cannot choose another: what it sends is bytes of streams, and never an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import SandboxError
from rljob.http1_answer import Answer, body_pieces, body_size, parse_head
from rljob.sandbox_frames import DATA, END, OPEN, RESET, WINDOW, Event, Mux, ProtocolError
from rljob.sandbox_wire import encode, refusal_of

START_SECONDS = 20.0
DIAL_SECONDS = 10.0
DEAD_SECONDS = 30
"""How long the sandbox may acknowledge nothing."""
_HEAD_BYTES = 16_384
_READ_BYTES = 65_536
_PROBLEMS = (OSError, EOFError, ProtocolError, asyncio.LimitOverrunError)


class _Address(NamedTuple):
    """What is dialled."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    path: str


class _Port(msgspec.Struct):
    """Guest → client: the first line of a tunnel."""

    port: int


@asynccontextmanager
async def tunnel(box: ClaimedSandbox, address: str, *, port: int = 0) -> AsyncIterator[str]:
    """Relay a port inside to one address outside for as long as the block runs; gives the URL to use inside.

    Args:
        box: A sandbox that is reached directly.
        address: http:// or https:// (certificates are verified here; inside it is http).
        port: The port inside; 0: any that is free.

    Raises:
        ValueError: `address` is no such address.
        SandboxError: the guest refused, or the tunnel ended before the block did.
    """
    dialled = _parse(address)
    try:
        async with asyncio.timeout(START_SECONDS):
            reader, writer, port = await _start(box, port)
    except TimeoutError:
        raise SandboxError(f"sandbox {box.id}: no tunnel within {START_SECONDS:g} s") from None
    except (*_PROBLEMS, msgspec.MsgspecError) as error:
        raise SandboxError(f"sandbox {box.id}: no tunnel: {error}") from None
    relay = _Relay(reader, writer, dialled)
    running = asyncio.create_task(relay.run())
    try:
        yield f"http://127.0.0.1:{port}{dialled.path}"
        if running.done():
            raise SandboxError(f"sandbox {box.id}: the tunnel ended early: {running.result()}")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        writer.close()


def _parse(address: str) -> _Address:
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http:// or https:// address: {address!r}")
    is_tls = parts.scheme == "https"
    tls = ssl.create_default_context() if is_tls else None
    return _Address(parts.hostname, port or (443 if is_tls else 80), tls, parts.path.rstrip("/"))


async def _start(
    box: ClaimedSandbox, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """The upgraded connection, and the port inside."""
    if not box.url:
        raise SandboxError(
            f"sandbox {box.id}: its broker relays no tunnel; run where it is reached"
        )
    where = urlsplit(box.url)
    reader, writer = await asyncio.open_connection(
        where.hostname, where.port or 80, limit=_HEAD_BYTES
    )
    try:
        body = encode({"port": port})
        lines = {
            "host": where.netloc,
            "connection": "upgrade",
            "upgrade": "rljob-tunnel",
            "content-length": str(len(body)),
            **box.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"POST /tunnel HTTP/1.1\r\n{head}\r\n".encode() + body)
        _, status, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
        if status != 101:
            size = body_size(status, headers, _HEAD_BYTES)
            told = b"".join([piece async for piece in body_pieces(reader, size, _HEAD_BYTES)])
            refusal = refusal_of(Answer(status, headers, told))
            raise SandboxError(f"sandbox {box.id}: {refusal.error}: {refusal.message} ({status})")
        found = msgspec.json.decode(await reader.readuntil(b"\n"), type=_Port)
        if not 0 < found.port < 65_536:
            raise ProtocolError(f"port {found.port}")
    except BaseException:
        writer.close()
        raise
    return reader, writer, found.port


class _Stream:
    """One connection from inside, and the one to the address."""

    def __init__(self) -> None:
        self.waiting = bytearray()
        """For the address; at most a window."""
        self.has_ended = False
        """The sandbox sends no more."""
        self.is_broken = False
        """The connection inside broke off, and so does the one here."""
        self.news = asyncio.Event()
        """There is something for the address."""
        self.room = asyncio.Event()
        """More may be sent to the sandbox."""
        self.task: asyncio.Task[None] | None = None


class _Relay:
    """The client's end of a tunnel."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: _Address
    ) -> None:
        self._reader, self._writer, self._address = reader, writer, address
        self._mux = Mux(opens=False)
        self._streams: dict[int, _Stream] = {}
        _notice_death(writer)

    async def run(self) -> str:
        """Until the connection ends; returns why."""
        try:
            while data := await self._reader.read(_READ_BYTES):
                for event in self._mux.feed(data):
                    self._heard(event)
                self._flush()
            return "the sandbox hung up"
        except _PROBLEMS as error:
            return str(error) or type(error).__name__
        finally:
            tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # The guest closes the port when this connection ends.
            self._writer.close()

    def _heard(self, event: Event) -> None:
        if event.kind == OPEN:
            stream = self._streams[event.stream] = _Stream()
            stream.task = asyncio.create_task(self._serve(event.stream, stream))
        stream = self._streams.get(event.stream)
        if stream is None:
            return
        if event.kind == DATA:
            stream.waiting += event.data
        elif event.kind == END:
            stream.has_ended = True
        elif event.kind == RESET and stream.task is not None:
            stream.is_broken = True
            stream.task.cancel()
        (stream.room if event.kind == WINDOW else stream.news).set()

    async def _serve(self, number: int, stream: _Stream) -> None:
        address, writer = self._address, None
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=address.tls
                )
            async with asyncio.TaskGroup() as both:
                both.create_task(self._outwards(number, stream, writer))
                both.create_task(self._inwards(number, stream, reader))
        except* (*_PROBLEMS, TimeoutError):
            # Whoever called inside sees a connection that broke, as with any server that is gone.
            pass
        finally:
            del self._streams[number]
            self._mux.reset(number)
            self._flush()
            if writer is not None:
                if stream.is_broken:
                    writer.transport.abort()
                writer.close()

    async def _outwards(self, number: int, stream: _Stream, writer: asyncio.StreamWriter) -> None:
        while stream.waiting or not stream.has_ended:
            await stream.news.wait()
            stream.news.clear()
            if data := bytes(stream.waiting):
                stream.waiting.clear()
                writer.write(data)
                await writer.drain()
                self._mux.taken(number, len(data))
                self._flush()
        if writer.can_write_eof():
            writer.write_eof()

    async def _inwards(self, number: int, stream: _Stream, reader: asyncio.StreamReader) -> None:
        while True:
            while not (room := self._mux.room(number)):
                stream.room.clear()
                await stream.room.wait()
            if not (data := await reader.read(room)):
                break
            self._mux.send(number, data)
            self._flush()
            await self._writer.drain()
        self._mux.end(number)
        self._flush()

    def _flush(self) -> None:
        if self._mux.output:
            self._writer.write(bytes(self._mux.output))
            self._mux.output.clear()


def _notice_death(writer: asyncio.StreamWriter) -> None:
    """A sandbox that vanishes without a word ends the tunnel all the same."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_SECONDS // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_SECONDS // 6)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000)
