"""Commands in a sandbox whose output is read as it comes.

    async with box.exec_stream("make -j4") as output:
        async for name, data in output:      # "stdout" or "stderr", bytes
            ...
    output.result.exit_code

Leaving it early ends the command, with everything that it started. So does a connection that breaks.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, Protocol

import msgspec

from rljob.http1_answer import HttpError
from rljob.sandbox import ExecResult
from rljob.sandbox_wire import encode

GRACE_SECONDS = 15.0
"""What an answer may take beyond the time the command itself was given."""
MAX_LINE_BYTES = 1_000_000
_NAMES: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")


class Streams(Protocol):
    """A claimed sandbox, as far as it is needed here."""

    def stream(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        timeout: float = ...,
        max_body_bytes: int = ...,
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """See `rljob.claimed_sandbox.ClaimedSandbox.stream`."""
        ...


class _End(msgspec.Struct):
    """Guest → client: how a streamed command ended."""

    exit_code: int
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0


class _Line(msgspec.Struct):
    """Guest → client: output, or at last the result."""

    stream: Literal["stdout", "stderr"] = "stdout"
    data: bytes = b""
    result: _End | None = None


def command_fields(
    command: Sequence[str] | str,
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: bytes,
    timeout: float,
) -> dict[str, Any]:
    """What every request to run a command says."""
    fields: dict[str, Any] = {
        "request_id": secrets.token_hex(8),
        "command": command if isinstance(command, str) else list(command),
        "timeout": timeout,
    }
    if cwd is not None:
        fields["cwd"] = cwd
    if env:
        fields["env"] = dict(env)
    if stdin:
        fields["stdin"] = base64.b64encode(stdin).decode()
    return fields


class OutputStream:
    """The output of a running command, in order per stream: pairs of a stream's name and some of its bytes.

    Attributes:
        result: How the command ended, once the output has been read to its end; its stdout and stderr are empty.
    """

    def __init__(
        self, pieces: AsyncIterator[bytes], deadline: float, max_output_bytes: int
    ) -> None:
        self._pieces, self._deadline = pieces, deadline
        self._left = dict.fromkeys(_NAMES, max_output_bytes)
        self._lines: deque[bytes] = deque()
        self._part = b""
        self._result: ExecResult | None = None

    @property
    def result(self) -> ExecResult:
        """Raises ValueError while the output has not been read to its end."""
        if self._result is None:
            raise ValueError("the output has not been read to its end")
        return self._result

    def __aiter__(self) -> AsyncIterator[tuple[str, bytes]]:
        """Read on."""
        return self

    async def __anext__(self) -> tuple[str, bytes]:
        """The next piece of output. Raises HttpError, which the sandbox takes as its loss."""
        if self._result is not None:
            raise StopAsyncIteration
        while not self._lines:
            await self._read()
        try:
            line = msgspec.json.decode(self._lines.popleft(), type=_Line)
        except msgspec.MsgspecError as error:
            raise HttpError(f"nonsense: {error}") from None
        if line.result is not None:
            self._end(line.result)
            raise StopAsyncIteration
        self._left[line.stream] -= len(line.data)
        if self._left[line.stream] < 0:
            raise HttpError(f"more of {line.stream} than was asked for")
        return line.stream, line.data

    async def _read(self) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                piece = await anext(self._pieces, None)
        except TimeoutError:
            raise HttpError("the command's end is not told in time") from None
        if piece is None:
            raise HttpError("the output ends without a result")
        *lines, self._part = (self._part + piece).split(b"\n")
        self._lines.extend(lines)
        if len(self._part) > MAX_LINE_BYTES:
            raise HttpError(f"a line of more than {MAX_LINE_BYTES} bytes")

    def _end(self, end: _End) -> None:
        if not 0 <= end.exit_code <= 255:
            raise HttpError(f"nonsense: exit code {end.exit_code}")
        self._result = ExecResult(
            exit_code=end.exit_code,
            stdout="",
            stderr="",
            timed_out=end.timed_out,
            truncated=end.truncated,
            seconds=end.seconds,
        )


@asynccontextmanager
async def exec_stream(
    box: Streams, fields: dict[str, Any], timeout: float, max_output_bytes: int
) -> AsyncIterator[OutputStream]:
    """Run what `command_fields` says; see `rljob.claimed_sandbox.ClaimedSandbox.exec_stream`."""
    body = encode({**fields, "stream": True, "max_output_bytes": max_output_bytes})
    deadline = asyncio.get_running_loop().time() + timeout + GRACE_SECONDS
    fault: TimeoutError | None = None
    # A piece of one byte is a line of fifty.
    limit = 128 * max_output_bytes + 65_536
    async with box.stream("POST", "/exec", body, max_body_bytes=limit) as pieces:
        try:
            yield OutputStream(pieces, deadline, max_output_bytes)
        except TimeoutError as error:
            # The caller's own: not the sandbox's fault.
            fault = error
    if fault is not None:
        raise fault
