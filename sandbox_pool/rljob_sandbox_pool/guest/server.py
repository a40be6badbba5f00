"""Connections of the guest: requests of one connection one after another, connections at once."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from rljob_sandbox_pool.guest.loop import Loop, Timer
from rljob_sandbox_pool.guest.wire import RefusedError, Request, RequestParser, Response

MAX_CONNECTIONS = 64
MAX_QUEUED = 16
"""Requests that one connection may send ahead of their answers."""
IDLE_SECONDS = 60.0
REQUEST_SECONDS = 30.0
"""How long a request may take to arrive once it has begun, and an answer to be taken."""

Handler = Callable[[Request, Callable[[Response], None]], None]


class Connection:
    """One connection: reading → answering → writing → reading."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self._parser = RequestParser(server.max_body_bytes)
        self._requests: deque[Request] = deque()
        self._output = memoryview(b"")
        self._answering = False
        self._closing = False
        self._timer: Timer | None = None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait()

    def close(self) -> None:
        """Hang up."""
        if self._sock.fileno() >= 0:
            self._server.loop.watch(self._sock.fileno())
            self._sock.close()
            self._server.connections.discard(self)
        self._deadline(None)

    def _deadline(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self._server.loop.call_at(self._server.loop.now() + seconds, self.close)

    def _wait(self) -> None:
        """Watch for what comes next."""
        if self._output:
            self._server.loop.watch(self._sock.fileno(), write=self._write)
            self._deadline(REQUEST_SECONDS)
        else:
            self._server.loop.watch(self._sock.fileno(), read=self._read)
            self._deadline(IDLE_SECONDS if self._parser.idle else REQUEST_SECONDS)

    def _read(self) -> None:
        try:
            data = self._sock.recv(262_144)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            self._requests.extend(self._parser.feed(data))
            if len(self._requests) > MAX_QUEUED:
                raise RefusedError(429, "too_many", "wait for answers before asking more")
        except RefusedError as refusal:
            self._closing = True
            self._send(refusal.response(close=True))
            return
        if not self._requests and self._timer is not None and not self._parser.idle:
            # A request has begun: its time is not extended by every byte that drips in.
            if self._timer.when > self._server.loop.now() + REQUEST_SECONDS:
                self._deadline(REQUEST_SECONDS)
            return
        self._next()

    def _next(self) -> None:
        if self._answering or not self._requests or self._output:
            return
        self._answering = True
        # The reader stays watched, so that a peer that hangs up is noticed while its command runs.
        self._deadline(None)
        self._server.handler(self._requests.popleft(), self._send)

    def _send(self, response: Response) -> None:
        self._answering = False
        if self._sock.fileno() < 0:
            return
        self._closing = self._closing or response.close
        self._output = memoryview(response.encode())
        self._write()

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._output)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        self._output = self._output[sent:]
        if not self._output and self._closing:
            self.close()
            return
        self._wait()
        self._next()


class Server:
    """Accepts connections on a socket that somebody else opened."""

    def __init__(
        self, loop: Loop, listener: socket.socket, handler: Handler, max_body_bytes: int
    ) -> None:
        self.loop, self.handler, self.max_body_bytes = loop, handler, max_body_bytes
        self.connections: set[Connection] = set()
        self._listener = listener
        listener.setblocking(False)
        loop.watch(listener.fileno(), read=self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self.connections) >= MAX_CONNECTIONS:
            sock.close()
            return
        self.connections.add(Connection(self, sock))
