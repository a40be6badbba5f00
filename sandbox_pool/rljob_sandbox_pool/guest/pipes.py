"""Ends of pipes and terminals: what goes in as fast as it is taken, what comes out as far as it is wanted."""

from __future__ import annotations

import base64
import json
import os
from collections import deque
from collections.abc import Callable

from rljob_sandbox_pool.guest.loop import Loop

CHUNK_BYTES = 65_536
_READS = 16
"""So much is taken at a time that a pipe of the largest size is empty after it."""


class Inlet:
    """Bytes on their way in. Whoever no longer reads has the right to."""

    def __init__(self, loop: Loop, fd: int) -> None:
        os.set_blocking(fd, False)
        self._loop, self._fd = loop, fd
        self._waiting: deque[memoryview] = deque()
        self._ends = False

    @property
    def waiting_bytes(self) -> int:
        """What was not taken yet."""
        return sum(map(len, self._waiting))

    def send(self, data: bytes) -> None:
        """More to send."""
        if self._fd >= 0 and not self._ends:
            self._waiting.append(memoryview(data))
            self._go_on()

    def end(self) -> None:
        """Close after the last byte."""
        self._ends = True
        self._go_on()

    def close(self) -> None:
        """Now."""
        if self._fd >= 0:
            self._loop.watch(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._waiting.clear()

    def _go_on(self) -> None:
        if self._fd < 0:
            return
        try:
            while self._waiting:
                sent = os.write(self._fd, self._waiting[0][:CHUNK_BYTES])
                if sent == len(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][sent:]
        except BlockingIOError:
            self._loop.watch(self._fd, write=self._go_on)
            return
        except OSError:
            self.close()
            return
        if self._ends:
            self.close()
        else:
            self._loop.watch(self._fd)


class Outlet:
    """Bytes that come out, handed on as they come.

    Args:
        loop: Tells when there are some.
        fd: The end to read; closed at its end and by `close`.
        take: Gets them.
        ended: Called at the end.
    """

    def __init__(
        self,
        loop: Loop,
        fd: int,
        take: Callable[[bytes], None],
        ended: Callable[[], None] | None = None,
    ) -> None:
        os.set_blocking(fd, False)
        self._loop, self._fd, self._take, self._ended = loop, fd, take, ended
        self.resume()

    def foreground(self) -> int:
        """Of a terminal: the process group that has it; 0: none. Raises OSError."""
        return os.tcgetpgrp(self._fd)

    def pause(self) -> None:
        """Leave what comes where it is: whoever writes it has to wait."""
        if self._fd >= 0:
            self._loop.watch(self._fd)

    def resume(self) -> None:
        """The end of a `pause`."""
        if self._fd >= 0:
            self._loop.watch(self._fd, read=self.drain)

    def drain(self) -> None:
        """Take what is there."""
        for _ in range(_READS):
            if self._fd < 0:
                return
            try:
                data = os.read(self._fd, CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:  # a terminal whose last user has gone
                data = b""
            if not data:
                self.close()
                if self._ended is not None:
                    self._ended()
                return
            self._take(data)

    def close(self) -> None:
        """Read no more."""
        if self._fd >= 0:
            self._loop.watch(self._fd)
            os.close(self._fd)
            self._fd = -1


class Output:
    """What of an output is kept: its beginning. The rest is dropped, so that whoever writes goes on."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.truncated = limit_bytes, False
        self._kept = bytearray()
        self._taken_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """What can be taken."""
        return len(self._kept)

    def add(self, data: bytes) -> bytes:
        """Keep; returns what was kept."""
        room = max(0, self.limit_bytes - self._taken_bytes - len(self._kept))
        self.truncated = self.truncated or len(data) > room
        self._kept += data[:room]
        return data[:room]

    def take(self, size: int | None = None) -> bytes:
        """Hand out what is kept, or its beginning."""
        size = len(self._kept) if size is None else size
        data = bytes(self._kept[:size])
        del self._kept[:size]
        self._taken_bytes += size
        return data


def encoded(data: bytes, encoding: str) -> str:
    """Output as JSON can carry it."""
    if encoding == "base64":
        return base64.b64encode(data).decode()
    return data.decode("utf-8", "replace")


def piece(name: str, data: bytes) -> bytes:
    """Output as a line of a streamed answer."""
    line = {"stream": name, "data": base64.b64encode(data).decode()}
    return json.dumps(line).encode() + b"\n"
