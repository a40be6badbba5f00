"""Routes of files, archives and tunnels.

GET  /files     ?path=&max_bytes=, with &offset= a part of it
PUT  /files     a line of JSON {request_id, files: [{path, bytes, mode, append, final, mtime_ns}]}, then their bytes
GET  /archive   ?path=&max_bytes= → tar; with &after= in parts: x-rljob-next says after what the next one begins
PUT  /archive   ?path= tar, unpacked below path
POST /tunnel    {port} → 101: the connection carries what connects to that port inside (see `tunnel`)
"""

from __future__ import annotations

from typing import Protocol
from urllib.parse import quote

from rljob_sandbox_pool.guest import checks
from rljob_sandbox_pool.guest.archives import MAX_ARCHIVE_BYTES, Archives
from rljob_sandbox_pool.guest.os_errors import refusal_of
from rljob_sandbox_pool.guest.pack import Packed
from rljob_sandbox_pool.guest.routes import Guest, Reply, Routes
from rljob_sandbox_pool.guest.tunnels import Tunnels
from rljob_sandbox_pool.guest.wire import RefusedError, Request, Response, answer


class FilesBackend(Protocol):
    """What holds files."""

    def read_file(self, path: str, max_bytes: int, offset: int | None) -> bytes:
        """Raises OSError, RefusedError."""
        ...

    def write_file(self, file: checks.NewFile) -> None:
        """Raises OSError."""
        ...

    @property
    def archives(self) -> Archives | None:
        """None where there can be none."""
        ...

    @property
    def tunnels(self) -> Tunnels | None:
        """None where there can be none."""
        ...


def routes(guest: Guest, backend: FilesBackend) -> Routes:
    """The routes of files."""
    transfers = _Transfers(guest, backend)
    return {
        ("GET", "/files"): transfers.get_file,
        ("PUT", "/files"): transfers.put_files,
        ("GET", "/archive"): transfers.get_archive,
        ("PUT", "/archive"): transfers.put_archive,
        ("POST", "/tunnel"): transfers.open_tunnel,
    }


class _Transfers:
    def __init__(self, guest: Guest, backend: FilesBackend) -> None:
        self._guest, self._backend = guest, backend

    def get_file(self, request: Request, reply: Reply) -> None:
        self._guest.owner(request)
        max_bytes = _number(request, "max_bytes", 10_000_000, checks.MAX_FILE_BYTES)
        offset = _number(request, "offset", 0, 1 << 62) if "offset" in request.query else None
        data = self._backend.read_file(checks.path(dict(request.query)), max_bytes, offset)
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

    def get_archive(self, request: Request, reply: Reply) -> None:
        self._guest.owner(request)
        path = checks.path(dict(request.query))
        max_bytes = _number(request, "max_bytes", MAX_ARCHIVE_BYTES, MAX_ARCHIVE_BYTES)
        self._archives.pack(
            path,
            max_bytes,
            request.query.get("after"),
            lambda packed: send_packed(packed, reply),
            lambda error: _refuse(reply, error),
        )

    def put_archive(self, request: Request, reply: Reply) -> None:
        # Unpacking the same again comes to the same: no request id is needed.
        self._guest.owner(request)
        path = checks.path(dict(request.query))
        if len(request.body) > checks.MAX_FILE_BYTES:
            limit = checks.MAX_FILE_BYTES
            raise RefusedError(413, "too_large", f"an archive is at most {limit} bytes")
        self._archives.unpack(
            path,
            request.body,
            lambda num: reply(answer({"members": num})),
            lambda error: _refuse(reply, error),
        )

    def open_tunnel(self, request: Request, reply: Reply) -> None:
        self._guest.owner(request)
        if self._backend.tunnels is None:
            raise _nowhere("tunnels")
        body = checks.json_object(request.body)
        port = int(checks.number(body, "port", 0, 0, 65_535))
        tunnel = self._backend.tunnels.listen(port, self._guest.touch)
        upgrade = (("upgrade", "rljob-tunnel"),)
        reply(Response(101, b"", headers=upgrade, upgrade=tunnel.start))

    @property
    def _archives(self) -> Archives:
        if self._backend.archives is None:
            raise _nowhere("archives")
        return self._backend.archives


def send_packed(packed: Packed, reply: Reply) -> None:
    """An archive as the answer."""
    headers = [("x-rljob-kind", "folder" if packed.is_folder else "file")]
    if packed.next is not None:
        headers.append(("x-rljob-next", quote(packed.next, errors="surrogateescape")))
    reply(Response(200, packed.data, "application/x-tar", tuple(headers)))


def _nowhere(what: str) -> RefusedError:
    return RefusedError(501, "not_here", f"this kind of sandbox has no {what}")


def _refuse(reply: Reply, error: RefusedError | OSError) -> None:
    reply((refusal_of(error) if isinstance(error, OSError) else error).response())


def _number(request: Request, name: str, default: int, high: int) -> int:
    text = request.query.get(name, "")
    is_number = text.isascii() and text.isdigit() and len(text) < 20
    return min(int(text), high) if is_number else default
