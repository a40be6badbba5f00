"""`rljob sandbox serve`: a pool manager of this machine in the foreground; Ctrl-C ends it and every sandbox.

Its token is that of RLJOB_SANDBOX_TOKEN, else a new one at each start.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path

from rljob import telemetry
from rljob.api.load import validate
from rljob.api.load_pools import load_pools
from rljob.api.sandboxpool_types import SandboxPool
from rljob.api.source import Source
from rljob.errors import UserError
from rljob.sandbox_client import TOKEN_ENV
from rljob_sandbox_pool.cli.arguments import is_token
from rljob_sandbox_pool.cli.state import Served, State
from rljob_sandbox_pool.manager import Manager, make_runtimes

HOST = "127.0.0.1"


def main(
    file: Path | None,
    *,
    name: str | None,
    warm: int | None,
    maximum: int | None,
    port: int,
    state: State,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Raises UserError."""
    if not 0 <= port <= 65_535:
        raise UserError("--port", f"{port} is no port", "use 1 to 65535, or 0 for any free one")
    pools = _pools(file, name, warm, maximum)
    token = os.environ.get(TOKEN_ENV) or secrets.token_urlsafe(32)
    if not is_token(token):
        raise UserError(
            TOKEN_ENV, "holds what no token does", "use letters and digits, or unset it"
        )
    with state.serving():
        telemetry.configure_logging("sandbox-pool")
        asyncio.run(_serve(pools, state, port, token))
        for claim, stored in state.claims().items():
            if stored.where.token == token:
                state.forget(claim)


def _pools(
    file: Path | None, name: str | None, warm: int | None, maximum: int | None
) -> list[SandboxPool]:
    given = {"--name": name, "--warm": warm, "--max": maximum}
    if file is not None:
        if extra := next((key for key, value in given.items() if value is not None), None):
            raise UserError(extra, "has no effect beside a file", "write it into the file")
        return load_pools(file)
    warm = 2 if warm is None else warm
    values = {
        "name": "default" if name is None else name,
        "warm": warm,
        "max": max(4, warm) if maximum is None else maximum,
    }
    return [validate(Source("serve", values, {}), SandboxPool)]


async def _serve(pools: list[SandboxPool], state: State, port: int, token: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runtimes = make_runtimes(pools, state.work)
    manager = Manager(pools, runtimes, token=token, pool_key=secrets.token_hex(32))
    try:
        address = await manager.start(HOST, port)
        state.tell(Served(address, token, os.getpid()))
        names = ", ".join(manager.pools)
        sys.stdout.write(
            f"serving {names} on {address}; rljob sandbox claim {pools[0].name} takes a sandbox\n"
        )
        sys.stdout.flush()
        await manager.run(stop)
    finally:
        await manager.close()
