"""`python -m rljob_services.gateway`: both ports in one process, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette

from rljob import telemetry
from rljob.clock import SystemClock
from rljob.engine import EngineClient
from rljob.errors import MachineError, UserError
from rljob.settings import Settings
from rljob_services.gateway.app import control_app, data_app
from rljob_services.gateway.session import Service
from rljob_services.gateway.sessions import Sessions
from rljob_services.gateway.template import load_template
from rljob_services.gateway.transport import PoolTransport
from rljob_services.gateway.turn import ReadyGate

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection of a client stays open."""
SHUTDOWN_SECONDS = 5
BACKLOG = 2048

log = telemetry.get_logger()


def main() -> int:
    """Run the component; its exit code."""
    telemetry.configure_logging("gateway")
    try:
        settings = Settings.from_env()
        settings.make_folders()
        new_loop = uvicorn.Config("", log_config=None).get_loop_factory()  # uvloop's, if there
        with telemetry.serve(settings), asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve(settings))
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the driver shows the last line
        return error.exit_code
    return 0


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises UserError when the model or a port is unusable."""
    template = load_template(Path(settings.artifacts) / "prepared" / "model")
    if not template.can_continue:
        log.warning("template_not_continuable", effect="every turn becomes a chain of its own")
    clock = SystemClock()
    transport = PoolTransport(settings.engine_url)
    async with EngineClient(settings.engine_url, settings.token, transport=transport) as engine:
        gate = ReadyGate(engine, clock)
        sessions = Sessions(Service(template, engine, gate, clock))
        servers = [
            _Server(data_app(sessions, "policy"), settings.bind_host, settings.gateway_url),
            _Server(
                control_app(sessions, settings.token),
                settings.bind_host,
                settings.gateway_control_url,
            ),
        ]
        _stop_on_signals(servers)
        log.info(
            "gateway_ready",
            boot_id=sessions.boot_id,
            data=settings.gateway_url,
            control=settings.gateway_control_url,
        )
        await _run(servers, sessions)
        await gate.aclose()


async def _run(servers: list[_Server], sessions: Sessions) -> None:
    """Until the servers end; a sweeper or a server that ends by itself ends the process."""
    sweeper = asyncio.create_task(sessions.sweep_loop())
    running = [asyncio.create_task(server.serve()) for server in servers]
    done, _ = await asyncio.wait([sweeper, *running], return_when=asyncio.FIRST_COMPLETED)
    for server in servers:
        server.should_exit = True
    await sessions.aclose()
    await asyncio.gather(*running)
    if sweeper in done:
        sweeper.result()
    sweeper.cancel()


class _Server(uvicorn.Server):
    """One port. It leaves the process's signals to `serve`: there are two of them."""

    def __init__(self, app: Starlette, host: str, url: str) -> None:
        port = urlsplit(url).port
        try:
            self._socket = socket.create_server((host, port or 0), backlog=BACKLOG)
        except OSError as error:
            raise MachineError(
                f"{host}:{port}", f"cannot listen: {error.strerror}", "free the port or pin another"
            ) from None
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve(sockets or [self._socket])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stop_on_signals(servers: list[_Server]) -> None:
    def stop() -> None:
        for server in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


if __name__ == "__main__":
    sys.exit(main())
