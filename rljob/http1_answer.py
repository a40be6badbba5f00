"""Answers of HTTP/1.1, read within bounds: head, framing, body. `rljob.http1` asks for them.

ConnectionError
└── HttpError           no bounded HTTP/1.1 answer came; `connected` says whether the request may have been seen
    └── HungUpError     the peer closed the connection before its answer was complete
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import NamedTuple

MAX_HEAD_BYTES = 16_384
"""Also the bound on a chunk's first line and on each line after the last chunk."""
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r\n")
_MAX_DIGITS = 18
_READ_BYTES = 65_536
_CHUNKED, _TO_END = -1, -2


class HttpError(ConnectionError):
    """The peer could not be reached, hung up, or sent what is not a bounded HTTP/1.1 answer.

    Attributes:
        connected: False where no connection came about, so that the request certainly was not seen.
    """

    def __init__(self, message: str, *, connected: bool = True) -> None:
        super().__init__(message)
        self.connected = connected


class HungUpError(HttpError):
    """The peer closed the connection before its answer was complete."""


class Answer(NamedTuple):
    """Status, headers (names in lower case) and body."""

    status: int
    headers: dict[str, str]
    body: bytes


async def read_answer(reader: asyncio.StreamReader, max_body_bytes: int) -> tuple[Answer, bool]:
    """The answer, and whether the connection may be used again."""
    version, status, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
    size = body_size(status, headers, max_body_bytes)
    if size >= 0:
        body = await reader.readexactly(size)
    else:
        body = b"".join([piece async for piece in body_pieces(reader, size, max_body_bytes)])
    keep = version == b"HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return Answer(status, headers, body), keep and size != _TO_END


def body_size(status: int, headers: Mapping[str, str], max_body_bytes: int) -> int:
    """Bytes of the body, or how it ends: _CHUNKED, _TO_END. Raises HttpError."""
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if status in (204, 304):
        return 0
    if coding is not None:
        if coding.lower() != "chunked" or length is not None:
            raise HttpError("answer with a framing that is not known")
        return _CHUNKED
    if length is None:
        return _TO_END
    if not (length.isascii() and length.isdigit()):
        raise HttpError("answer with a length that is none")
    # int() refuses thousands of digits with an error of its own.
    if len(length) > _MAX_DIGITS or int(length) > max_body_bytes:
        raise _too_large(max_body_bytes)
    return int(length)


def parse_head(head: bytes) -> tuple[bytes, int, dict[str, str]]:
    """Version, status and headers (names in lower case). Raises HttpError."""
    version, status = head[:8], head[9:12]
    if (
        version not in (b"HTTP/1.1", b"HTTP/1.0")
        or head[8:9] != b" "
        or not status.isdigit()
        or head[12:13] not in b" \r"
    ):
        raise HttpError("not an HTTP/1.1 answer")
    headers: dict[str, str] = {}
    for line in head[:-4].decode("latin-1").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise HttpError("malformed header")
        headers[name.lower()] = value.strip()
    return version, int(status), headers


async def body_pieces(
    reader: asyncio.StreamReader, size: int, max_body_bytes: int
) -> AsyncGenerator[bytes, None]:
    """The body as it comes, no piece longer than _READ_BYTES."""
    if size >= 0:
        source = _exactly(reader, size)
    else:
        source = _chunks(reader, max_body_bytes) if size == _CHUNKED else _to_end(reader)
    left = max_body_bytes
    async with aclosing(source):
        async for piece in source:
            left -= len(piece)
            if left < 0:
                raise _too_large(max_body_bytes)
            yield piece


async def _chunks(
    reader: asyncio.StreamReader, max_chunk_bytes: int
) -> AsyncGenerator[bytes, None]:
    while size := await _chunk_size(reader):
        if size > max_chunk_bytes:
            raise _too_large(max_chunk_bytes)
        async with aclosing(_exactly(reader, size)) as pieces:
            async for piece in pieces:
                yield piece
        if await reader.readexactly(2) != b"\r\n":
            raise HttpError("malformed chunk")
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # what follows the last chunk says nothing that anyone here reads


async def _to_end(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while piece := await reader.read(_READ_BYTES):
        yield piece


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    match = _CHUNK_SIZE.fullmatch(await reader.readuntil(b"\r\n"))
    if not match:
        raise HttpError("malformed chunk")
    return int(match[1], 16)


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncGenerator[bytes, None]:
    while size:
        if not (piece := await reader.read(min(size, _READ_BYTES))):
            raise asyncio.IncompleteReadError(b"", size)
        size -= len(piece)
        yield piece


def _too_large(max_body_bytes: int) -> HttpError:
    return HttpError(f"answer is past the limit of {max_body_bytes} bytes")
