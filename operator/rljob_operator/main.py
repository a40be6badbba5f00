"""The operator in a cluster: `python -m rljob_operator.main --config FILE`.

kopf tells of RLJobs, and of nothing else; its handlers only wake. Everything that it is told lies in `configure`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import structlog

from rljob.errors import UserError
from rljob.kube import config as kube_config
from rljob.kube.config import KubeConfig
from rljob.kube.resources import RLJOB
from rljob.telemetry import configure_logging
from rljob_operator.config import load_config, load_key
from rljob_operator.process import Hear, JobWatch, OperatorProcess, Options

FAILED_EXIT_CODE = 1
_log = structlog.get_logger("rljob.operator")


class Forever:
    """Pauses between kopf's tries: it must never give up, since then its watch would end."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0, 5.0)
        while True:
            yield 10.0


def configure(settings: kopf.OperatorSettings) -> None:
    """Every number and name that kopf is given."""
    # The server ends a watch after so long, and kopf watches again: no connection lives for ever.
    settings.watching.server_timeout = 290
    # If the server's end was lost on the way.
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 5
    # A bookmark comes every minute; a watch without one is dead.
    settings.watching.inactivity_timeout = 90
    # Pages of the first list.
    settings.watching.chunk_size = 200
    # After a watch ended, so that a server that ends them at once is not flooded.
    settings.watching.reconnect_backoff = 0.5
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = Forever()
    # Our objects are ours: with event handlers alone kopf writes neither annotations nor finalizers. Should a later
    # kopf write, then under names that tell whose they are. The finalizer of rljob is put on by the reconcile.
    settings.persistence.finalizer = "kopf.rljob.dev/unused"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(
        prefix="kopf.rljob.dev", v1=False
    )
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(
        prefix="kopf.rljob.dev", v1=False
    )
    # Events are posted by the reconcile, on transitions only.
    settings.posting.enabled = False
    # No watch of CRDs and namespaces: it would need rights in the whole cluster.
    settings.scanning.disabled = True
    # Of a handler's queue when kopf ends.
    settings.queueing.exit_timeout = 1.0
    # The end of the process is decided in process.py.
    settings.process.ultimate_exiting_timeout = None


def handlers(hear: Hear, kube: KubeConfig) -> kopf.OperatorRegistry:
    """What kopf calls."""
    registry = kopf.OperatorRegistry()

    @kopf.on.event(RLJOB.group, RLJOB.version, RLJOB.plural, registry=registry)
    async def rljob_changed(event: Any, **_: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        hear(event["type"], dict(event["object"]))

    @kopf.on.login(registry=registry, errors=kopf.ErrorsMode.TEMPORARY, backoff=5.0)
    async def login(**_: Any) -> kopf.AiohttpSession:  # pyright: ignore[reportUnusedFunction]
        return kopf.AiohttpSession(server=kube.server, aiohttp_session=session(kube))

    return registry


def session(kube: KubeConfig) -> aiohttp.ClientSession:
    """An aiohttp session with our identity. kopf logs in again when the server no longer takes its token."""
    headers = {"Authorization": f"Bearer {kube.token()}"} if kube.token else {}
    connector = aiohttp.TCPConnector(limit=0, ssl=kube.tls if kube.tls is not None else True)
    return aiohttp.ClientSession(connector=connector, headers=headers)


class KopfThread:
    """kopf in a thread and loop of its own: at its end it cancels every task of the loop it runs in.

    Args:
        hear: Called in the loop that calls `run`.
        kube: The API server.
        namespaces: Those to watch; empty: all.
    """

    def __init__(self, hear: Hear, kube: KubeConfig, namespaces: Sequence[str]) -> None:
        self._hear, self._kube, self._namespaces = hear, kube, namespaces
        self._flag = threading.Event()

    async def run(self) -> None:
        """See `JobWatch.run`."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = loop.create_future()

        def hear(kind: str | None, job: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(self._hear, kind, job)

        def body() -> None:
            error: BaseException | None = None
            try:
                asyncio.run(self._operator(hear))
            except BaseException as caught:  # noqa: BLE001 (told to the loop that waits for it)
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: ended.done() or ended.set_result(error))

        threading.Thread(target=body, name="kopf", daemon=True).start()
        if error := await ended:
            raise RuntimeError(f"kopf ended: {error!r}") from error

    def stop(self) -> None:
        """See `JobWatch.stop`."""
        self._flag.set()

    async def _operator(self, hear: Hear) -> None:
        settings = kopf.OperatorSettings()
        configure(settings)
        await kopf.operator(
            registry=handlers(hear, self._kube),
            settings=settings,
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._flag,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop. Returns the exit code: 2 for what whoever installed it must mend."""
    given = _parse(arguments)
    try:
        config = load_config(given.config)
        key = load_key(given.keys, "broker_key")
        kube = kube_config.load()
        configure_logging("operator", level=given.log_level)
        # It says that it installs no signal handlers in a thread; that is meant.
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
        options = Options(config, key, _identity(), given.host, given.port)

        def watch(hear: Hear) -> JobWatch:
            return KopfThread(hear, kube, config.namespaces)

        return asyncio.run(_run(options, kube, watch))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except Exception:  # noqa: BLE001 (the end of the process, with its reason)
        _log.exception("operator_ended")
        return FAILED_EXIT_CODE


async def _run(options: Options, kube: KubeConfig, watch: Any) -> int:
    return await OperatorProcess(options, kube, watch).run()


def _identity() -> str:
    """Unique for each start: a process that was killed must not be mistaken for its successor."""
    name = os.environ.get("POD_NAME") or socket.gethostname()
    return f"{name}_{os.urandom(4).hex()}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rljob-operator", description="The operator of rljob.")
    parser.add_argument("--config", type=Path, default=Path("/etc/rljob/operator.yaml"))
    parser.add_argument("--keys", type=Path, default=Path("/etc/rljob/keys"), help="folder of keys")
    parser.add_argument("--host", default="0.0.0.0", help="health and metrics")
    parser.add_argument("--port", type=int, default=8081, help="health and metrics")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING"])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
