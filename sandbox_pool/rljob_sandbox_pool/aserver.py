"""The guest's HTTP on asyncio: one server for the broker and for simulated sandboxes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog

from rljob.errors import MachineError
from rljob_sandbox_pool.guest.wire import RefusedError, Request, RequestParser, Response

MAX_CONNECTIONS = 4096
BACKLOG = 1024
"""Connections that wait to be accepted; one more is only tried again after a second."""
MAX_QUEUED = 16
"""Requests that one connection may send ahead of their answers."""
IDLE_SECONDS = 60.0
"""Without a whole request, or with an answer that is not taken, for so long, a connection is closed."""
LINGER_SECONDS = 2.0
"""How long what a refused peer still sends is thrown away, so that it can read why."""
SMALL_BYTES = 1_000_000
"""Bodies up to here are taken from anyone."""
MAX_LARGE_BYTES = 128 * 1024 * 1024
"""Of the larger ones, all that are held at once."""


@dataclass(frozen=True)
class StreamedResponse:
    """An answer that is passed on as it comes."""

    status: int
    headers: Mapping[str, str]
    """A content-length among them; else the body goes out in chunks."""
    pieces: AsyncIterator[bytes]
    close: Callable[[], Awaitable[object]]
    """Called when it is done with, whole or not."""

    def head(self) -> bytes:
        """Everything before the body."""
        lines = [f"HTTP/1.1 {self.status} Passed on"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += [] if self.has_length else ["transfer-encoding: chunked"]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"

    @property
    def has_length(self) -> bool:
        """Whether the body's length is said beforehand."""
        return "content-length" in self.headers


Handler = Callable[[Request], Awaitable[Response | StreamedResponse]]
Admit = Callable[[str, str, Mapping[str, str], int], None]
_log = structlog.get_logger("rljob.sandbox_pool")


class _Connection(asyncio.Protocol):
    """Requests of one connection, one after another. When the peer hangs up, what it asked for is cancelled."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._parser = RequestParser(server.max_body_bytes, self._admit)
        self._requests: list[Request] = []
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._large_bytes = 0
        self._refused = False
        self.quiet_since = 0.0
        """When it was answered last, or made."""
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def is_quiet(self) -> bool:
        """Nothing that was asked here is under way."""
        return self._task is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        is_full = len(self._server.connections) >= MAX_CONNECTIONS
        # One that was accepted while the server stopped is told to nobody else who would close it.
        if self._server.is_stopped or (is_full and not self._server.make_room()):
            transport.abort()
            return
        self._server.connections.add(self)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._stop_idle()
        self._forget_large()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        try:
            self._requests += self._parser.feed(data)
            if len(self._requests) > MAX_QUEUED:
                raise RefusedError(429, "too_many", "wait for answers before asking more")
        except RefusedError as refusal:
            self._refuse(refusal)
            return
        self._next()

    def close(self) -> None:
        """Hang up, whatever was not sent yet."""
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, refusal: RefusedError) -> None:
        """Say why and hang up: at once, the answer would be lost where the peer is still sending."""
        self._refused = True
        self._stop_idle()
        self._send(refusal.response(close=True))
        self._idle = asyncio.get_running_loop().call_later(LINGER_SECONDS, self.close)

    def _admit(self, method: str, target: str, headers: Mapping[str, str], length: int) -> None:
        self._server.admit(method, target, headers, length)
        if length > SMALL_BYTES:
            if self._server.large_bytes + length > MAX_LARGE_BYTES:
                raise RefusedError(429, "busy", "too many large bodies", {"retry-after": "1"})
            self._server.large_bytes += length
            self._large_bytes += length

    def _forget_large(self) -> None:
        self._server.large_bytes -= self._large_bytes
        self._large_bytes = 0

    def _watch_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self.quiet_since = loop.time()
        self._idle = loop.call_later(IDLE_SECONDS, self.close)

    def _stop_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _next(self) -> None:
        if self._task is None and self._requests:
            self._stop_idle()
            self._task = asyncio.get_running_loop().create_task(self._serve(self._requests.pop(0)))

    async def _serve(self, request: Request) -> None:
        response = await self._server.answer(request)
        if isinstance(response, Response):
            self._send(response)
        else:
            await self._pass_on(response)
        self._task = None
        if not self._requests and self._parser.idle:
            self._forget_large()
        if not self._refused:
            self._watch_idle()
            self._next()

    def _send(self, response: Response) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(response.encode())
            if response.close:
                self._transport.write_eof()

    async def _pass_on(self, response: StreamedResponse) -> None:
        assert self._transport is not None
        try:
            self._transport.write(response.head())
            async for piece in response.pieces:
                framed = piece if response.has_length else b"%x\r\n%b\r\n" % (len(piece), piece)
                self._transport.write(framed)
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._writable.wait()
            self._transport.write(b"" if response.has_length else b"0\r\n\r\n")
        except (OSError, TimeoutError):
            self.close()  # nothing else tells the peer that this was not all
        finally:
            await response.close()


class HttpServer:
    """Listens on one address and answers through one handler.

    Args:
        handler: Answers a request.
        max_body_bytes: Largest body of any request.
        admit: Told method, target, headers and length of each before its body is read; may raise RefusedError.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        max_body_bytes: int = SMALL_BYTES,
        admit: Admit = lambda *head: None,
    ) -> None:
        self.max_body_bytes, self.admit = max_body_bytes, admit
        self.large_bytes = 0
        """Of the large bodies that are held now."""
        self.connections: set[_Connection] = set()
        self.is_stopped = False
        self._handler = handler
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    def bind(self, host: str, port: int) -> int:
        """Take an address, port 0 a free one; returns the port. From here on peers may connect. Raises MachineError."""
        try:
            self._socket = socket.create_server((host, port), backlog=BACKLOG)
        except OSError as error:
            problem = f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)})"
            raise MachineError(
                "sandbox pool", problem, "free the port, or let rljob choose one"
            ) from None
        return int(self._socket.getsockname()[1])

    async def listen(self) -> None:
        """Answer who connects."""
        loop = asyncio.get_running_loop()
        # In two steps: cancelled in the middle of one, it would go on listening with nobody to stop it.
        self._server = await loop.create_server(
            lambda: _Connection(self), sock=self._socket, backlog=BACKLOG, start_serving=False
        )
        await self._server.start_serving()

    def stop(self) -> None:
        """Listen no more and hang up on everybody. A second call does nothing."""
        if self.is_stopped:
            return
        self.is_stopped = True
        if self._server is not None and self._socket is not None:
            loop = self._server.get_loop()
            # Python 3.11 loses a socket whose server closes between its accept and the task that would serve it.
            loop.remove_reader(self._socket)
            loop.call_soon(self._server.close)
        elif self._socket is not None:
            self._socket.close()
        for connection in list(self.connections):
            connection.close()

    def make_room(self) -> bool:
        """Hang up on who has asked nothing for longest, so that strangers who only hold connections lock nobody out."""
        quiet = [each for each in self.connections if each.is_quiet]
        if quiet:
            oldest = min(quiet, key=lambda each: each.quiet_since)
            self.connections.discard(oldest)
            oldest.close()
        return bool(quiet)

    async def answer(self, request: Request) -> Response | StreamedResponse:
        """The handler's answer; a fault of ours is 500 and a line in the log, never a dead connection."""
        try:
            return await self._handler(request)
        except RefusedError as refusal:
            return refusal.response()
        except Exception:  # noqa: BLE001 — the boundary of one request
            _log.exception("request_failed", method=request.method, path=request.path)
            return RefusedError(500, "internal", "see the log of the sandbox pool").response()
