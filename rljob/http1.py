"""A small HTTP/1.1 client for the calls that are made often: to gateways, engines, sandboxes and their broker.

    call ──► a kept connection, else a new one ──► head, bounded ──► body, bounded ──► kept, else closed
    stream ──► a new connection ──► head, bounded ──► pieces of the body as they come ──► closed

A general client spends more time on one small call than the call itself takes (0.7 ms of CPU with httpx, 0.06 ms here),
and believes more of what the other side sends than a sandbox deserves: nothing is read past its bound, and nothing is
waited for past the call's deadline. Redirects, proxies, cookies, compression and HEAD are left out on purpose.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from rljob.clock import Clock, SystemClock
from rljob.http1_answer import (
    MAX_HEAD_BYTES,
    Answer,
    HttpError,
    HungUpError,
    body_pieces,
    body_size,
    parse_head,
    read_answer,
)

MAX_BODY_BYTES = 1_000_000
"""What a client reads that was given no bound of its own."""
CONNECT_SECONDS = 5.0
IDLE_SECONDS = 2.0
"""Idle connections are dropped before any server does (uvicorn: 5 s), or a request could meet a closing socket."""


class Streamed(NamedTuple):
    """An answer whose body comes in pieces; reading them raises HttpError."""

    status: int
    headers: dict[str, str]
    pieces: AsyncGenerator[bytes, None]


class Transport(Protocol):
    """Carries requests to one server: `HttpClient` directly, `rljob.kube.proxy` by way of the API server."""

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 10.0,
        max_body_bytes: int | None = None,
    ) -> Answer:
        """See `HttpClient.request`."""
        ...

    def stream(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 10.0,
        max_body_bytes: int | None = None,
    ) -> AbstractAsyncContextManager[Streamed]:
        """See `HttpClient.stream`."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


@dataclass(slots=True)
class _Connection:
    """Answers requests one after another."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0


class HttpClient:
    """Requests to one server, over as many kept connections as there were calls at once.

    Safe to share between tasks of one event loop; `aclose` when done.

    Args:
        url: Base URL, http:// or https:// (certificates are verified); requests' targets are appended to its path.
        headers: Sent with every request; names and values must hold no line break.
        max_body_bytes: Largest body of an answer, for calls that give no bound of their own.
        idle_seconds: How long an idle connection is trusted; below the server's own limit.
        clock: Time, for idle connections.

    Raises:
        HttpError: `url` is no such address.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        idle_seconds: float = IDLE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self.url = url
        self._host, self._port, is_tls, authority, self._base_path = _parse_url(url)
        # Once per client: reading the certificates takes 20 ms.
        self._tls = ssl.create_default_context() if is_tls else None
        self._head = _lines({"host": authority, **(headers or {})})
        self._num_lines = 3 + len(headers or {})  # with the request's line and the body's length
        self._max_body_bytes, self._idle_seconds = max_body_bytes, idle_seconds
        self._clock = clock or SystemClock()
        self._idle: deque[_Connection] = deque()
        self._is_closed = False

    async def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 10.0,
        max_body_bytes: int | None = None,
        repeatable: bool = True,
    ) -> Answer:
        """Send one request and read its whole answer, whatever its status.

        Args:
            method: HTTP method.
            target: Path and query, already quoted.
            body: Request body.
            headers: More headers; names and values must hold no line break.
            timeout_seconds: For everything, connecting included.
            max_body_bytes: Largest body that is read; without it the client's.
            repeatable: The request may be sent once more, over a new connection, where a kept one closed (most likely
                while it was idle). What breaks on a new connection is never sent again.

        Raises:
            HttpError: see there.
            TimeoutError: the deadline passed; the connection is closed, which tells the server.
        """
        request = self._encode(method, target, headers or {}, body)
        limit = self._max_body_bytes if max_body_bytes is None else max_body_bytes
        async with asyncio.timeout(timeout_seconds):
            if connection := self._take_idle():
                try:
                    return await self._exchange(connection, request, limit)
                except HungUpError:
                    if not repeatable:
                        raise
            return await self._exchange(await self._connect(), request, limit)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 10.0,
        max_body_bytes: int | None = None,
    ) -> AsyncIterator[Streamed]:
        """Send one request over a connection of its own and read its answer as it comes; leaving it hangs up.

        Args: see `request`; `timeout_seconds` is for the answer's head, the caller waits for the pieces.

        Raises:
            HttpError: see there.
            TimeoutError: no answer began in time.
        """
        request = self._encode(method, target, headers or {}, body)
        limit = self._max_body_bytes if max_body_bytes is None else max_body_bytes
        async with asyncio.timeout(timeout_seconds):
            connection = await self._connect()
        try:
            async with asyncio.timeout(timeout_seconds):
                with self._named():
                    connection.writer.write(request)
                    head = await connection.reader.readuntil(b"\r\n\r\n")
            _, status, headers_heard = parse_head(head)
            pieces = self._pieces(connection.reader, status, headers_heard, limit)
            async with aclosing(pieces):
                yield Streamed(status, headers_heard, pieces)
        finally:
            connection.writer.close()

    async def _pieces(
        self, reader: asyncio.StreamReader, status: int, headers: Mapping[str, str], limit: int
    ) -> AsyncGenerator[bytes, None]:
        with self._named():
            size = body_size(status, headers, limit)
            async with aclosing(body_pieces(reader, size, limit)) as pieces:
                async for piece in pieces:
                    yield piece

    async def aclose(self) -> None:
        """Close the connections: the idle ones now, the others with their calls."""
        self._is_closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that carry no call; later calls make new ones."""
        while self._idle:
            self._idle.pop().writer.close()

    def _encode(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
        head = (
            f"{method} {self._base_path}{target} HTTP/1.1\r\n"
            f"content-length: {len(body)}\r\n{self._head}{_lines(headers)}"
        )
        num_lines = self._num_lines + len(headers)
        if head.count("\n") != num_lines or head.count("\r") != num_lines:
            raise HttpError("line break in a header", connected=False)
        return f"{head}\r\n".encode() + body

    def _take_idle(self) -> _Connection | None:
        oldest = self._clock.monotonic() - self._idle_seconds
        while self._idle:
            connection = self._idle.pop()  # the latest: the others may grow old enough to be closed
            if (
                connection.idle_since >= oldest
                and not connection.reader.at_eof()
                and not connection.writer.is_closing()
            ):
                return connection
            connection.writer.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        now = connection.idle_since = self._clock.monotonic()
        self._idle.append(connection)
        while self._idle[0].idle_since < now - self._idle_seconds:
            self._idle.popleft().writer.close()

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                streams = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls, limit=MAX_HEAD_BYTES
                )
        except TimeoutError:
            reason = f"no connection within {CONNECT_SECONDS:.0f} s"
        except (OSError, UnicodeError) as error:  # the latter: a host name that is none
            reason = str(getattr(error, "strerror", None) or error)
        else:
            return _Connection(*streams)
        raise HttpError(f"cannot connect to {self.url}: {reason}", connected=False)

    async def _exchange(
        self, connection: _Connection, request: bytes, max_body_bytes: int
    ) -> Answer:
        keep = False
        try:
            with self._named():
                connection.writer.write(request)
                answer, keep = await read_answer(connection.reader, max_body_bytes)
        finally:
            if keep and not self._is_closed:
                self._keep(connection)
            else:
                connection.writer.close()
        return answer

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What breaks while an answer is read is an HttpError."""
        try:
            yield
        except HttpError:
            raise  # an OSError too
        except (OSError, asyncio.IncompleteReadError):
            raise HungUpError(f"{self.url} hung up") from None
        except asyncio.LimitOverrunError:
            raise HttpError(f"answer's head is past the limit of {MAX_HEAD_BYTES} bytes") from None


def _parse_url(url: str) -> tuple[str, int, bool, str, str]:
    """Host, port, whether it is TLS, what the host header says, path without a slash at its end."""
    try:
        url.encode()
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # no text, or a port or an IPv6 address that is none
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise HttpError(f"not an http:// or https:// address: {url!r}", connected=False)
    is_tls = parts.scheme == "https"
    authority = parts.netloc.rpartition("@")[2]
    return (
        parts.hostname,
        port or (443 if is_tls else 80),
        is_tls,
        authority,
        parts.path.rstrip("/"),
    )


def _lines(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
