"""Routes of commands.

POST /exec    {request_id, command, cwd, env, stdin, timeout, max_output_bytes}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.guest.claims import Claim
from rljob_sandbox_pool.guest.routes import Guest, Reply, Routes
from rljob_sandbox_pool.guest.wire import Request, answer


class CommandsBackend(Protocol):
    """What runs commands."""

    def execute(self, command: checks.Command, done: Callable[[dict[str, Any]], None]) -> None:
        """Run a command; `done` gets the fields of `rljob.sandbox.ExecResult`. Raises RefusedError."""
        ...


def routes(guest: Guest, backend: CommandsBackend) -> Routes:
    """The routes of commands."""
    commands = _Commands(guest, backend)
    return {("POST", "/exec"): commands.execute}


class _Commands:
    def __init__(self, guest: Guest, backend: CommandsBackend) -> None:
        self._guest, self._backend = guest, backend

    def execute(self, request: Request, reply: Reply) -> None:
        claim = self._guest.owner(request)
        body = checks.json_object(request.body)
        command = checks.command(body, dict(claim.env))
        self._guest.once(body, reply, lambda done: self._run(claim, command, done))

    def _run(self, claim: Claim, command: checks.Command, done: Reply) -> None:
        def finished(result: dict[str, Any]) -> None:
            self._guest.counts["timeouts"] += bool(result["timed_out"])
            # A command that outlived its claim has nobody to tell.
            if self._guest.holds(claim):
                done(answer(result))

        self._guest.counts["execs"] += 1
        self._backend.execute(command, finished)
