"""Connections of the guest: requests of one connection one after another, connections at once."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from rljob_sandbox_pool.guest.loop import Loop, Timer
from rljob_sandbox_pool.guest.stream import Stream
from rljob_sandbox_pool.guest.wire import (
    Admit,
    RefusedError,
    Request,
    RequestParser,
    Response,
    Upgrade,
)

MAX_CONNECTIONS = 64
MAX_QUEUED = 16
"""Requests that one connection may send ahead of their answers."""
IDLE_SECONDS = 60.0
REQUEST_SECONDS = 30.0
"""How long a request may take to arrive once it has begun, and an answer to be taken."""

Handler = Callable[[Request, Callable[[Response], None]], None]


class Connection:
    """One connection: reading → answering → writing → reading. A streamed answer is written while it is made."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self._parser = RequestParser(server.max_body_bytes, server.admit)
        self._requests: deque[Request] = deque()
        self._output = memoryview(b"")
        self._stream: Stream | None = None
        self._upgrade: Upgrade | None = None
        self._answering = False
        self._closing = False
        self._timer: Timer | None = None
        self.heard = server.loop.now()
        """When bytes came last."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait()

    @property
    def waits(self) -> bool:
        """Whether nothing that was asked here is under way."""
        return not (self._answering or self._requests or self._output)

    def close(self) -> None:
        """Hang up."""
        if self._sock.fileno() >= 0:
            self._server.loop.watch(self._sock.fileno())
            self._sock.close()
            self._server.connections.discard(self)
        self._deadline(None)
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.hang_up()

    def _deadline(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self._server.loop.call_at(self._server.loop.now() + seconds, self.close)

    def _wait(self) -> None:
        """Watch for what comes next."""
        if self._output or (self._stream is not None and self._stream.pending):
            self._server.loop.watch(self._sock.fileno(), write=self._write)
            self._deadline(REQUEST_SECONDS)
        elif self._stream is not None:
            # As long as it takes: the stream's maker has a deadline. A peer that hangs up is noticed.
            self._server.loop.watch(self._sock.fileno(), read=self._read)
            self._deadline(None)
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
        self.heard = self._server.loop.now()
        try:
            self._requests.extend(self._parser.feed(data))
            if len(self._requests) > MAX_QUEUED:
                raise RefusedError(429, "too_many", "wait for answers before asking more")
        except RefusedError as refusal:
            if self._stream is not None:
                self.close()
                return
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
        if self._sock.fileno() < 0:
            if response.stream is not None:
                response.stream.hang_up()
            return
        self._closing = self._closing or response.close
        self._output = memoryview(response.encode())
        self._stream, self._upgrade = response.stream, response.upgrade
        self._answering = self._stream is not None
        if self._stream is not None:
            self._stream.on_piece = self._wait
        self._write()

    def _write(self) -> None:
        if not self._output and self._stream is not None:
            self._output = memoryview(self._piece(self._stream))
        try:
            sent = self._sock.send(self._output)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        self._output = self._output[sent:]
        if not self._output and self._upgrade is not None:
            self._hand_over(self._upgrade)
            return
        if not self._output and self._closing and self._stream is None:
            self.close()
            return
        self._wait()
        self._next()

    def _piece(self, stream: Stream) -> bytes:
        data = stream.take()
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        if stream.ended:
            self._stream, self._answering = None, False
            self._closing = self._closing or stream.broken
            chunk += b"" if stream.broken else b"0\r\n\r\n"
        return chunk

    def _hand_over(self, upgrade: Upgrade) -> None:
        self._server.loop.watch(self._sock.fileno())
        self._server.connections.discard(self)
        self._deadline(None)
        upgrade(self._sock, self._parser.rest())


class Server:
    """Accepts connections on a socket that somebody else opened."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        handler: Handler,
        max_body_bytes: int,
        admit: Admit = lambda *head: None,
    ) -> None:
        self.loop, self.handler = loop, handler
        self.max_body_bytes, self.admit = max_body_bytes, admit
        self.connections: set[Connection] = set()
        self._listener = listener
        listener.setblocking(False)
        loop.watch(listener.fileno(), read=self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self.connections) >= MAX_CONNECTIONS and not self._make_room():
            sock.close()
            return
        self.connections.add(Connection(self, sock))

    def _make_room(self) -> bool:
        """Hang up on who has said nothing for longest: kept connections, and strangers that only hold theirs."""
        waiting = [connection for connection in self.connections if connection.waits]
        if waiting:
            min(waiting, key=lambda connection: connection.heard).close()
        return bool(waiting)
