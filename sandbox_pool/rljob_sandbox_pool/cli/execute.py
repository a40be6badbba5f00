"""`rljob sandbox exec`: a command in a claimed sandbox; its output and its exit code are ours.

    stdout, stderr ◄─ as they come ─ the command ◄─ all of stdin (-i)
    stdout ◄──────── as it comes ─── the command on a terminal ◄─ stdin, line by line (-t)

Whatever ends us hangs up, and that ends the command; on a terminal, what can be caught.
"""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import UserError
from rljob.sandbox_shells import Shell
from rljob_sandbox_pool.cli.arguments import environment, in_range
from rljob_sandbox_pool.cli.claims import MAX_SECONDS
from rljob_sandbox_pool.cli.state import State
from rljob_sandbox_pool.cli.where import attached, call

MAX_STDIN_BYTES = 24 * 1024 * 1024
MAX_OUTPUT_BYTES = 1 << 30
QUIET_SECONDS = 0.05
"""On a terminal, output is shown when no more of it came for so long."""
LOOK_SECONDS = 10.0
TIMED_OUT = 124


@dataclass(frozen=True)
class Command:
    """What is to be run, and how."""

    line: Sequence[str]
    timeout: float
    env: Mapping[str, str]
    cwd: str | None = None


def main(
    state: State,
    name: str,
    line: Sequence[str],
    *,
    timeout: float,
    env: Sequence[str],
    cwd: str | None,
    with_stdin: bool,
    on_terminal: bool,
) -> int:
    """Run it; the exit code. Raises UserError."""
    in_range("--timeout", timeout, 0.1, MAX_SECONDS)
    if not line:
        raise UserError("exec", "there is no command", "write it after --: exec CLAIM -- ls -l")
    command = Command(line, timeout, environment(env), cwd)
    if on_terminal and not sys.stdin.isatty():
        raise UserError("-t", "stdin is no terminal", "use -i to send it")
    stored = state.claim(name)
    stdin = _stdin(timeout) if with_stdin and not on_terminal else b""

    async def work() -> int:
        async with attached(stored, f"claim {name}") as box:
            if on_terminal:
                return await _on_terminal(box, command)
            return await _stream(box, command, stdin)

    return call(work)


def _stdin(seconds: float) -> bytes:
    """All of it, within the time that the command has. Raises UserError."""
    data, until = bytearray(), time.monotonic() + seconds
    while len(data) <= MAX_STDIN_BYTES:
        left = max(0.0, until - time.monotonic())
        if not select.select([sys.stdin], [], [], left)[0]:
            fault = f"has not ended within {seconds:g} s"
            raise UserError("stdin", fault, "end it, or give a longer --timeout")
        if not (more := os.read(sys.stdin.fileno(), 1 << 20)):
            return bytes(data)
        data += more
    raise UserError("stdin", f"more than {MAX_STDIN_BYTES} bytes", "copy it with cp first")


async def _stream(box: ClaimedSandbox, command: Command, stdin: bytes) -> int:
    out = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    async with box.exec_stream(
        command.line,
        cwd=command.cwd,
        env=command.env,
        stdin=stdin,
        timeout=command.timeout,
        max_output_bytes=MAX_OUTPUT_BYTES,
    ) as output:
        async for stream, data in output:
            out[stream].write(data)
            out[stream].flush()
    if output.result.truncated:
        sys.stderr.write(f"exec: output past {MAX_OUTPUT_BYTES} bytes was dropped\n")
    return output.result.exit_code


# ── on a terminal ──


async def _on_terminal(box: ClaimedSandbox, command: Command) -> int:
    size = shutil.get_terminal_size()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + command.timeout
    env = {"TERM": "xterm", **command.env}
    async with (
        box.shell(
            cwd=command.cwd, env=env, pty=True, rows=size.lines, columns=size.columns
        ) as shell,
        _fed(shell),
    ):
        result = await shell.run(
            f"exec {shlex.join(command.line)}",
            timeout=min(LOOK_SECONDS, command.timeout),
            on_timeout="leave",
            quiet=QUIET_SECONDS,
        )
        while True:
            sys.stdout.buffer.write(result.data)
            sys.stdout.buffer.flush()
            if not result.running:
                return result.exit_code or 0
            left = deadline - loop.time()
            if left <= 0:
                return TIMED_OUT
            result = await shell.wait(timeout=min(LOOK_SECONDS, left), quiet=QUIET_SECONDS)


@asynccontextmanager
async def _fed(shell: Shell) -> AsyncIterator[None]:
    """What is typed goes to the shell, Ctrl-C too: the terminal there knows what it means."""
    loop = asyncio.get_running_loop()
    given: asyncio.Queue[bytes] = asyncio.Queue()

    def typed() -> None:
        data = os.read(sys.stdin.fileno(), 65_536)
        if not data:
            loop.remove_reader(sys.stdin)
        given.put_nowait(data)

    async def feed() -> None:
        while True:
            each = await given.get()
            with suppress(OSError):  # it has just ended
                await shell.input(each, eof=not each)

    loop.add_reader(sys.stdin, typed)
    loop.add_signal_handler(signal.SIGINT, given.put_nowait, b"\x03")
    feeding = asyncio.create_task(feed())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_reader(sys.stdin)
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding
