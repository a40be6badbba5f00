"""Sockets at which something can be reached, as the kernel lists them."""

from __future__ import annotations

import os

_TABLES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""By protocol: the state of a socket that waits for anybody."""
_ACCEPTS = 0x10000
"""A flag of a Unix socket that takes connections."""
_MAX_BYTES = 4_000_000


def listeners() -> frozenset[str]:
    """In words, such as `tcp port 8080`."""
    found: set[str] = set()
    for protocol, waiting in _TABLES.items():
        for fields in _table(protocol):
            if len(fields) > 3 and fields[3] == waiting:
                port = fields[1].rpartition(":")[2]
                found.add(f"{protocol} port {int(port, 16)}")
    for fields in _table("unix"):
        if len(fields) > 7 or (len(fields) > 6 and int(fields[3], 16) & _ACCEPTS):
            found.add(f"unix {fields[7] if len(fields) > 7 else 'without a name'}")
    return frozenset(found)


def _table(name: str) -> list[list[str]]:
    try:
        fd = os.open(f"/proc/net/{name}", os.O_RDONLY)
    except OSError:
        return []
    try:
        data = b""
        while len(data) < _MAX_BYTES and (more := os.read(fd, 65_536)):
            data += more
    finally:
        os.close(fd)
    return [line.split() for line in data.decode("utf-8", "replace").splitlines()[1:]]
