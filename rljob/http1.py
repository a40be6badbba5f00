"""A small HTTP/1.1 client for sandboxes and their broker: keep-alive, a deadline per call, bounds on all it reads.

A general client spends more time on one small call than the call itself takes, and believes more of what the other side
sends than a sandbox deserves: here a head is at most 16 KiB, a body must announce its length, and neither is read past
its bound.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 16_384
MAX_IDLE_CONNECTIONS = 16
MAX_IDLE_SECONDS = 20.0
"""Below the servers' own idle limit, so that a kept connection is rarely found closed."""


class HttpError(Exception):
    """The peer could not be reached, hung up, or sent what is not a bounded HTTP/1.1 answer.

    Attributes:
        connected: False where no connection came about, so that the request certainly was not seen.
    """

    def __init__(self, message: str, *, connected: bool = True) -> None:
        super().__init__(message)
        self.connected = connected


class HungUpError(HttpError):
    """The peer closed the connection before it had answered."""


class Answer(NamedTuple):
    """Status, headers (names in lower case) and body."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Connection:
    """One TCP connection that answers requests one after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.idle_since = 0.0

    def usable(self, now: float) -> bool:
        """Whether the connection may serve another request."""
        return not (
            self.writer.is_closing()
            or self.reader.at_eof()
            or now - self.idle_since > MAX_IDLE_SECONDS
        )

    async def roundtrip(self, request: bytes, max_body_bytes: int) -> tuple[Answer, bool]:
        """Send and read one answer. Returns it and whether the connection may be kept."""
        self.writer.write(request)
        status, headers = _parse_head(await self.reader.readuntil(b"\r\n\r\n"))
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            raise HttpError("answer without a length")
        if int(length) > max_body_bytes:
            raise HttpError(f"answer of {length} bytes is past the limit of {max_body_bytes}")
        body = await self.reader.readexactly(int(length))
        return Answer(status, headers, body), headers.get("connection", "").lower() != "close"


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    lines = head[:-4].decode("latin-1").split("\r\n")
    parts = lines[0].split(" ", 2)
    if (
        len(parts) < 2
        or parts[0] != "HTTP/1.1"
        or not (parts[1].isascii() and parts[1].isdigit() and len(parts[1]) == 3)
    ):
        raise HttpError("not an HTTP/1.1 answer")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise HttpError("malformed header")
        headers[name.lower()] = value.strip()
    return int(parts[1]), headers


class HttpClient:
    """Requests to one origin (`http://host:port`), over as many kept connections as there are calls at once."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise HttpError(f"not an http:// address: {url!r}", connected=False)
        self.url = url
        self._host, self._port = parts.hostname, parts.port or 80
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 10.0,
        max_body_bytes: int = 1_000_000,
        repeatable: bool = True,
    ) -> Answer:
        """Send one request.

        Args:
            method: HTTP method.
            target: Path and query, already quoted.
            body: Request body.
            headers: More headers; names and values must hold no line break.
            timeout: Seconds for everything, connecting included.
            max_body_bytes: Largest body that is read.
            repeatable: The request may be sent again over a fresh connection where a kept one broke.

        Raises:
            HttpError: see there.
            TimeoutError: the deadline passed.
        """
        request = self._encode(method, target, headers or {}, body)
        async with asyncio.timeout(timeout):
            while connection := self._take_idle():
                try:
                    return await self._roundtrip(connection, request, max_body_bytes)
                except HungUpError:
                    if not repeatable:
                        raise
            return await self._roundtrip(await self._connect(), request, max_body_bytes)

    async def aclose(self) -> None:
        """Close the kept connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.writer.close()

    def _encode(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
        lines = [
            f"{method} {target} HTTP/1.1",
            f"host: {self._host}:{self._port}",
            f"content-length: {len(body)}",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if any("\r" in line or "\n" in line for line in lines):
            raise HttpError("line break in a header", connected=False)
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    def _take_idle(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable(now):
                return connection
            connection.writer.close()
        return None

    async def _connect(self) -> _Connection:
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, limit=MAX_HEAD_BYTES
            )
        except OSError as error:
            raise HttpError(
                f"cannot connect to {self.url}: {error.strerror or error}", connected=False
            ) from None
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(reader, writer)

    async def _roundtrip(
        self, connection: _Connection, request: bytes, max_body_bytes: int
    ) -> Answer:
        keep = False
        try:
            answer, keep = await connection.roundtrip(request, max_body_bytes)
        except (OSError, asyncio.IncompleteReadError):
            raise HungUpError(f"{self.url} hung up") from None
        except asyncio.LimitOverrunError:
            raise HttpError("answer's head is past the limit") from None
        finally:
            if keep and len(self._idle) < MAX_IDLE_CONNECTIONS:
                connection.idle_since = asyncio.get_running_loop().time()
                self._idle.append(connection)
            else:
                connection.writer.close()
        return answer
