"""SWE-ReX's local runtime as a comparator. It is no dependency of ours: it lives in a virtual environment of its own.

here ── a line: way, command, number ─► its interpreter ─► LocalRuntime          milliseconds of each ◄── a line
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

VERSION = "1.4.0"
INSTALL_SECONDS = 180
HOME = Path("~/.cache/rljob/bench").expanduser() / f"swe-rex-{VERSION}"
WAYS = ("execute", "session")
"""A process for each command; a line for a shell that is there."""
_DRIVER = """
import asyncio, json, logging, shlex, sys, time
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime

SESSION = CreateBashSessionRequest(startup_timeout=10)

async def run(runtime, way, argv):
    began = time.perf_counter()
    if way == "execute":
        await runtime.execute(Command(command=argv, check=True))
    else:
        await runtime.run_in_session(BashAction(command=shlex.join(argv)))
    return 1000 * (time.perf_counter() - began)

async def main():
    runtime = LocalRuntime()
    await runtime.create_session(SESSION)
    for line in sys.stdin:
        way, argv, number = json.loads(line)
        times = []
        for _ in range(number):
            try:
                times.append(await run(runtime, way, argv))
            except Exception:
                await runtime.close()
                runtime = LocalRuntime()
                await runtime.create_session(SESSION)
        print(json.dumps(times), flush=True)
    await runtime.close()

logging.disable()
asyncio.run(main())
"""


class Driver:
    """Its interpreter, waiting for lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._input, self._output = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

    def way(self, name: str) -> Callable[[Sequence[str], int], Awaitable[list[float]]]:
        """Runs a command so many times, one of `WAYS`; gives the milliseconds of each that succeeded.

        On a busy machine a session fails by a limit of its own: its prompt must come back within 0.1 s.
        """

        async def run(argv: Sequence[str], number: int) -> list[float]:
            return await asyncio.to_thread(self._ask, [name, list(argv), number])

        return run

    def _ask(self, question: list[object]) -> list[float]:
        self._input.write(json.dumps(question) + "\n")
        self._input.flush()
        if not (line := self._output.readline()):
            raise RuntimeError("SWE-ReX ended; see its words above")
        return json.loads(line)


@contextmanager
def driver() -> Iterator[Driver | None]:
    """Installed if need be; None, and a line on stderr, where that fails."""
    if reason := _why_not_installed():
        print(f"benchmarks: SWE-ReX: left out: {reason}", file=sys.stderr, flush=True)
        yield None
        return
    argv = [str(HOME / "bin" / "python"), "-c", _DRIVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Driver(process)
        finally:
            process.terminate()


def _why_not_installed() -> str:
    if (HOME / "installed").exists():
        return ""
    beside = Path(__file__).parents[1] / ".uv-venv" / "bin" / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        return "there is no uv (make install)"
    python = HOME / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    for argv in (
        [uv, "venv", "-q", "--clear", "--python", sys.executable, str(HOME)],
        [uv, "pip", "install", "-q", "--python", str(python), f"swe-rex=={VERSION}"],
    ):
        try:
            done = subprocess.run(
                argv,
                env=env,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            return " ".join(done.stderr.split())[-300:]
    (HOME / "installed").touch()
    return ""
