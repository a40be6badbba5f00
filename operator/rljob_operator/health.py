"""Health as the kubelet asks for it, served by a thread so that a loop that hangs cannot hide.

| path | 200 | 503 |
| --- | --- | --- |
| `/healthz` | loop beats, watches are heard (a standby has none) | says what is wrong: the container is restarted |
| `/readyz` | leads with its copies complete, or stands by | starting, stopping |
| `/metrics` | always | |
"""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from rljob.errors import MachineError

LOOP_SECONDS = 30.0
"""An event loop that did nothing for so long hangs."""
REQUEST_SECONDS = 10.0


class Health:
    """What is known of this process; set from the event loop, read by the server's threads."""

    def __init__(self) -> None:
        self.ready = False
        self.problem = ""
        """What is wrong with the watches; empty: nothing."""
        self._beat = time.monotonic()

    def beat(self) -> None:
        """The loop is alive."""
        self._beat = time.monotonic()

    def trouble(self) -> str:
        """What is wrong now; empty: nothing."""
        silent = time.monotonic() - self._beat
        if silent > LOOP_SECONDS:
            return f"the event loop did nothing for {silent:.0f} s"
        return self.problem


class HealthServer:
    """Serves until `close`. A context manager. Raises MachineError where the port is taken."""

    def __init__(self, health: Health, host: str, port: int) -> None:
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            problem = f"cannot serve health and metrics: {error.strerror}"
            raise MachineError(
                f"{host}:{port}", problem, "free the port or choose another"
            ) from None
        self._server.health = health
        self.port = self._server.server_port
        threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="health", daemon=True
        ).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    health: Health


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        health = self.server.health
        match self.path.partition("?")[0]:
            case "/healthz":
                self._say(health.trouble())
            case "/readyz":
                self._say("" if health.ready else "not ready yet, or stopping")
            case "/metrics":
                from prometheus_client import REGISTRY
                from prometheus_client.exposition import choose_encoder

                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, content_type, encode(REGISTRY))
            case _:
                self._answer(404, "text/plain", b"only /healthz, /readyz and /metrics are here\n")

    def _say(self, problem: str) -> None:
        self._answer(503 if problem else 200, "text/plain", f"{problem or 'ok'}\n".encode())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes are not events."""
