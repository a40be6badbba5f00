"""Tar archives into a folder, with no way out of it. Out of a folder: `pack`.

Every name is walked from the folder's descriptor, one part after another, and no link on the way is followed: neither
one that lies there nor one that appears meanwhile. Links themselves are kept where they lead inside. A generator: a
little work, then `yield`, so that the guest's one thread does other things between.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
import tarfile
from collections.abc import Generator, Iterator
from typing import cast

from rljob_sandbox_pool.guest.folders import FOLDER, MAX_DEPTH, named
from rljob_sandbox_pool.guest.wire import RefusedError

MAX_MEMBERS = 65_536
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_NANO = 10**9
_MAX_SECONDS = 1 << 40
_MAX_FILE_BYTES = 1 << 50
"""A sparse file may be larger than the archive that holds it, and than this machine's disks."""
_NONSENSE = (
    tarfile.TarError,
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    EOFError,
)
"""What the standard library raises for archives that are none."""

Parts = tuple[str, ...]


def unpack(root: int, archive: bytes) -> Generator[None, None, int]:
    """Make what the archive holds, below the folder `root`. Returns how much.

    All names are looked at before the first is made. Each file appears whole or not at all; those before a failure
    stay.

    Raises:
        RefusedError: the archive is none, or a member is not allowed; `escapes` where it leads outside.
        OSError: the folder refuses a member.
    """
    for _, _ in _members(archive):
        yield
    unpacking = _Unpacking(root, archive)
    num = 0
    try:
        for parts, member in _members(archive):
            unpacking.make(parts, member)
            num += 1
            yield
        yield from unpacking.finish()
    finally:
        unpacking.close()
    return num


def _members(archive: bytes) -> Iterator[tuple[Parts, tarfile.TarInfo]]:
    """What an archive holds, each checked. Raises RefusedError."""
    num = end = 0
    try:
        tar = tarfile.TarFile(
            fileobj=io.BytesIO(archive), encoding="utf-8", errors="surrogateescape"
        )
        while member := tar.next():
            # Or a tree of names would stay in memory, and a negative size would lead back for ever.
            vars(tar)["members"].clear()
            if tar.offset <= end or not 0 <= member.size <= _MAX_FILE_BYTES:
                raise ValueError("sizes do not fit")
            if "\0" in member.name or "\0" in member.linkname:
                raise ValueError("a name with a NUL")
            end = tar.offset
            num += 1
            if num > MAX_MEMBERS:
                raise RefusedError(
                    413, "too_large", f"an archive holds at most {MAX_MEMBERS} members"
                )
            yield _checked(member, archive), member
    except _NONSENSE as error:
        raise RefusedError(400, "bad_request", f"not a tar archive: {error}"[:500]) from None
    if archive[tar.offset : tar.offset + tarfile.BLOCKSIZE].strip(b"\0"):
        raise RefusedError(400, "bad_request", "not a tar archive: something else follows a member")


def _checked(member: tarfile.TarInfo, archive: bytes) -> Parts:
    """The member's place. Raises RefusedError."""
    parts = _parts(member.name, member.name)
    if member.issym():
        if leads_outside(len(parts) - 1, member.linkname):
            raise _escapes(f"{member.name} -> {member.linkname}")
    elif member.islnk():
        if not _parts(member.linkname, f"{member.name} (a hard link to {member.linkname})"):
            raise ValueError("a hard link to nothing")
    elif member.isreg():
        for place, offset, size in _segments(member):
            if place + size > min(member.size, _MAX_FILE_BYTES) or offset + size > len(archive):
                raise ValueError("it ends within a member")
    elif not member.isdir():
        what = f"{member.name[:500]} is neither a file, a folder nor a link"
        raise RefusedError(400, "bad_request", what)
    if not parts and not member.isdir():
        raise RefusedError(400, "bad_request", "a member without a name")
    return parts


def _parts(name: str, shown: str) -> Parts:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts:
        raise _escapes(shown)
    if len(parts) > MAX_DEPTH:
        raise RefusedError(400, "bad_request", f"{shown[:200]}…: deeper than {MAX_DEPTH} folders")
    return parts


def _escapes(shown: str) -> RefusedError:
    return RefusedError(400, "escapes", f"{shown[:500]} leads out of the folder")


def leads_outside(depth: int, target: str) -> bool:
    """Whether a link `depth` folders below the top may lead out of it.

    `..` is allowed first of all only: what it leads through are folders. Behind another name, which may be a link, it
    could be anywhere.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    num_up = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    return target.startswith("/") or num_up > depth or ".." in parts[num_up:]


def _segments(member: tarfile.TarInfo) -> Iterator[tuple[int, int, int]]:
    """Where its bytes go in the file, where they are in the archive, how many: several in a sparse file."""
    if member.sparse is None:
        yield 0, member.offset_data, member.size
        return
    offset = member.offset_data
    for at, size in cast("list[tuple[int, int]]", member.sparse):
        if at < 0 or size < 0:
            raise ValueError("sizes do not fit")
        yield at, offset, size
        offset += size


class _Unpacking:
    """One archive on its way into one folder."""

    def __init__(self, root: int, archive: bytes) -> None:
        self._root, self._data = root, memoryview(archive)
        self._folders: dict[Parts, tuple[int, int]] = {}
        """Mode and time of the archive's folders: given at the end, or they would change again."""
        self._at: tuple[Parts, int] = ((), os.dup(root))
        """The folder at hand, since the next member mostly lies there as well."""

    def close(self) -> None:
        os.close(self._at[1])

    def make(self, parts: Parts, member: tarfile.TarInfo) -> None:
        if member.isdir():
            if parts:
                at = self._folder(parts)
                if (info := os.fstat(at)).st_uid == os.geteuid():
                    os.fchmod(at, stat.S_IMODE(info.st_mode) | 0o700)
                self._folders[parts] = (member.mode & 0o777, _time_ns(member))
            return
        link = _parts(member.linkname, "") if member.islnk() else ()
        source = os.dup(self._folder(link[:-1])) if link else -1
        at, temporary = self._folder(parts[:-1]), f".rljob-{secrets.token_hex(6)}"
        try:
            if member.issym():
                time_ns = _time_ns(member)
                os.symlink(member.linkname, temporary, dir_fd=at)
                os.utime(temporary, ns=(time_ns, time_ns), dir_fd=at, follow_symlinks=False)
            elif link:
                _link(source, link[-1], at, temporary)
            else:
                self._file(at, temporary, member)
            os.rename(temporary, parts[-1], src_dir_fd=at, dst_dir_fd=at)
        except OSError as error:
            _discard(at, temporary)
            raise named(error, member.name) from None
        finally:
            if source >= 0:
                os.close(source)
        if link:
            # Between two names of one file a rename does nothing.
            _discard(at, temporary)

    def finish(self) -> Iterator[None]:
        """Modes and times of folders, the inner ones first."""
        for parts, (mode, time_ns) in sorted(self._folders.items(), reverse=True):
            at = self._folder(parts)
            if os.fstat(at).st_uid == os.geteuid():
                os.fchmod(at, mode)
                os.utime(at, ns=(time_ns, time_ns))
            yield

    def _folder(self, parts: Parts) -> int:
        """The descriptor of a folder below the top, which is made where it is missing."""
        known, at = self._at
        if known != parts:
            at = self._walk(parts)
            os.close(self._at[1])
            self._at = (parts, at)
        return at

    def _walk(self, parts: Parts) -> int:
        at = os.dup(self._root)
        try:
            for number, part in enumerate(parts, 1):
                inner = _enter(at, part, "/".join(parts[:number]))
                os.close(at)
                at = inner
        except BaseException:
            os.close(at)
            raise
        return at

    def _file(self, at: int, temporary: str, member: tarfile.TarInfo) -> None:
        fd = os.open(temporary, _NEW, 0o600, dir_fd=at)
        try:
            for place, offset, size in _segments(member):
                _write(fd, place, self._data[offset : offset + size])
            if member.sparse is not None:
                os.ftruncate(fd, member.size)
            os.fchmod(fd, member.mode & 0o777)
            time_ns = _time_ns(member)
            os.utime(fd, ns=(time_ns, time_ns))
        finally:
            os.close(fd)


def _link(source: int, name: str, at: int, temporary: str) -> None:
    if not stat.S_ISREG(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode):
        raise OSError(errno.EINVAL, "a hard link to what is no file", name)
    os.link(name, temporary, src_dir_fd=source, dst_dir_fd=at, follow_symlinks=False)


def _enter(at: int, name: str, shown: str) -> int:
    try:
        return os.open(name, FOLDER, dir_fd=at)
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=at)
        return os.open(name, FOLDER, dir_fd=at)
    except OSError as error:
        if stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            raise _escapes(f"{shown} is a link there and") from None
        raise named(error, shown) from None


def _write(fd: int, place: int, data: memoryview) -> None:
    while data:
        num = os.pwrite(fd, data, place)
        place, data = place + num, data[num:]


def _discard(at: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        return


def _time_ns(member: tarfile.TarInfo) -> int:
    """Exact where the archive is: a float has no nanoseconds."""
    told = member.pax_headers.get("mtime") or str(int(member.mtime))
    seconds, _, fraction = told.partition(".")
    digits = fraction[:9].ljust(9, "0")
    if not (seconds.isascii() and seconds.isdigit() and digits.isascii() and digits.isdigit()):
        return 0
    return min(int(seconds[:16]), _MAX_SECONDS) * _NANO + int(digits)
