"""Trees of files, handled by descriptor and name: copied, emptied, removed. No link in them is ever followed.

For folders in which nobody else is at work: an image that is copied, a sandbox whose processes have ended.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass, field

MAX_ENTRIES = 200_000
"""A tree with more is not copied or remembered."""
MAX_DEPTH = 128
MAX_LIFTED = 2_000_000
"""Folders in a tree that is emptied; one with more makes its sandbox useless."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_CHUNK = 1 << 20
_MAX_NAMED = 5
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_OWNERS_FLAGS = 0x6283C0EF
"""All but immutable, which is root's, and those that a file system sets itself."""


class TooLargeError(Exception):
    """A tree is past a bound; says which."""


class UnreadableError(Exception):
    """Whoever copies may not read a file."""


@dataclass
class Copy:
    """Copies of one tree after another, under bounds that hold for all of them together."""

    max_bytes: int
    num_bytes: int = 0
    num_entries: int = 0
    num_left_out: int = 0
    left_out: list[str] = field(default_factory=list)
    """The first few that could not be read, or are neither files nor folders nor links."""

    def copy(self, source: int, target: int) -> None:
        """What the folder `source` holds, and its mode and times, into the empty folder `target`.

        The copy belongs to whoever copies (root gives files their owners), and what its mode would forbid its owner is
        added.

        Raises:
            OSError: the target cannot be written.
            TooLargeError: see `max_bytes`, `MAX_ENTRIES`, `MAX_DEPTH`.
        """
        self._folder(source, target, "", {}, target)

    def _folder(
        self, source: int, target: int, path: str, links: dict[tuple[int, int], str], root: int
    ) -> None:
        if path.count("/") > MAX_DEPTH:
            raise TooLargeError(f"{path[:200]}…: deeper than {MAX_DEPTH} folders")
        for name in sorted(os.listdir(source)):
            inner = f"{path}{name}"
            info = os.stat(name, dir_fd=source, follow_symlinks=False)
            self._count(info)
            known = links.get((info.st_dev, info.st_ino)) if info.st_nlink > 1 else None
            if stat.S_ISDIR(info.st_mode):
                self._inner(source, target, name, f"{inner}/", links, root)
            elif known is not None:
                os.link(known, name, src_dir_fd=root, dst_dir_fd=target, follow_symlinks=False)
            elif self._single(source, target, name, inner, info) and info.st_nlink > 1:
                links[info.st_dev, info.st_ino] = inner
        info = os.fstat(source)
        give_owner(target, ".", info)
        os.fchmod(target, kept_mode(info))
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))

    def _inner(
        self,
        source: int,
        target: int,
        name: str,
        path: str,
        links: dict[tuple[int, int], str],
        root: int,
    ) -> None:
        try:
            inner_source = os.open(name, FOLDER, dir_fd=source)
        except PermissionError:
            self._leave_out(path)
            return
        try:
            os.mkdir(name, 0o700, dir_fd=target)
            inner_target = os.open(name, FOLDER, dir_fd=target)
            try:
                self._folder(inner_source, inner_target, path, links, root)
            finally:
                os.close(inner_target)
        finally:
            os.close(inner_source)

    def _single(self, source: int, target: int, name: str, path: str, info: os.stat_result) -> bool:
        if not stat.S_ISLNK(info.st_mode) and not stat.S_ISREG(info.st_mode):
            self._leave_out(path)
            return False
        try:
            copy_single(source, target, name, info)
        except UnreadableError:
            self._leave_out(path)
            return False
        return True

    def _count(self, info: os.stat_result) -> None:
        self.num_entries += 1
        self.num_bytes += info.st_size if stat.S_ISREG(info.st_mode) else 0
        if self.num_entries > MAX_ENTRIES:
            raise TooLargeError(f"more than {MAX_ENTRIES} files")
        if self.num_bytes > self.max_bytes:
            raise TooLargeError(f"more than {self.max_bytes >> 20} MiB")

    def _leave_out(self, path: str) -> None:
        self.num_left_out += 1
        if len(self.left_out) < _MAX_NAMED:
            self.left_out.append(path)


def named(error: OSError, name: str) -> OSError:
    """The error, told of a name that its reader knows."""
    return OSError(error.errno, os.strerror(error.errno or 0), name)


def flags(fd: int) -> int:
    """Those of an inode that its owner can set (`chattr`)."""
    return _raw_flags(fd) & _OWNERS_FLAGS


def set_flags(fd: int, wanted: int) -> None:
    """Where the file system has flags. Raises OSError."""
    raw = _raw_flags(fd)
    if raw & _OWNERS_FLAGS != wanted:
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("q", raw & ~_OWNERS_FLAGS | wanted))


def _raw_flags(fd: int) -> int:
    try:
        return struct.unpack("ii", fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))[0]
    except OSError:
        return 0


def kept_mode(info: os.stat_result) -> int:
    """The mode of a copy: no set-uid, no set-gid, and readable for its owner."""
    always = 0o700 if stat.S_ISDIR(info.st_mode) else 0o400
    return stat.S_IMODE(info.st_mode) & ~0o6000 | always


def copy_single(source: int, target: int, name: str, info: os.stat_result) -> None:
    """A file or a link, with mode and times. Raises OSError; UnreadableError before anything is made."""
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        give_owner(target, name, info)
    else:
        try:
            reader = os.open(name, READ, dir_fd=source)
        except PermissionError:
            raise UnreadableError from None
        try:
            _copy_file(reader, target, name, info)
        finally:
            os.close(reader)
    times = (info.st_atime_ns, info.st_mtime_ns)
    os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)


def give_owner(at: int, name: str, like: os.stat_result) -> None:
    """As far as this user can: only root has files of others to give."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.chown(name, like.st_uid, like.st_gid, dir_fd=at, follow_symlinks=False)


def _copy_file(reader: int, target: int, name: str, info: os.stat_result) -> None:
    writer = os.open(name, _NEW, 0o600, dir_fd=target)
    try:
        while os.sendfile(writer, reader, None, _CHUNK):
            pass
        give_owner(target, name, info)
        os.fchmod(writer, kept_mode(info))
    finally:
        os.close(writer)


def remove(at: int, name: str) -> None:
    """A file, a link, or a folder with all that is in it. Raises OSError."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=at)
        return
    os.chmod(name, 0o700, dir_fd=at)
    inner = os.open(name, FOLDER, dir_fd=at)
    try:
        empty(inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=at)


def empty(at: int) -> None:
    """Remove all that a folder holds, whatever its modes, names and depth. Raises OSError.

    Folders that are not empty are emptied by moving what they hold up here: any depth, two descriptors.
    """
    moved, chance = 0, secrets.token_hex(8)
    pending = os.listdir(at)
    while pending:
        name = pending.pop()
        if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=at)
            continue
        os.chmod(name, 0o700, dir_fd=at)
        inner = os.open(name, FOLDER, dir_fd=at)
        try:
            for child in os.listdir(inner):
                if stat.S_ISDIR(os.stat(child, dir_fd=inner, follow_symlinks=False).st_mode):
                    moved += 1
                    os.chmod(child, 0o700, dir_fd=inner)
                    lifted = f".rljob-empty-{chance}-{moved}"
                    os.rename(child, lifted, src_dir_fd=inner, dst_dir_fd=at)
                    pending.append(lifted)
                else:
                    os.unlink(child, dir_fd=inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=at)
        if moved > MAX_LIFTED:
            raise OSError(errno.EMFILE, "too many folders")
