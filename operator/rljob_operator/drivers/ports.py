"""Free ports outside the range from which the kernel takes ports for outgoing connections.

A component that restarts must get its port back; a port from the ephemeral range might meanwhile serve somebody's
outgoing connection.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST, _HIGHEST = 15_000, 31_999
_TRIES = 200


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True


def pick(taken: set[int], host: str = "127.0.0.1") -> int:
    """A free port that is not in `taken`; adds it there.

    Raises:
        OSError: none was found.
    """
    low, high = _outside_ephemeral()
    for _ in range(_TRIES):
        port = random.randint(low, high)
        if port not in taken and is_free(port, host):
            taken.add(port)
            return port
    raise OSError(f"no free port between {low} and {high}")


def _outside_ephemeral() -> tuple[int, int]:
    try:
        start, end = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return _LOWEST, _HIGHEST
    if start > _LOWEST + 2000:
        return _LOWEST, min(_HIGHEST, start - 1)
    return (end + 1, 65_535) if end < 63_000 else (_LOWEST, _HIGHEST)
