"""Entry point of the pool manager: `python -m rljob_sandbox_pool.main`, wired by `rljob.settings.Settings`.

SIGTERM ends every sandbox, then the process (0). Killed, it takes its sandboxes with it: each ends with the pipe whose
other end this process holds.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from rljob import telemetry
from rljob.errors import UserError
from rljob.settings import Settings
from rljob_sandbox_pool.manager import Manager, make_runtimes

_log = structlog.get_logger("rljob.sandbox_pool")


async def serve(settings: Settings) -> None:
    """Run until SIGTERM. Raises MachineError."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    specs = settings.job().spec.sandbox_pools
    runtimes = make_runtimes(specs, Path(settings.work_dir))
    manager = Manager(specs, runtimes, token=settings.token, pool_key=settings.pool_key)
    try:
        with telemetry.serve(settings, manager.problem):
            address = await manager.start(
                settings.bind_host, urlsplit(settings.broker_url).port or 0
            )
            limits = {name: runtime.limits() for name, runtime in runtimes.items()}
            _log.info("serving", address=address, pools=",".join(manager.pools), limits=limits)
            await manager.run(stop)
    finally:
        await manager.close()
        _log.info("ended")


def main() -> None:
    """Run; a `UserError` is one line and exit code 2."""
    try:
        settings = Settings.from_env()
        telemetry.configure_logging(settings.component)
        asyncio.run(serve(settings))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
