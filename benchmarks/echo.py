"""The least that a broker could do: a bare asyncio HTTP server that answers with what it was sent. Prints its port."""

from __future__ import annotations

import asyncio
import re
import sys

_LENGTH = re.compile(rb"content-length: (\d+)")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            body = await reader.readexactly(int(length[1])) if length else b""
        except (asyncio.IncompleteReadError, ConnectionError):
            break
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await asyncio.to_thread(sys.stdin.read)  # until whoever started it lets go


if __name__ == "__main__":
    asyncio.run(_serve())
