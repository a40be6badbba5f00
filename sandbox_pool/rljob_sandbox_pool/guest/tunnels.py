"""A port of the sandbox's loopback, relayed over one connection to whoever asked for it: guest's side.

    command ─► 127.0.0.1:port ─ accept ─► stream ─► frames ─► connection ─► client, which dials one address

What listens is the guest; what the other end dials is the client's choice alone. Ends with its connection, or claim.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from rljob_sandbox_pool.guest.loop import Loop
from rljob_sandbox_pool.guest.tunnel import DATA, END, MAX_STREAMS, RESET, Event, Mux, ProtocolError
from rljob_sandbox_pool.guest.wire import RefusedError

MAX_TUNNELS = 4
MAX_OUTPUT_BYTES = 262_144
"""So much may wait for the connection; then nothing more is read from commands."""
START_SECONDS = 30.0
DEAD_SECONDS = 30
"""How long the other end may acknowledge nothing."""
_READ_BYTES = 65_536
_BREAK = struct.pack("ii", 1, 0)


class Tunnels:
    """Those of this sandbox."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._open: set[Tunnel] = set()

    def listen(self, port: int, used: Callable[[], None]) -> Tunnel:
        """A tunnel that waits for its connection (`Tunnel.start`); `used` is called for whatever passes.

        Raises OSError, RefusedError.
        """
        if len(self._open) >= MAX_TUNNELS:
            raise RefusedError(429, "too_many", f"a sandbox has at most {MAX_TUNNELS} tunnels")
        listener = socket.create_server(("127.0.0.1", port), backlog=MAX_STREAMS)
        tunnel = Tunnel(self._loop, listener, used, self._open.discard)
        self._open.add(tunnel)
        return tunnel

    def close(self) -> None:
        """End them all."""
        for tunnel in list(self._open):
            tunnel.close()


@dataclass(eq=False)
class _Stream:
    """A connection of a command."""

    sock: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    """For the command."""
    has_ended: bool = False
    """The command sends no more."""
    other_has_ended: bool = False


class Tunnel:
    """One port and the connection that carries it."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        used: Callable[[], None],
        closed: Callable[[Tunnel], object],
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._loop, self._listener, self._used, self._closed = loop, listener, used, closed
        self._carrier: socket.socket | None = None
        self._mux = Mux(opens=True)
        self._streams: dict[int, _Stream] = {}
        self._is_closed = False
        listener.setblocking(False)
        self._late = loop.call_at(loop.now() + START_SECONDS, self.close)

    def start(self, carrier: socket.socket, rest: bytes) -> None:
        """Relay over `carrier`, of which `rest` was read already."""
        self._late.cancel()
        if self._is_closed:
            carrier.close()
            return
        carrier.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        carrier.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_SECONDS // 2)
        carrier.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_SECONDS // 6)
        carrier.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000)
        self._carrier = carrier
        self._mux.output += json.dumps({"port": self.port}).encode() + b"\n"
        self._feed(rest)
        self._go_on()

    def close(self) -> None:
        """End it: the port, every stream, the connection."""
        if self._is_closed:
            return
        self._is_closed = True
        self._late.cancel()
        for number in list(self._streams):
            self._drop(number)
        for sock in (self._listener, self._carrier):
            if sock is not None:
                self._loop.watch(sock.fileno())
                sock.close()
        self._closed(self)

    # ── the connection ──

    def _read(self) -> None:
        assert self._carrier is not None
        try:
            data = self._carrier.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._used()
            self._feed(data)
            self._go_on()
        else:
            self.close()

    def _feed(self, data: bytes) -> None:
        try:
            for event in self._mux.feed(data):
                if (stream := self._streams.get(event.stream)) is not None:
                    self._heard(stream, event)
        except ProtocolError:
            self.close()

    def _heard(self, stream: _Stream, event: Event) -> None:
        if event.kind == RESET:
            # The command sees a connection that broke, not one that ended.
            stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _BREAK)
            self._drop(event.stream)
        elif event.kind == DATA:
            stream.waiting += event.data
        elif event.kind == END:
            stream.other_has_ended = True
        if event.kind in (DATA, END):
            self._write_stream(event.stream)

    def _write(self) -> None:
        assert self._carrier is not None
        try:
            sent = self._carrier.send(self._mux.output)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        del self._mux.output[:sent]
        self._go_on()

    def _go_on(self) -> None:
        """Watch for what can happen next, everywhere."""
        if self._is_closed or self._carrier is None:
            return
        write = self._write if self._mux.output else None
        self._loop.watch(self._carrier.fileno(), read=self._read, write=write)
        has_place = self._mux.num_streams < MAX_STREAMS and len(self._streams) < MAX_STREAMS
        self._loop.watch(self._listener.fileno(), read=self._accept if has_place else None)
        for number in self._streams:
            self._watch_stream(number)

    # ── its streams ──

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._used()
        self._streams[self._mux.open()] = _Stream(sock)
        self._go_on()

    def _watch_stream(self, number: int) -> None:
        stream = self._streams[number]
        is_free = len(self._mux.output) < MAX_OUTPUT_BYTES and self._mux.room(number) > 0
        self._loop.watch(
            stream.sock.fileno(),
            read=(lambda: self._read_stream(number)) if is_free and not stream.has_ended else None,
            write=(lambda: self._flush_stream(number)) if stream.waiting else None,
        )

    def _read_stream(self, number: int) -> None:
        stream, room = self._streams[number], self._mux.room(number)
        if not room:
            return
        try:
            data = stream.sock.recv(room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._break(number)
            return
        if data:
            self._used()
            self._mux.send(number, data)
        else:
            stream.has_ended = True
            self._mux.end(number)
            self._finish(number)
        self._go_on()

    def _flush_stream(self, number: int) -> None:
        self._write_stream(number)
        self._go_on()

    def _write_stream(self, number: int) -> None:
        stream = self._streams[number]
        try:
            if stream.waiting:
                sent = stream.sock.send(stream.waiting)
                del stream.waiting[:sent]
                self._mux.taken(number, sent)
            if stream.other_has_ended and not stream.waiting:
                stream.sock.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._break(number)
            return
        self._finish(number)

    def _finish(self, number: int) -> None:
        stream = self._streams[number]
        if stream.has_ended and stream.other_has_ended and not stream.waiting:
            self._drop(number)

    def _break(self, number: int) -> None:
        """The command's end is gone."""
        self._mux.reset(number)
        self._drop(number)
        self._go_on()

    def _drop(self, number: int) -> None:
        stream = self._streams.pop(number)
        self._loop.watch(stream.sock.fileno())
        stream.sock.close()
