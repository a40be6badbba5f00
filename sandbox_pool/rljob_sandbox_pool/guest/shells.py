"""All shells of a sandbox, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_sandbox_pool.guest.children import Children
from rljob_sandbox_pool.guest.loop import Loop
from rljob_sandbox_pool.guest.shell import Shell
from rljob_sandbox_pool.guest.shell_process import Terminal
from rljob_sandbox_pool.guest.wire import RefusedError

MAX_SHELLS = 16
MAX_ENDED = 64
"""Shells that have ended are known until they are closed, the last so many of them."""


class Shells:
    """Opens, finds and ends shells."""

    def __init__(self, loop: Loop, children: Children) -> None:
        self._loop, self._children = loop, children
        self._shells: dict[str, Shell] = {}
        self._num_opened = 0

    def open(
        self,
        cwd: str,
        env: dict[str, str],
        terminal: Terminal | None,
        started: Callable[[str, str | None], None],
    ) -> None:
        """`started` gets its name and why it does not start, if so. Raises RefusedError, OSError."""
        ended = [name for name, shell in self._shells.items() if shell.exit_code is not None]
        if len(self._shells) - len(ended) >= MAX_SHELLS:
            raise RefusedError(429, "busy", f"{MAX_SHELLS} shells are open")
        for name in ended[:-MAX_ENDED]:
            del self._shells[name]
        self._num_opened += 1
        name = f"s{self._num_opened}"

        def done(complaint: str | None) -> None:
            if complaint is not None:
                self._shells.pop(name, None)
            started(name, complaint)

        self._shells[name] = Shell(self._loop, self._children, cwd, env, terminal, done)

    def get(self, name: str) -> Shell:
        """Raises RefusedError."""
        if (shell := self._shells.get(name)) is None:
            raise RefusedError(404, "no_shell", f"there is no shell {name[:100]}")
        return shell

    def close(self, name: str) -> None:
        """End a shell and what it started. Raises RefusedError."""
        self.get(name).close()
        del self._shells[name]

    def facts(self) -> list[dict[str, Any]]:
        """What `GET /shells` tells."""
        return [
            {
                "shell_id": name,
                "pid": shell.pid,
                "pty": shell.has_terminal,
                "alive": shell.exit_code is None,
                "running": shell.running,
                "exit_code": shell.exit_code,
            }
            for name, shell in self._shells.items()
        ]

    def is_busy(self) -> bool:
        """Whether a command of a shell runs."""
        return any(shell.running for shell in self._shells.values())

    def clear(self) -> None:
        """After every process has been killed: there are none."""
        for shell in self._shells.values():
            shell.close()
        self._shells.clear()
