"""Routes of shells, which keep their folder, environment, functions and jobs from command to command.

POST   /shells              {request_id, cwd, env, pty, rows, cols} → {shell_id, pid}
GET    /shells              → {shells: [{shell_id, pid, pty, alive, running, exit_code}]}
POST   /shells/{id}/run     {request_id, command, timeout, max_output_bytes, on_timeout, quiet, encoding}
                            → {output, exit_code, timed_out, truncated, alive, running}
POST   /shells/{id}/wait    the same without a command: more of one that was left running
POST   /shells/{id}/input   {request_id, data, eof} → {}
POST   /shells/{id}/signal  {request_id, number} → {sent}
DELETE /shells/{id}         ends the shell and what it started → {}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.guest.claims import Claim
from rljob_sandbox_pool.guest.pipes import encoded
from rljob_sandbox_pool.guest.routes import Guest, Reply, Routes
from rljob_sandbox_pool.guest.shell import Done, Patience, Shell
from rljob_sandbox_pool.guest.shell_process import Terminal
from rljob_sandbox_pool.guest.shells import Shells
from rljob_sandbox_pool.guest.wire import RefusedError, Request, answer

MAX_SIGNAL = 64
MAX_SCREEN = 1000
"""Rows and columns of a terminal."""


class ShellsBackend(Protocol):
    """What holds shells."""

    @property
    def shells(self) -> Shells | None:
        """None where there can be none."""
        ...


def routes(guest: Guest, backend: ShellsBackend) -> Routes:
    """The routes of shells."""
    shells = _ShellRoutes(guest, backend)
    return {
        ("POST", "/shells"): shells.open,
        ("GET", "/shells"): shells.list,
        ("POST", "/shells/{id}/run"): shells.run,
        ("POST", "/shells/{id}/wait"): shells.wait,
        ("POST", "/shells/{id}/input"): shells.input,
        ("POST", "/shells/{id}/signal"): shells.signal,
        ("DELETE", "/shells/{id}"): shells.close,
    }


class _ShellRoutes:
    def __init__(self, guest: Guest, backend: ShellsBackend) -> None:
        self._guest, self._backend = guest, backend

    @property
    def _shells(self) -> Shells:
        if self._backend.shells is None:
            raise RefusedError(501, "no_shells", "this kind of sandbox has no shells")
        return self._backend.shells

    def open(self, request: Request, reply: Reply) -> None:
        claim = self._guest.owner(request)
        body = checks.json_object(request.body)
        cwd = checks.file_name(checks.text(body, "cwd", "", checks.MAX_PATH_CHARACTERS))
        env = {**claim.env, **checks.environment(body.get("env", {}))}
        rows, columns = (
            int(checks.number(body, name, default, 1, MAX_SCREEN))
            for name, default in (("rows", 24), ("cols", 80))
        )
        terminal = Terminal(rows, columns) if checks.flag(body, "pty") else None

        def start(done: Reply) -> None:
            def started(name: str, complaint: str | None) -> None:
                if not self._guest.holds(claim):
                    return
                if complaint is None:
                    done(answer({"shell_id": name, "pid": self._shells.get(name).pid}))
                else:
                    done(RefusedError(409, "shell_failed", complaint[:1000]).response())

            self._guest.counts["shells"] += 1
            self._shells.open(cwd, env, terminal, started)

        self._guest.once(body, reply, start)

    def list(self, request: Request, reply: Reply) -> None:
        self._guest.owner(request)
        reply(answer({"shells": self._shells.facts()}))

    def run(self, request: Request, reply: Reply) -> None:
        claim = self._guest.owner(request)
        body = checks.json_object(request.body)
        command = checks.text(body, "command", limit=checks.MAX_COMMAND_CHARACTERS)
        patience = _patience(body, "interrupt")

        def run(shell: Shell, done: Done) -> None:
            self._guest.counts["shell_commands"] += 1
            shell.run(command, patience, done)

        self._await(claim, request.id, body, reply, run)

    def wait(self, request: Request, reply: Reply) -> None:
        claim = self._guest.owner(request)
        body = checks.json_object(request.body)
        patience = _patience(body, "leave")
        wait = lambda shell, done: shell.wait(patience, done)  # noqa: E731
        self._await(claim, request.id, body, reply, wait)

    def _await(
        self,
        claim: Claim,
        name: str,
        body: dict[str, Any],
        reply: Reply,
        ask: Callable[[Shell, Done], None],
    ) -> None:
        """Ask a shell for a result, and answer with it."""
        encoding = checks.choice(body, "encoding", ("text", "base64"))

        def begin(done: Reply) -> None:
            def finished(result: dict[str, Any]) -> None:
                self._guest.ran(result)
                if self._guest.holds(claim):
                    done(answer({**result, "output": encoded(result["output"], encoding)}))

            ask(self._shells.get(name), finished)

        self._guest.once(body, reply, begin)

    def input(self, request: Request, reply: Reply) -> None:
        self._guest.owner(request)
        body = checks.json_object(request.body)
        data, ends = checks.data(body, "data"), checks.flag(body, "eof")

        def send(done: Reply) -> None:
            self._shells.get(request.id).input(data, ends=ends)
            done(answer({}))

        self._guest.once(body, reply, send)

    def signal(self, request: Request, reply: Reply) -> None:
        self._guest.owner(request)
        body = checks.json_object(request.body)
        number = int(checks.number(body, "number", 0, 0, MAX_SIGNAL))
        if number < 1:
            raise checks.bad(f"number is a signal, 1 to {MAX_SIGNAL}")

        def send(done: Reply) -> None:
            done(answer({"sent": self._shells.get(request.id).signal(number)}))

        self._guest.once(body, reply, send)

    def close(self, request: Request, reply: Reply) -> None:
        self._guest.owner(request)
        self._shells.close(request.id)
        reply(answer({}))


def _patience(body: dict[str, Any], on_timeout: str) -> Patience:
    others = ("interrupt", "leave")
    choice = checks.choice({"on_timeout": on_timeout, **body}, "on_timeout", others)
    quiet = body.get("quiet")
    return Patience(
        timeout_seconds=checks.number(body, "timeout", 60.0, 0.0, checks.MAX_TTL_SECONDS),
        max_output_bytes=int(
            checks.number(body, "max_output_bytes", 1e6, 0, checks.MAX_OUTPUT_BYTES)
        ),
        leave=choice == "leave",
        quiet_seconds=None
        if quiet is None
        else checks.number(body, "quiet", 0.0, 0.01, checks.MAX_TTL_SECONDS),
    )
