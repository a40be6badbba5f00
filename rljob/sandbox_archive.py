"""Files and folders between this machine and a claimed sandbox, of any size, in bounded steps.

    await upload(box, Path("repo"), "/workspace/repo")          a folder's content into a folder
    await upload(box, Path("a.bin"), "/workspace/a.bin")        a file to a file
    await download(box, "/workspace/out", Path("out"))          the other way

Modes, times, links and hard links are kept. A tree travels as archives of at most 4 MiB; a file that fits into none
travels in parts beside its place and is put there whole.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

from rljob.claimed_sandbox import ClaimedSandbox
from rljob.errors import SandboxError
from rljob.http1 import Answer
from rljob.sandbox_tar import (
    BLOCK,
    MAX_DEPTH,
    Member,
    NonsenseError,
    leads_outside,
    members,
    parts_of,
)
from rljob.sandbox_unpack import Downloaded, Target
from rljob.sandbox_wire import encode

ARCHIVE_BYTES = 4 * 1024 * 1024
"""Largest archive sent: a guest holds it twice, and has 64 MiB."""
PART_BYTES = 4 * 1024 * 1024
"""Largest archive asked for, and largest part of a file either way."""
MAX_DOWNLOAD_BYTES = 4 * 1024**3
MAX_DOWNLOAD_FILES = 500_000
CALL_SECONDS = 120.0
_MAX_MEMBERS = 16_384
_NANO = 10**9


@dataclass(frozen=True)
class _Large:
    """A file that fits into no archive."""

    path: Path
    parts: tuple[str, ...]
    info: os.stat_result


async def upload(box: ClaimedSandbox, local: Path, remote: str) -> None:
    """Copy a file to the file `remote`, or a folder's content into the folder `remote`. What is missing there is made.

    Raises:
        ValueError: something there is neither file, folder nor link, or a link leads out of the folder.
        OSError: it cannot be read here, or written there (no space, permission).
        SandboxError: the sandbox is lost.
    """
    if await asyncio.to_thread(local.is_dir):
        pieces = _pieces(local)
        # What is read from this machine's disk is read beside the event loop.
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            if isinstance(piece, _Large):
                await _send_large(box, piece, "/".join((remote.rstrip("/") or "/", *piece.parts)))
            else:
                target = "/archive?" + _query(path=remote)
                await box.call("PUT", target, piece, timeout=CALL_SECONDS)
        return
    info = await asyncio.to_thread(local.stat)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"{local} is neither a file nor a folder")
    await _send_large(box, _Large(local, (), info), remote)


def _query(**fields: object) -> str:
    return urlencode(fields, errors="surrogateescape")


async def _send_large(box: ClaimedSandbox, large: _Large, remote: str) -> None:
    """In parts, beside its place, then renamed; at once where it is small."""
    facts = {
        "mode": stat.S_IMODE(large.info.st_mode) & 0o777,
        "mtime_ns": large.info.st_mtime_ns,
    }
    if large.info.st_size <= PART_BYTES:
        data = await asyncio.to_thread(large.path.read_bytes)
        await _put(box, {"path": remote, **facts}, data)
        return
    folder, _, name = remote.rpartition("/")
    partial = f"{folder}/" if folder or remote.startswith("/") else ""
    partial += f".rljob-{secrets.token_hex(6)}-{name[:100]}"
    try:
        await _send_parts(box, large, partial, {"final": remote, **facts})
    except BaseException:
        with suppress(OSError, ValueError, SandboxError):
            await box.write_file(partial, b"")  # of no use, but small
        raise


async def _send_parts(
    box: ClaimedSandbox, large: _Large, partial: str, last: dict[str, Any]
) -> None:
    left = large.info.st_size
    file = await asyncio.to_thread(large.path.open, "rb")
    try:
        while left:
            data = await asyncio.to_thread(file.read, min(PART_BYTES, left))
            if not data:
                raise ValueError(f"{large.path} became shorter while it was read")
            left -= len(data)
            head = {"path": partial, "mode": 0o600, "append": True}
            await _put(box, head if left else head | last, data)
    finally:
        await asyncio.to_thread(file.close)


async def _put(box: ClaimedSandbox, head: dict[str, Any], data: bytes) -> None:
    files = [{**head, "bytes": len(data)}]
    line = encode({"request_id": secrets.token_hex(8), "files": files})
    await box.call("PUT", "/files", line + b"\n" + data, timeout=CALL_SECONDS)


@dataclass
class _Archive:
    """One on its way."""

    blocks: list[bytes] = field(default_factory=list)
    num_bytes: int = 2 * BLOCK
    num_members: int = 0

    def add(self, *blocks: bytes) -> None:
        self.blocks += blocks
        self.num_bytes += sum(map(len, blocks))
        self.num_members += 1

    def take(self) -> bytes:
        data = b"".join([*self.blocks, bytes(2 * BLOCK)])
        self.blocks.clear()
        self.num_bytes, self.num_members = 2 * BLOCK, 0
        return data


def _pieces(root: Path) -> Iterator[bytes | _Large]:
    """Archives and large files, which in this order are the folder."""
    archive = _Archive()
    first: dict[tuple[int, int], str] = {}
    for path, parts, info in _walk(root, ()):
        known = first.get((info.st_dev, info.st_ino)) if stat.S_ISREG(info.st_mode) else None
        size = info.st_size if stat.S_ISREG(info.st_mode) and known is None else 0
        room = ARCHIVE_BYTES - 32 * BLOCK
        if archive.num_members >= _MAX_MEMBERS or (
            archive.num_members and archive.num_bytes + size > room
        ):
            yield archive.take()
        if size > room:
            if archive.num_members:
                yield archive.take()
            yield _Large(path, parts, info)
        else:
            archive.add(*_blocks(path, parts, info, known, size))
        if stat.S_ISREG(info.st_mode) and info.st_nlink > 1 and known is None:
            first[info.st_dev, info.st_ino] = "/".join(parts)
    yield archive.take()


def _walk(
    folder: Path, parts: tuple[str, ...]
) -> Iterator[tuple[Path, tuple[str, ...], os.stat_result]]:
    """Folders after what they hold: one that nobody may write into is closed last."""
    if len(parts) >= MAX_DEPTH:
        raise ValueError(f"{str(folder)[:200]}…: deeper than {MAX_DEPTH} folders")
    for path in sorted(folder.iterdir()):
        info = path.lstat()
        if stat.S_ISDIR(info.st_mode):
            yield from _walk(path, (*parts, path.name))
        yield path, (*parts, path.name), info


def _blocks(
    path: Path, parts: tuple[str, ...], info: os.stat_result, known: str | None, size: int
) -> list[bytes]:
    member = tarfile.TarInfo("/".join(parts))
    member.mode, member.size = stat.S_IMODE(info.st_mode) & 0o777, size
    member.mtime, fraction = divmod(max(0, info.st_mtime_ns), _NANO)
    if fraction:
        member.pax_headers = {"mtime": f"{member.mtime}.{fraction:09d}"}
    data = b""
    if stat.S_ISDIR(info.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
        if leads_outside(len(parts) - 1, member.linkname):
            raise ValueError(f"{path} leads out of the folder, to {member.linkname}")
    elif not stat.S_ISREG(info.st_mode):
        raise ValueError(f"{path} is neither a file, a folder nor a link")
    elif known is not None:
        member.type, member.linkname = tarfile.LNKTYPE, known
    else:
        with path.open("rb") as file:
            data = file.read(size)
        if len(data) < size:
            raise ValueError(f"{path} became shorter while it was read")
    head = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return [head, data, bytes(-size % BLOCK)]


async def download(
    box: ClaimedSandbox,
    remote: str,
    local: Path,
    *,
    max_bytes: int = MAX_DOWNLOAD_BYTES,
) -> Downloaded:
    """Copy the file `remote` to the file `local`, or a folder's content into the folder `local`.

    Nothing is written anywhere else, whatever the sandbox sends: names lead down, links on the way are not followed,
    links that would lead out are left out.

    Args:
        box: A claimed sandbox.
        remote: Path in the sandbox.
        local: Path here; its parents are made.
        max_bytes: Of all files together.

    Raises:
        ValueError: it is larger than that.
        OSError: it cannot be read there, or written here.
        SandboxError: the sandbox is lost, or sends nonsense.
    """
    budget = _Budget(max_bytes, MAX_DOWNLOAD_FILES)
    after: str | None = ""
    target: Target | None = None
    try:
        while after is not None:
            answer = await _ask(box, remote, after)
            is_folder = answer.headers.get("x-rljob-kind") == "folder"
            if target is None:
                target = await asyncio.to_thread(Target, local, is_folder=is_folder)
            later = _later(box, answer.headers.get("x-rljob-next"), after)
            budget.spend(0)
            large = await _unpacked(target, answer.body, budget)
            for member in large:
                where = (
                    "/".join((remote.rstrip("/") or "/", *member.parts)) if is_folder else remote
                )
                await _fetch_large(box, target, member, where)
            after = later
        assert target is not None
        return await asyncio.to_thread(target.finish)
    except NonsenseError as error:
        box.lose(f"nonsense: {error}")
    finally:
        if target is not None:
            target.close()


async def _ask(box: ClaimedSandbox, remote: str, after: str) -> Answer:
    query = _query(path=remote, max_bytes=PART_BYTES, after=after)
    most = PART_BYTES + BLOCK
    return await box.call("GET", f"/archive?{query}", timeout=CALL_SECONDS, max_body_bytes=most)


@dataclass
class _Budget:
    """What may still come."""

    num_bytes: int
    num_files: int

    def spend(self, num_bytes: int) -> None:
        """For a member, and for each archive."""
        self.num_bytes -= num_bytes
        self.num_files -= 1
        if self.num_bytes < 0 or self.num_files < 0:
            raise ValueError("the sandbox holds more than was to be copied")


def _later(box: ClaimedSandbox, told: str | None, after: str) -> str | None:
    """After what the next part begins: always later, or a sandbox could go on for ever."""
    if told is None:
        return None
    later = unquote(told, errors="surrogateescape")
    try:
        is_later = not after or parts_of(later) > parts_of(after)
    except NonsenseError:
        is_later = False
    if not is_later:
        box.lose("nonsense: an archive whose parts do not come in order")
    return later


async def _unpacked(target: Target, archive: bytes, budget: _Budget) -> list[Member]:
    """Write what an archive holds; returns the members whose content is not in it."""

    def work() -> list[Member]:
        large: list[Member] = []
        for member in members(archive):
            budget.spend(len(member.data) + (member.large or 0))
            if member.large is None:
                target.make(member)
            else:
                large.append(member)
        return large

    return await asyncio.to_thread(work)


async def _fetch_large(box: ClaimedSandbox, target: Target, member: Member, remote: str) -> None:
    assert member.large is not None
    with target.new_file(member) as file:
        while file.num_bytes < member.large:
            num = min(PART_BYTES, member.large - file.num_bytes)
            query = _query(path=remote, offset=file.num_bytes, max_bytes=num)
            answer = await box.call(
                "GET", f"/files?{query}", timeout=CALL_SECONDS, max_body_bytes=num
            )
            if not answer.body:
                raise SandboxError(f"sandbox {box.id}: {remote} became shorter while it was read")
            await asyncio.to_thread(file.write, answer.body)
