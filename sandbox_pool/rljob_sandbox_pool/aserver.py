"""The guest's HTTP on asyncio: one server for the broker and for simulated sandboxes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

import structlog

from rljob.errors import MachineError
from rljob_sandbox_pool.guest.wire import RefusedError, Request, RequestParser, Response

MAX_CONNECTIONS = 4096
MAX_QUEUED = 16
"""Requests that one connection may send ahead of their answers."""
IDLE_SECONDS = 60.0
"""Without a whole request for so long, a connection is closed."""

Handler = Callable[[Request], Awaitable[Response]]
_log = structlog.get_logger("rljob.sandbox_pool")


class _Connection(asyncio.Protocol):
    """Requests of one connection, one after another. When the peer hangs up, what it asked for is cancelled."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._parser = RequestParser(server.max_body_bytes)
        self._requests: list[Request] = []
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._server.connections) >= MAX_CONNECTIONS:
            transport.abort()
            return
        self._server.connections.add(self)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._stop_idle()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._requests += self._parser.feed(data)
            if len(self._requests) > MAX_QUEUED:
                raise RefusedError(429, "too_many", "wait for answers before asking more")
        except RefusedError as refusal:
            self._send(refusal.response(close=True))
            return
        self._next()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def _watch_idle(self) -> None:
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.close)

    def _stop_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _next(self) -> None:
        if self._task is None and self._requests:
            self._stop_idle()
            self._task = asyncio.get_running_loop().create_task(self._serve(self._requests.pop(0)))

    async def _serve(self, request: Request) -> None:
        self._send(await self._server.answer(request))
        self._task = None
        self._watch_idle()
        self._next()

    def _send(self, response: Response) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(response.encode())
            if response.close:
                self._transport.close()


class HttpServer:
    """Listens on one address and answers through one handler."""

    def __init__(self, handler: Handler, *, max_body_bytes: int = 1_000_000) -> None:
        self.max_body_bytes = max_body_bytes
        self.connections: set[_Connection] = set()
        self._handler = handler
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    def bind(self, host: str, port: int) -> int:
        """Take an address, port 0 a free one; returns the port. From here on peers may connect. Raises MachineError."""
        try:
            self._socket = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            problem = f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)})"
            raise MachineError(
                "sandbox pool", problem, "free the port, or let rljob choose one"
            ) from None
        return int(self._socket.getsockname()[1])

    async def listen(self) -> None:
        """Answer who connects."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=self._socket)

    def stop(self) -> None:
        """Listen no more and hang up on everybody."""
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()
        for connection in list(self.connections):
            connection.close()

    async def answer(self, request: Request) -> Response:
        """The handler's answer; a fault of ours is 500 and a line in the log, never a dead connection."""
        try:
            return await self._handler(request)
        except RefusedError as refusal:
            return refusal.response()
        except Exception:  # noqa: BLE001 — the boundary of one request
            _log.exception("request_failed", method=request.method, path=request.path)
            return RefusedError(500, "internal", "see the log of the sandbox pool").response()
