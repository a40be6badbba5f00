"""Entry point of the pool manager in a cluster: `python -m rljob_sandbox_pool.cluster --config FILE`.

    stand by ── Lease ──► lead: list, adopt, serve claims, keep pools warm ── SIGTERM ──► let go: sandboxes stay
                                 │                                                        release the Lease, 0
                                 └── Lease lost, a loop failed, a watch silent ──► end with 1: the next start stands by

One is active; the Service finds it by a label that it puts on its own pod. Both answer /readyz.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import structlog

from rljob import telemetry
from rljob.errors import UserError
from rljob.kube import config as kube_config
from rljob.kube.client import KubeClient
from rljob.kube.errors import KubeError
from rljob.kube.lease import LeaderLease, LeaseLostError
from rljob.kube.resources import POD
from rljob.settings import Settings
from rljob_sandbox_pool.broker import Tenant, make_server
from rljob_sandbox_pool.cluster_config import (
    ACTIVE,
    LEASE_NAME,
    Identity,
    PoolManagerConfig,
    load,
    read_key,
)
from rljob_sandbox_pool.fleet import Fleet

SILENT_SECONDS = 300.0
"""A watch that has been silent for so long ends the process."""
_log = structlog.get_logger("rljob.sandbox_pool")


class PoolManager:
    """See the picture above, and `broker.Directory`.

    Args:
        kube: Whom to ask.
        lease_kube: Whom to ask about the Lease, on connections of its own: no pile of calls may keep it from being
            renewed.
        config: The configuration file.
        identity: Which pod this is.
    """

    def __init__(
        self,
        kube: KubeClient,
        lease_kube: KubeClient,
        config: PoolManagerConfig,
        identity: Identity,
    ) -> None:
        name = identity.pod or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._lease = LeaderLease(lease_kube, config.operator_namespace, LEASE_NAME, name)
        self.fleet = Fleet(
            kube,
            config,
            broker_key=read_key(config, "broker_key"),
            pool_key=read_key(config, "pool_key"),
            host=identity.ip,
            leads=lambda: self._lease.leads,
        )
        self._kube, self._config, self._identity = kube, config, identity
        self._serves = False
        self._unready = "the API server was not reached yet"
        self._server = make_server(self)

    def tenant(self, token: str) -> Tenant | None:
        """See `broker.Directory`."""
        return self.fleet.tenant(token)

    def standby(self) -> str:
        """See `broker.Directory`."""
        return "" if self._serves and self._lease.leads else "another pool manager serves claims"

    def unready(self) -> str:
        """See `broker.Directory`."""
        return self._unready

    def problem(self) -> str:
        """For /healthz: what only a restart could cure."""
        if not self._serves or (age := self.fleet.age_seconds()) < SILENT_SECONDS:
            return ""
        return f"the API server was not heard for {age:.0f} s"

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises MachineError; ExceptionGroup: LeaseLostError, or what a loop failed of."""
        self._server.bind(self._config.bind_host, self._config.port)
        await self._server.listen()
        stopped = asyncio.create_task(stop.wait())
        work = asyncio.create_task(self._lead())
        try:
            await asyncio.wait({stopped, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (stopped, work):
                task.cancel()
            await asyncio.gather(stopped, work, return_exceptions=True)
            await self._let_go()

    async def _lead(self) -> None:
        await self._label_self(active=False)
        self._unready = ""
        await self._lease.acquire()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lease.hold())
            await self.fleet.start()
            self._serves = True
            # Before the label, which may take long: what the fleet fails of ends us in any case.
            group.create_task(self.fleet.run())
            group.create_task(self._watch_silence())
            await self._label_self(active=True)

    async def _watch_silence(self) -> None:
        while not (problem := self.problem()):
            await asyncio.sleep(5.0)
        raise TimeoutError(problem)

    async def _label_self(self, *, active: bool) -> None:
        """Until it is done: without the label nobody finds the broker, with it on two pods half of the claims wait."""
        if not self._identity.pod:
            return
        patch = {"metadata": {"labels": {ACTIVE: "true" if active else None}}}
        while True:
            try:
                await self._kube.patch(POD, self._identity.pod, patch, self._identity.namespace)
            except KubeError as error:
                _log.warning("own_pod_not_labelled", reason=str(error))
                await asyncio.sleep(1.0)
            else:
                return

    async def _let_go(self) -> None:
        """Sandboxes stay, with their claims; whoever leads next adopts them."""
        self._serves = False
        self._server.stop()
        await self.fleet.detach()
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self._lease.release()


async def serve(config: PoolManagerConfig) -> None:
    """Run until SIGTERM. Raises UserError; ExceptionGroup with whatever else ended it."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = kube_config.load()
    kube = KubeClient(server, user_agent="rljob-sandbox-pool")
    lease_kube = KubeClient(server, user_agent="rljob-sandbox-pool-lease")
    manager = PoolManager(kube, lease_kube, config, Identity.from_env())
    settings = Settings(
        component="sandbox-pool",
        job_file="",
        artifacts="",
        work_dir="",
        bind_host=config.bind_host,
        metrics_port=config.metrics_port,
    )
    try:
        with telemetry.serve(settings, manager.problem):
            await manager.run(stop)
    finally:
        await kube.aclose()
        await lease_kube.aclose()
        _log.info("ended")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 after SIGTERM, 2 for what only an administrator can put right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m rljob_sandbox_pool.cluster")
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args(argv)
    telemetry.configure_logging("sandbox-pool")
    try:
        asyncio.run(serve(load(arguments.config)))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except ExceptionGroup as failed:
        for error in failed.exceptions:
            _log.error("failed", reason=repr(error), exc_info=not isinstance(error, LeaseLostError))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
