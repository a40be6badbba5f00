"""HTTP/1.1 without I/O: bytes in, requests out; answers in, bytes out. Everything is bounded."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from rljob_sandbox_pool.guest.stream import Stream

MAX_HEAD_BYTES = 16_384
MAX_QUERY_FIELDS = 16
Upgrade = Callable[[socket.socket, bytes], None]
"""Takes a connection over: its socket, and what has come after the request."""
_REASONS = {
    101: "Switching Protocols",
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
}
"""The rest are numbers to anyone who reads them."""


class Request(NamedTuple):
    """One request; header names in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    id: str = ""
    """What stands where the route's pattern has `{id}`."""


class Response(NamedTuple):
    """One answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    close: bool = False
    stream: Stream | None = None
    """The body comes in pieces instead."""
    upgrade: Upgrade | None = None
    """After the head (status 101) the connection is no longer HTTP."""

    def encode(self) -> bytes:
        """The answer as bytes; without the body where it comes in pieces."""
        lines = [f"HTTP/1.1 {self.status} {_REASONS.get(self.status, 'Refused')}"]
        if self.upgrade is not None:
            lines.append("connection: upgrade")
        elif self.stream is not None:
            lines += [f"content-type: {self.content_type}", "transfer-encoding: chunked"]
        else:
            lines += [f"content-type: {self.content_type}", f"content-length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.close:
            lines.append("connection: close")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


class RefusedError(Exception):
    """A request is answered with an error.

    Args:
        status: HTTP status.
        error: A word for programs.
        message: A sentence for people.
        headers: More headers of the answer.
    """

    def __init__(
        self, status: int, error: str, message: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, error, message)
        self.status, self.error, self.message = status, error, message
        self.headers = dict(headers or {})

    def response(self, *, close: bool = False) -> Response:
        """The answer that says so."""
        body = json.dumps({"error": self.error, "message": self.message}).encode()
        return Response(self.status, body, headers=tuple(self.headers.items()), close=close)


def answer(value: Any) -> Response:
    """200 with `value` as JSON."""
    return Response(200, json.dumps(value).encode())


Admit = Callable[[str, str, Mapping[str, str], int], None]
"""Told method, target, headers and length of a request before its body is read. Raises RefusedError."""


class RequestParser:
    """Cuts a byte stream into requests. A `RefusedError` from `feed` ends the connection.

    Args:
        max_body_bytes: Largest body of any request.
        admit: May refuse a request by its head.
    """

    def __init__(
        self,
        max_body_bytes: int,
        admit: Admit = lambda *head: None,
    ) -> None:
        self._max_body_bytes, self._admit = max_body_bytes, admit
        self._buffer = bytearray()
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._length = 0

    @property
    def idle(self) -> bool:
        """Whether no request has begun."""
        return not self._buffer and self._head is None

    def rest(self) -> bytes:
        """What has come after the last whole request."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Request]:
        """Take bytes; return the requests they complete."""
        self._buffer += data
        requests: list[Request] = []
        while request := self._next():
            requests.append(request)
        return requests

    def _next(self) -> Request | None:
        if self._head is None and not self._take_head():
            return None
        if self._head is None or len(self._buffer) < self._length:
            return None
        method, target, headers = self._head
        body = bytes(memoryview(self._buffer)[: self._length])
        del self._buffer[: self._length]
        self._head = None
        path, _, query = target.partition("?")
        try:
            pairs = parse_qsl(
                query,
                keep_blank_values=True,
                errors="surrogateescape",
                max_num_fields=MAX_QUERY_FIELDS,
            )
        except ValueError:
            words = f"a query has at most {MAX_QUERY_FIELDS} fields"
            raise RefusedError(400, "bad_request", words) from None
        return Request(method, path, dict(pairs), headers, body)

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(self._buffer) >= MAX_HEAD_BYTES:
                raise RefusedError(
                    431, "head_too_large", f"a head is at most {MAX_HEAD_BYTES} bytes"
                )
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        parts = lines[0].split(" ")
        if len(parts) != 3 or parts[2] != "HTTP/1.1":
            raise RefusedError(400, "bad_request", "not an HTTP/1.1 request")
        headers = dict(_header(line) for line in lines[1:])
        self._length = self._body_length(headers)
        self._admit(parts[0], parts[1], headers, self._length)
        self._head = parts[0], parts[1], headers
        return True

    def _body_length(self, headers: Mapping[str, str]) -> int:
        if "transfer-encoding" in headers:
            raise RefusedError(411, "bad_request", "send a content-length")
        text = headers.get("content-length", "0")
        if not (text.isascii() and text.isdigit() and len(text) < 12):
            raise RefusedError(400, "bad_request", "malformed content-length")
        if int(text) > self._max_body_bytes:
            raise RefusedError(413, "too_large", f"a body is at most {self._max_body_bytes} bytes")
        return int(text)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon:
        raise RefusedError(400, "bad_request", "malformed header")
    return name.lower(), value.strip()
