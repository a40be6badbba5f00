"""The pool manager: `python -m rljob_sandbox_pool.main`, wired by `rljob.settings.Settings`.

    manifest ─► pools (keep_warm_loop each) ◄─ broker ◄─ workers            SIGTERM ─► every sandbox ended ─► exit 0

A loop that ends is an error and ends the process; its sandboxes die with it (`bwrap --die-with-parent`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from rljob import telemetry
from rljob.api.rljob_types import SandboxPool
from rljob.errors import UserError
from rljob.settings import Settings
from rljob_sandbox_pool.aserver import HttpServer
from rljob_sandbox_pool.broker import Broker
from rljob_sandbox_pool.pool import Pool
from rljob_sandbox_pool.runtimes.base import Runtime

_log = structlog.get_logger("rljob.sandbox_pool")


def make_runtimes(pools: list[SandboxPool], work_dir: Path) -> dict[str, Runtime]:
    """One runtime of each kind that the pools name. Raises MachineError."""
    from rljob_sandbox_pool.runtimes.bubblewrap import BubblewrapRuntime
    from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime

    makers = {"bubblewrap": lambda: BubblewrapRuntime(work_dir), "simulated": SimulatedRuntime}
    return {kind: makers[kind]() for kind in sorted({pool.runtime for pool in pools})}


async def serve(settings: Settings) -> None:
    """Run until SIGTERM. Raises MachineError; ExceptionGroup where a loop failed."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    specs = settings.job().spec.sandbox_pools
    runtimes = make_runtimes(specs, Path(settings.work_dir))
    pools = {spec.name: Pool(spec, runtimes[spec.runtime], settings.pool_key) for spec in specs}
    server = HttpServer(Broker(pools, settings.token).handle)
    port = server.bind(settings.bind_host, urlsplit(settings.broker_url).port or 0)
    await server.listen()
    try:
        with telemetry.serve(settings):
            _log.info("serving", port=port, pools=",".join(pools))
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(pool.keep_warm_loop()) for pool in pools.values()]
                await stop.wait()
                for loop in loops:
                    loop.cancel()
    finally:
        server.stop()
        for pool in pools.values():
            await pool.close()
        for runtime in runtimes.values():
            runtime.close()
        _log.info("ended")


def main() -> None:
    """Entry point."""
    try:
        settings = Settings.from_env()
        telemetry.configure_logging(settings.component)
        asyncio.run(serve(settings))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
