"""Routes of commands; those of shells are `shell_routes`.

    POST /exec    {request_id, command, cwd, env, stdin, timeout, max_output_bytes, stream, encoding}

With `stream` the answer is lines of JSON as the output comes, {"stream": "stdout" or "stderr", "data": base64}, and at
last {"result": …}. Who hangs up ends the command. It is not repeated under its request id: that is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from rljob_sandbox_pool.guest import checks, shell_routes
from rljob_sandbox_pool.guest.claims import Claim
from rljob_sandbox_pool.guest.routes import Guest, Reply, Routes
from rljob_sandbox_pool.guest.shell_routes import ShellsBackend
from rljob_sandbox_pool.guest.stream import Stream
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response, answer


class CommandsBackend(ShellsBackend, Protocol):
    """What runs commands."""

    def execute(
        self,
        command: checks.Command,
        done: Callable[[dict[str, Any]], None],
        stream: Stream | None = None,
    ) -> None:
        """Run a command; `done` gets the fields of `rljob.sandbox.ExecResult`. Raises RefusedError.

        With a stream the output goes there, in lines of JSON.
        """
        ...


def routes(guest: Guest, backend: CommandsBackend) -> Routes:
    """The routes of commands and of shells."""
    commands = _Commands(guest, backend)
    return {("POST", "/exec"): commands.execute, **shell_routes.routes(guest, backend)}


class _Commands:
    def __init__(self, guest: Guest, backend: CommandsBackend) -> None:
        self._guest, self._backend = guest, backend

    def execute(self, request: Request, reply: Reply) -> None:
        claim = self._guest.owner(request)
        body = checks.json_object(request.body)
        command = checks.command(body, dict(claim.env))
        if not command.streamed:
            self._guest.once(body, reply, lambda done: self._run(claim, command, done))
            return
        is_first = False

        def refuse_repeats(done: Reply) -> None:
            nonlocal is_first
            is_first = True
            words = "a streamed command is answered once"
            done(RefusedError(409, "streamed", words).response())

        self._guest.once(body, lambda kept: None if is_first else reply(kept), refuse_repeats)
        if is_first:
            self._stream(claim, command, reply)

    def _run(self, claim: Claim, command: checks.Command, done: Reply) -> None:
        def finished(result: dict[str, Any]) -> None:
            self._guest.ran(result)
            # A command that outlived its claim has nobody to tell.
            if self._guest.holds(claim):
                done(answer(result))

        self._guest.counts["execs"] += 1
        self._backend.execute(command, finished)

    def _stream(self, claim: Claim, command: checks.Command, reply: Reply) -> None:
        stream = Stream()

        def finished(result: dict[str, Any]) -> None:
            self._guest.ran(result)
            if held := self._guest.holds(claim):
                stream.push(json.dumps({"result": result}).encode() + b"\n")
            stream.end(broken=not held)

        self._guest.counts["execs"] += 1
        self._backend.execute(command, finished, stream)
        reply(Response(200, b"", "application/x-ndjson", stream=stream))
