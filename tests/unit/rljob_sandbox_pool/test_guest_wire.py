"""Bytes to requests, however they are cut; everything bounded."""

import json
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_sandbox_pool.guest.wire import (
    MAX_HEAD_BYTES,
    RefusedError,
    RequestParser,
    Response,
    answer,
)

TWO = (
    b"POST /exec?a=1&b=%20x HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
    b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n"
)


@given(st.lists(st.integers(0, len(TWO)), max_size=20))
def test_requests_are_the_same_however_the_bytes_arrive(cuts: list[int]) -> None:
    parser, requests, edges = RequestParser(1000), [], sorted({0, *cuts, len(TWO)})
    for start, end in pairwise(edges):
        requests += parser.feed(TWO[start:end])
    first, second = requests
    assert (first.method, first.path, first.body) == ("POST", "/exec", b"hello")
    assert first.query == {"a": "1", "b": " x"}
    assert first.headers["content-length"] == "5"
    assert (second.method, second.path, second.body) == ("GET", "/healthz", b"")
    assert parser.idle


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\ncontent-length: 1e3\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\ncontent-length: ٣\r\n\r\n".encode(), 400),
        (b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 411),
        (b"GET /?" + b"a=1&" * 17 + b" HTTP/1.1\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"GET /" + b"x" * MAX_HEAD_BYTES, 431),
    ],
)
def test_what_is_malformed_or_too_large_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(RefusedError) as refused:
        RequestParser(1000).feed(data)
    assert refused.value.status == status


@given(st.binary(max_size=2000))
def test_garbage_is_a_refusal_or_a_wait_never_another_error(data: bytes) -> None:
    with suppress(RefusedError):
        RequestParser(100).feed(data)


def test_an_answer_says_its_length() -> None:
    head, _, body = answer({"a": "ü"}).encode().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body) == {"a": "ü"}


def test_a_refusal_carries_its_word_and_its_headers() -> None:
    response = RefusedError(503, "warming", "soon", {"retry-after": "1"}).response(close=True)
    assert json.loads(response.body) == {"error": "warming", "message": "soon"}
    assert b"\r\nretry-after: 1\r\nconnection: close\r\n\r\n" in response.encode()
    assert isinstance(response, Response)
