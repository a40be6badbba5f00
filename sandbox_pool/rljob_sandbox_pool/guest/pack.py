"""A folder, or a file, as a tar archive: whole, or in parts that fit.

A generator: a little work, then `yield`, so that the guest's one thread does other things between. What commands change
meanwhile is in it or not; the archive is one in any case.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tarfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rljob_sandbox_pool.guest.archive import MAX_MEMBERS, Parts
from rljob_sandbox_pool.guest.folders import FOLDER, MAX_DEPTH, READ, named
from rljob_sandbox_pool.guest.wire import RefusedError

LARGE = "RLJOB.size"
"""A pax header: the member is empty here, and its content of so many bytes is to be read otherwise."""
_NANO = 10**9


class Packed(NamedTuple):
    """An archive, or a part of one."""

    data: bytes
    is_folder: bool
    next: str | None
    """After which name the next part begins; None: this is the last."""


def pack(
    path: str, max_bytes: int, after: str | None, forbidden_device: int
) -> Generator[None, None, Packed]:
    """What lies at `path`: a folder's content by names below it, or one file by its own name.

    Args:
        path: A folder or a file.
        max_bytes: Of the archive.
        after: In parts: what fits behind this name (empty: from the start), and files that fit into none as `LARGE`.
            None: all in one.
        forbidden_device: A file system of which nothing is read.

    Raises:
        RefusedError: it does not fit.
        OSError: something cannot be read.
    """
    # Non-blocking, so that a pipe in its place does not stop the guest.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        info = os.fstat(fd)
        packing = _Packing(max_bytes, after, forbidden_device)
        if stat.S_ISDIR(info.st_mode):
            yield from packing.folder(fd, ())
        elif stat.S_ISREG(info.st_mode) and info.st_dev != forbidden_device:
            packing.file(fd, (os.path.basename(os.path.normpath(path)),), info)
        else:
            raise PermissionError(errno.EACCES, "neither a file nor a folder", path)
        data = b"".join([*packing.blocks, bytes(2 * tarfile.BLOCKSIZE)])
        return Packed(data, stat.S_ISDIR(info.st_mode), packing.next)
    finally:
        os.close(fd)


@dataclass
class _Packing:
    max_bytes: int
    after: str | None
    forbidden_device: int
    blocks: list[bytes] = field(default_factory=list)
    next: str | None = None
    _num_bytes: int = 0
    _last: Parts = ()
    _links: dict[tuple[int, int], str] = field(default_factory=dict)

    def folder(self, at: int, parts: Parts) -> Iterator[None]:
        """What it holds, in the order of the names' parts."""
        if len(parts) >= MAX_DEPTH:
            raise RefusedError(413, "too_large", f"deeper than {MAX_DEPTH} folders")
        after = tuple(self.after.split("/")) if self.after else ()
        for name in _names(at):
            inner = (*parts, name)
            is_due = inner >= after or inner == after[: len(inner)]
            if is_due and self._entry(at, name, inner, is_done=inner <= after):
                yield from self._inner(at, name, inner)
            if self.next is not None:
                return
            yield

    def _entry(self, at: int, name: str, parts: Parts, *, is_done: bool) -> bool:
        """One of its entries; whether it is a folder to go into."""
        try:
            info = os.stat(name, dir_fd=at, follow_symlinks=False)
            if info.st_dev == self.forbidden_device:
                return False
            if stat.S_ISDIR(info.st_mode):
                return is_done or self._add(parts, info, tarfile.DIRTYPE)
            if stat.S_ISLNK(info.st_mode) and not is_done:
                self._add(parts, info, tarfile.SYMTYPE, os.readlink(name, dir_fd=at))
            elif stat.S_ISREG(info.st_mode) and not is_done:
                self._open_file(at, name, parts)
        except OSError as error:
            _unless_gone(error, parts)
        return False

    def _inner(self, at: int, name: str, parts: Parts) -> Iterator[None]:
        try:
            inner = os.open(name, FOLDER, dir_fd=at)
        except OSError as error:
            _unless_gone(error, parts)
            return
        try:
            yield from self.folder(inner, parts)
        finally:
            os.close(inner)

    def _open_file(self, at: int, name: str, parts: Parts) -> None:
        fd = os.open(name, READ, dir_fd=at)
        try:
            info = os.fstat(fd)
            first = self._links.get((info.st_dev, info.st_ino)) if info.st_nlink > 1 else None
            if first is not None:
                self._add(parts, info, tarfile.LNKTYPE, first)
            elif stat.S_ISREG(info.st_mode):
                self.file(fd, parts, info)
        finally:
            os.close(fd)

    def file(self, fd: int, parts: Parts, info: os.stat_result) -> None:
        """A regular file, as long as it is now: what it grows meanwhile is left, what it shrinks is zeros."""
        size = info.st_size
        # Half, so that whatever is not large fits with its names.
        is_large = self.after is not None and size > self.max_bytes // 2
        if not self._add(parts, info, tarfile.REGTYPE, size=size, is_large=is_large) or is_large:
            return
        if info.st_nlink > 1:
            self._links[info.st_dev, info.st_ino] = "/".join(parts)
        left = size
        while left and (data := os.read(fd, min(left, 1 << 20))):
            self.blocks.append(data)
            left -= len(data)
        self.blocks.append(bytes(left + -size % tarfile.BLOCKSIZE))

    def _add(
        self,
        parts: Parts,
        info: os.stat_result,
        kind: bytes,
        link: str = "",
        *,
        size: int = 0,
        is_large: bool = False,
    ) -> bool:
        """The head of a member; False where it has to wait for the next part."""
        member = tarfile.TarInfo("/".join(parts))
        member.type, member.linkname, member.size = kind, link, 0 if is_large else size
        member.mode = stat.S_IMODE(info.st_mode) & 0o777
        member.mtime, fraction = divmod(max(0, info.st_mtime_ns), _NANO)
        more = {"mtime": f"{member.mtime}.{fraction:09d}"} if fraction else {}
        member.pax_headers = {**more, LARGE: str(size)} if is_large else more
        head = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        num = len(head) + member.size + -member.size % tarfile.BLOCKSIZE
        if self._num_bytes + num + 2 * tarfile.BLOCKSIZE > self.max_bytes:
            if self.after is None or not self.blocks:
                what = f"more than {self.max_bytes} bytes; ask for it in parts"
                raise RefusedError(413, "too_large", what)
            self.next = "/".join(self._last)
            return False
        self.blocks.append(head)
        self._num_bytes += num
        self._last = parts
        return True


def _unless_gone(error: OSError, parts: Parts) -> None:
    """Commands may be running: what was there a moment ago is gone, or is something else."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        raise named(error, "/".join(parts)) from None


def _names(at: int) -> list[str]:
    with os.scandir(at) as entries:
        names = [entry.name for entry in itertools.islice(entries, MAX_MEMBERS + 1)]
    if len(names) > MAX_MEMBERS:
        raise RefusedError(413, "too_large", f"a folder with more than {MAX_MEMBERS} files")
    return sorted(names)
