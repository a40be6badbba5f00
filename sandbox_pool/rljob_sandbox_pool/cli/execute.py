"""`rljob sandbox exec`: a command in a claimed sandbox; its output and its exit code are ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rljob.errors import UserError
from rljob_sandbox_pool.cli.arguments import environment, in_range
from rljob_sandbox_pool.cli.claims import MAX_SECONDS
from rljob_sandbox_pool.cli.state import State
from rljob_sandbox_pool.cli.where import call, connect

MAX_STDIN_BYTES = 24 * 1024 * 1024
MAX_OUTPUT_BYTES = 4_000_000


def main(
    state: State,
    name: str,
    command: Sequence[str],
    *,
    timeout: float,
    env: Sequence[str],
    cwd: str | None,
    with_stdin: bool,
) -> int:
    """Run it; the exit code. Raises UserError."""
    in_range("--timeout", timeout, 0.1, MAX_SECONDS)
    if not command:
        raise UserError("exec", "there is no command", "write it after --: exec CLAIM -- ls -l")
    stored = state.claim(name)
    variables = environment(env)
    stdin = _stdin() if with_stdin else b""

    async def work() -> int:
        async with connect(stored.where) as client:
            box = client.attach(stored.claim)
            try:
                result = await box.exec(
                    command,
                    cwd=cwd,
                    env=variables,
                    stdin=stdin,
                    timeout=timeout,
                    max_output_bytes=MAX_OUTPUT_BYTES,
                )
            finally:
                await box.aclose()
        sys.stdout.write(result.stdout)
        sys.stderr.write(result.stderr)
        return result.exit_code

    return call(work)


def _stdin() -> bytes:
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise UserError("stdin", f"more than {MAX_STDIN_BYTES} bytes", "copy it with cp first")
    return data
