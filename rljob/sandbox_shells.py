r"""Shells in a sandbox: folder, environment, functions and background jobs stay from command to command.

    async with box.shell() as shell:
        await shell.run("cd /workspace && export X=1")
        result = await shell.run("pwd; echo $X")          # result.output, result.exit_code

A program that asks is left running, and answered:

    async with box.shell(pty=True) as shell:
        result = await shell.run("python3", timeout=30, on_timeout="leave", quiet=0.3)
        while result.running:
            await shell.input("print(6 * 7)\nexit()\n")
            result = await shell.wait(timeout=30, quiet=0.3)
"""

from __future__ import annotations

import base64
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, NoReturn, Protocol

import msgspec

from rljob.errors import SandboxError
from rljob.http1_answer import Answer
from rljob.sandbox_wire import encode

GRACE_SECONDS = 20.0
"""What an answer may take beyond the time it was given: what is interrupted has some seconds to end."""
CALL_SECONDS = 20.0
MAX_OUTPUT_BYTES = 4_000_000
"""Upper bound of `max_output_bytes`."""

OnTimeout = Literal["interrupt", "leave"]


class Calls(Protocol):
    """A claimed sandbox, as far as it is needed here."""

    async def call(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        timeout: float = ...,
        max_body_bytes: int = ...,
    ) -> Answer:
        """See `rljob.claimed_sandbox.ClaimedSandbox.call`."""
        ...

    def lose(self, reason: str) -> NoReturn:
        """See `rljob.claimed_sandbox.ClaimedSandbox.lose`."""
        ...


class ShellResult(msgspec.Struct, kw_only=True):
    """How a command in a shell stands."""

    data: bytes = msgspec.field(name="output")
    """stdout and stderr, in the order in which they were written."""
    exit_code: int | None
    """The command's; the shell's where it has ended; 124 where the timeout ended it; None while it runs."""
    timed_out: bool = False
    """It took too long and was interrupted."""
    truncated: bool = False
    """Output past the limit was dropped."""
    alive: bool = True
    """The shell takes further commands."""
    running: bool = False
    """The command goes on: `wait` for more, `input` what it asks for, `signal` it."""

    @property
    def output(self) -> str:
        """`data` as text; what is not UTF-8 is replaced."""
        return self.data.decode("utf-8", "replace")


class _Opened(msgspec.Struct):
    """Guest → client: a new shell."""

    shell_id: str
    pid: int


class Shell:
    """One shell of a claimed sandbox: bash, or the image's `sh`. It ends with the claim at the latest.

    Every method raises `SandboxError` when the sandbox is lost, and BrokenPipeError when the shell has ended. One
    command runs at a time; a second one meanwhile is BlockingIOError. After a timeout the shell lives on, but for one
    that cannot be interrupted: that is ended, and `alive` is false.

    Attributes:
        id: Its name in the sandbox.
        pid: Its process there.
    """

    def __init__(self, box: Calls, shell_id: str, pid: int) -> None:
        self.id, self.pid = shell_id, pid
        self._box = box

    async def run(
        self,
        command: str,
        *,
        timeout: float = 60.0,
        max_output_bytes: int = 1_000_000,
        on_timeout: OnTimeout = "interrupt",
        quiet: float | None = None,
    ) -> ShellResult:
        """Run one or more lines of shell.

        Args:
            command: What the shell is to do. What is no valid shell is an error of the command, not of the shell.
            timeout: Seconds until it is interrupted, or left running.
            max_output_bytes: More output than that is dropped.
            on_timeout: `interrupt` ends the command as Ctrl-C does, after two more seconds by force. `leave` answers
                with what there is; the command goes on, and `wait` tells more.
            quiet: Answer as well, and leave the command running, when there was output and then none for so many
                seconds: a program that asks for something.
        """
        patience = _patience(timeout, max_output_bytes, on_timeout, quiet)
        return await self._result("run", {"command": command, **patience})

    async def wait(
        self,
        *,
        timeout: float = 60.0,
        max_output_bytes: int = 1_000_000,
        on_timeout: OnTimeout = "leave",
        quiet: float | None = None,
    ) -> ShellResult:
        """More of a command that was left running; see `run`.

        Where none runs: at once, with what background jobs have said and the last command's exit code.
        """
        return await self._result("wait", _patience(timeout, max_output_bytes, on_timeout, quiet))

    async def input(self, data: bytes | str, *, eof: bool = False) -> None:
        """What commands read as their input.

        Args:
            data: The input; a program on a terminal waits for the end of a line.
            eof: It ends here: on a terminal for the program that reads now, without one for good.
        """
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
        fields = {"data": base64.b64encode(raw).decode(), "eof": eof}
        await self._ask("input", fields, timeout=CALL_SECONDS)

    async def signal(self, number: int = signal.SIGINT) -> None:
        """Send a signal to the command that runs, if any. SIGINT also ends what the shell itself does."""
        await self._ask("signal", {"number": int(number)}, timeout=CALL_SECONDS)

    async def close(self) -> None:
        """End the shell and everything that it started. A second call does nothing."""
        with suppress(ProcessLookupError):
            await self._box.call("DELETE", f"/shells/{self.id}", timeout=CALL_SECONDS)

    async def _result(self, what: str, fields: dict[str, Any]) -> ShellResult:
        fields = {**fields, "encoding": "base64"}
        timeout, limit = fields["timeout"] + GRACE_SECONDS, 2 * fields["max_output_bytes"] + 65_536
        answer = await self._ask(what, fields, timeout=timeout, max_body_bytes=limit)
        try:
            result = msgspec.json.decode(answer.body, type=ShellResult)
        except msgspec.MsgspecError as error:
            self._box.lose(f"nonsense: {error}")
        if result.exit_code is not None and not 0 <= result.exit_code <= 255:
            self._box.lose(f"nonsense: exit code {result.exit_code}")
        return result

    async def _ask(
        self, what: str, fields: dict[str, Any], *, timeout: float, max_body_bytes: int = 65_536
    ) -> Answer:
        body = encode({"request_id": secrets.token_hex(8), **fields})
        return await self._box.call(
            "POST",
            f"/shells/{self.id}/{what}",
            body,
            timeout=timeout,
            max_body_bytes=max_body_bytes,
        )


def _patience(
    timeout: float, max_output_bytes: int, on_timeout: OnTimeout, quiet: float | None
) -> dict[str, Any]:
    return {
        "timeout": timeout,
        "max_output_bytes": min(max_output_bytes, MAX_OUTPUT_BYTES),
        "on_timeout": on_timeout,
        "quiet": quiet,
    }


async def open_shell(
    box: Calls,
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    pty: bool,
    rows: int,
    columns: int,
) -> Shell:
    """See `rljob.claimed_sandbox.ClaimedSandbox.shell`. Raises ChildProcessError where the shell does not start."""
    fields = {"request_id": secrets.token_hex(8), "cwd": cwd or "", "env": dict(env or {})}
    screen = {"pty": pty, "rows": rows, "cols": columns}
    answer = await box.call("POST", "/shells", encode({**fields, **screen}), timeout=CALL_SECONDS)
    try:
        opened = msgspec.json.decode(answer.body, type=_Opened)
    except msgspec.MsgspecError as error:
        box.lose(f"nonsense: {error}")
    if not opened.shell_id.isalnum() or len(opened.shell_id) > 64:
        box.lose("nonsense: a shell's name")
    return Shell(box, opened.shell_id, opened.pid)


@asynccontextmanager
async def shell(
    box: Calls,
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    pty: bool,
    rows: int,
    columns: int,
) -> AsyncIterator[Shell]:
    """`open_shell` on entry, `close` on exit."""
    opened = await open_shell(box, cwd=cwd, env=env, pty=pty, rows=rows, columns=columns)
    try:
        yield opened
    finally:
        # A sandbox that is lost or given back has ended its shells.
        with suppress(SandboxError):
            await opened.close()
