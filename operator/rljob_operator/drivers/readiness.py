"""Whether a component answers: one question over loopback, no client library."""

from __future__ import annotations

import asyncio

from rljob_operator.render.component import Probe

_TIMEOUT_SECONDS = 2.0


async def answers(probe: Probe, host: str, port: int, secret: str) -> bool:
    """Ask once. `secret` is the bearer token (http) or the password (redis)."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            return await _ask(probe, host, port, secret)
    except (OSError, TimeoutError, ValueError):  # ValueError: a line without end
        return False


async def _ask(probe: Probe, host: str, port: int, secret: str) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if probe.scheme == "redis":
            writer.write(f"AUTH {secret}\r\nPING\r\n".encode())
            await reader.readline()
            return (await reader.readline()).startswith(b"+PONG")
        head = [f"GET {probe.path} HTTP/1.1", f"Host: {host}", "Connection: close"]
        head += [f"Authorization: Bearer {secret}", "", ""]
        writer.write("\r\n".join(head).encode())
        status = (await reader.readline()).split()
        return len(status) > 1 and status[1] == b"200"
    finally:
        writer.close()
