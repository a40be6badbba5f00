"""Routes of files.

GET  /files     ?path=&max_bytes=
PUT  /files     a line of JSON {request_id, files: [{path, bytes, mode}]}, then the files' bytes
"""

from __future__ import annotations

from typing import Protocol

from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.guest.routes import Guest, Reply, Routes
from rljob_sandbox_pool.guest.wire import Request, Response, answer


class FilesBackend(Protocol):
    """What holds files."""

    def read_file(self, path: str, max_bytes: int) -> bytes:
        """Raises OSError, RefusedError."""
        ...

    def write_file(self, file: checks.NewFile) -> None:
        """Raises OSError."""
        ...


def routes(guest: Guest, backend: FilesBackend) -> Routes:
    """The routes of files."""
    transfers = _Transfers(guest, backend)
    return {("GET", "/files"): transfers.get_file, ("PUT", "/files"): transfers.put_files}


class _Transfers:
    def __init__(self, guest: Guest, backend: FilesBackend) -> None:
        self._guest, self._backend = guest, backend

    def get_file(self, request: Request, reply: Reply) -> None:
        self._guest.owner(request)
        limit = request.query.get("max_bytes", "")
        max_bytes = (
            min(int(limit), checks.MAX_FILE_BYTES)
            if limit.isascii() and limit.isdigit()
            else 10_000_000
        )
        data = self._backend.read_file(checks.path(dict(request.query)), max_bytes)
        reply(Response(200, data, "application/octet-stream"))

    def put_files(self, request: Request, reply: Reply) -> None:
        self._guest.owner(request)
        head, newline, _ = request.body.partition(b"\n")
        body = checks.json_object(head)
        files = checks.new_files(body, memoryview(request.body)[len(head) + len(newline) :])

        def write(done: Reply) -> None:
            for file in files:
                self._backend.write_file(file)
            done(answer({"files": len(files)}))

        self._guest.once(body, reply, write)
