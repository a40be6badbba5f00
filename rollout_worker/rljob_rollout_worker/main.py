"""The rollout worker: `python -m rljob_rollout_worker.main`.

SIGTERM drains (`drainSeconds`), a second one hands everything back at once. Ends with 0 when the
job is over or it has drained, 2 for bad input (the last line of stderr says what), 3 when another
process has taken its name, 1 for anything else: then the driver restarts it, its new boot id
forfeits the leases of the old one, and its sandboxes are given back. One of the latter is an event loop that plugin
code has blocked for RLJOB_WORKER_STALL_SECONDS (120; 0: never), see `watchdog`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from rljob import telemetry
from rljob.clock import SystemClock
from rljob.errors import FencedError, RLJobError, UserError
from rljob.gateway import GatewayClient, SessionChat
from rljob.ids import new_boot_id
from rljob.ledger import Ledger, LedgerConfig
from rljob.sandbox_client import SandboxClient
from rljob.settings import Settings
from rljob_rollout_worker.engine_agent import EngineAgent
from rljob_rollout_worker.prompts import load_manifest
from rljob_rollout_worker.watchdog import Watchdog, stall_seconds
from rljob_rollout_worker.worker import Parts, Worker

STORE_SECONDS = 120.0
"""How long the store may take to appear at the start."""
EXIT_CRASH, EXIT_FENCED = 1, 3

_log = structlog.get_logger("rljob.worker")


async def run(settings: Settings) -> None:
    """Build a worker from its environment and run it to its end. Raises RLJobError."""
    job, artifacts = settings.job(), Path(settings.artifacts)
    data = load_manifest(artifacts).worked_on
    worker, boot_id, clock = settings.component, new_boot_id(), SystemClock()
    async with AsyncExitStack() as stack:
        ledger = await Ledger.connect(
            settings.redis_url, job.ledger_name, deadline_seconds=STORE_SECONDS
        )
        stack.push_async_callback(ledger.aclose)
        broker = SandboxClient(
            settings.broker_url, settings.token, job.name, owner=worker, boot_id=boot_id
        )
        stack.push_async_callback(broker.aclose)
        gateway = GatewayClient(settings.gateway_control_url, settings.gateway_url, settings.token)
        stack.push_async_callback(gateway.aclose)
        # the same rows and rules as everybody else's, or ManifestError
        await ledger.initialise(LedgerConfig.from_job(job, data.rows, data.sha256))
        await ledger.open_worker(worker, boot_id)
        engine = EngineAgent(settings, ledger, worker=worker, boot_id=boot_id)
        parts = Parts(
            job=job,
            worker=worker,
            boot_id=boot_id,
            artifacts=artifacts,
            search_path=settings.manifest_dir,
            ledger=ledger,
            broker=broker,
            gateway=gateway,
            chat=SessionChat,
            engine=engine,
            clock=clock,
        )
        running = Worker(parts)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.stop)
        with Watchdog(stall_seconds(), running.doing):
            await running.run()
            if settings.stay:
                await running.stopped()


def main() -> int:
    """Exit code of the process."""
    try:
        settings = Settings.from_env()
        settings.make_folders()
        telemetry.configure_logging(settings.component)
        with telemetry.serve(settings):
            asyncio.run(run(settings))
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the driver shows the last line
        return error.exit_code
    except FencedError as error:
        _log.error("fenced", reason=str(error))
        return EXIT_FENCED
    except RLJobError as error:
        _log.error("worker_failed", kind=type(error).__name__, reason=str(error))
        return EXIT_CRASH
    return 0


if __name__ == "__main__":
    sys.exit(main())
