"""One child process that leaves nothing behind, however it or its parent ends.

    driver ─► bwrap (own pid namespace, dies with the driver) ─► namespace's init ─► component ─► …
    driver ─► shim ─► pool manager ─► bwrap per sandbox

The component gets SIGTERM itself (bwrap does not pass signals on); SIGKILL goes to the namespace's init, whose end
takes every process inside along before anybody sees it gone, so that ports and files are free for the next start.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_operator.drivers.folder import pid_start_time

CONTAIN = (
    "bwrap",
    "--dev-bind",
    "/",
    "/",
    "--unshare-pid",
    "--proc",
    "/proc",
    "--die-with-parent",
    "--",
)
"""What every component but the pool manager is started with; the doctor tries the same."""

_TAIL_BYTES = 64 * 1024
_SHIM_KILL_SECONDS = 5.0
_GONE_SECONDS, _GONE_TRIES = 0.005, 2000


class Process:
    """A running contained child. Make it with `start`, in the main thread: the kernel ties its life to that thread."""

    def __init__(
        self, process: asyncio.subprocess.Process, log: Path, log_start: int, *, shimmed: bool
    ) -> None:
        self._process, self._log, self._log_start, self._shimmed = process, log, log_start, shimmed
        self._init: tuple[int, int] | None = None
        """Pid and start time of the namespace's init."""

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cwd: Path,
        *,
        makes_namespaces: bool = False,
    ) -> Process:
        """Start `argv` with its output appended to `log`.

        Raises:
            OSError: bubblewrap cannot be started.
        """
        shim = (sys.executable, "-m", "rljob_operator.drivers.shim", str(os.getpid()), "--")
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(shim if makes_namespaces else CONTAIN),
                *argv,
                env=dict(env),
                cwd=cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the driver alone
            )
            return cls(process, log, output.tell(), shimmed=makes_namespaces)

    @property
    def pid(self) -> int:
        """Of the component itself; that of its wrapper while it is still starting."""
        return self._inner() or self._process.pid

    async def wait(self) -> int:
        """The exit code; 128 + signal where a signal ended it. Afterwards nothing of it is left."""
        await self._find_init()
        code = await self._process.wait()
        # bwrap ends as soon as it knows the exit code, a moment before its namespace is empty
        for _ in range(_GONE_TRIES):
            if self._init is None or pid_start_time(self._init[0]) != self._init[1]:
                break
            await asyncio.sleep(_GONE_SECONDS)
        return code if code >= 0 else 128 - code

    async def _find_init(self) -> None:
        """Note the namespace's init (a shimmed process has none), unless all has ended already."""
        while not self._shimmed and self._init is None and self._process.returncode is None:
            pid = _first_child(self._process.pid)
            if pid is not None and (start := pid_start_time(pid)) is not None:
                self._init = pid, start
            else:
                await asyncio.sleep(_GONE_SECONDS)

    def terminate(self) -> None:
        """Ask it to end well."""
        _signal(self._process.pid if self._shimmed else self.pid, signal.SIGTERM)

    async def kill(self) -> None:
        """End it and everything it started, now."""
        if self._process.returncode is not None:
            return
        if self._shimmed:
            _signal(self._process.pid, signal.SIGQUIT)
            try:
                async with asyncio.timeout(_SHIM_KILL_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                _signal(self._process.pid, signal.SIGKILL)
        else:
            await self._find_init()
            _signal(self._init[0] if self._init else self._process.pid, signal.SIGKILL)
        await self.wait()

    async def stop(self, grace_seconds: float) -> int:
        """`terminate`, and `kill` what has not ended by then."""
        await self._find_init()
        if self._process.returncode is None:
            self.terminate()
            try:
                async with asyncio.timeout(grace_seconds):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()
        return await self.wait()

    def last_lines(self, count: int = 1) -> list[str]:
        """The last non-empty lines that this start wrote."""
        return tail(self._log, count, since=self._log_start)

    def _inner(self) -> int | None:
        first = _first_child(self._process.pid)
        return first if first is None or self._shimmed else _first_child(first)


def tail(log: Path, count: int, since: int = 0) -> list[str]:
    """The last `count` non-empty lines of a log file, not looking before byte `since`."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def _first_child(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has just ended by itself
