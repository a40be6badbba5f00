"""A stream and a shell of a sandbox that sends whatever it likes: what does not fit is an error, in bounds."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.errors import SandboxError
from rljob.http1_answer import Answer, HttpError
from rljob.sandbox_shells import Shell, open_shell
from rljob.sandbox_stream import MAX_LINE_BYTES, OutputStream

END = b'{"result": {"exit_code": 3, "truncated": true, "seconds": 1.5}}\n'


def piece(data: bytes, name: str = "stdout") -> bytes:
    return json.dumps({"stream": name, "data": base64.b64encode(data).decode()}).encode() + b"\n"


async def read(
    body: list[bytes], limit: int = 1000
) -> tuple[list[tuple[str, bytes]], OutputStream]:
    async def pieces() -> AsyncIterator[bytes]:
        for one in body:
            yield one

    output = OutputStream(pieces(), asyncio.get_running_loop().time() + 5, limit)
    return [pair async for pair in output], output


@given(st.lists(st.integers(0, 200), max_size=8))
def test_lines_are_the_same_however_they_arrive(cuts: list[int]) -> None:
    body = piece(b"one") + piece(b"\xff\0", "stderr") + END
    edges = sorted({0, *(min(cut, len(body)) for cut in cuts), len(body)})
    parts = [body[start:end] for start, end in pairwise(edges)]
    pairs, output = asyncio.run(read(parts))
    assert pairs == [("stdout", b"one"), ("stderr", b"\xff\0")]
    assert (output.result.exit_code, output.result.truncated) == (3, True)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        piece(b"x"),
        b"not json\n",
        b"[]\n",
        b'{"stream": "stdin", "data": ""}\n',
        b'{"stream": "stdout", "data": "not base64!"}\n',
        b'{"result": {"exit_code": "0"}}\n',
        b'{"result": {"exit_code": 256}}\n',
        b'{"result": {"exit_code": -1}}\n',
        piece(b"x" * 1001) + END,
        piece(b"x" * 600) + piece(b"x" * 600) + END,
        b"x" * (MAX_LINE_BYTES + 1),
    ],
    ids=lambda body: str(body[:40]),
)
async def test_nonsense_and_a_missing_end_are_errors(body: bytes) -> None:
    with pytest.raises(HttpError):
        await read([body])


async def test_a_stream_that_falls_silent_is_an_error_at_its_deadline() -> None:
    async def silent() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    output = OutputStream(silent(), asyncio.get_running_loop().time() + 0.01, 10)
    with pytest.raises(HttpError, match="in time"):
        await anext(output)


class Box:
    """A sandbox that answers what the test says."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def call(self, method: str, target: str, body: bytes = b"", **_: object) -> Answer:
        return Answer(200, {}, self.body)

    def lose(self, reason: str) -> NoReturn:
        raise SandboxError(reason)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"output": "!", "exit_code": 0}', b'{"output": "", "exit_code": 256}'],
)
async def test_a_shell_that_answers_nonsense_loses_its_sandbox(body: bytes) -> None:
    with pytest.raises(SandboxError, match="nonsense"):
        await Shell(Box(body), "s1", 5).run("x")


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"shell_id": "../exec?", "pid": 5}', b'{"shell_id": "", "pid": 5}'],
)
async def test_a_shells_name_cannot_lead_elsewhere(body: bytes) -> None:
    with pytest.raises(SandboxError, match="nonsense"):
        await open_shell(Box(body), cwd=None, env=None, pty=False, rows=24, columns=80)
