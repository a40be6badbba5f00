"""Files of the sandbox, with the rights of the agent's user: no path reaches what a command could not."""

from __future__ import annotations

import errno
import os
import secrets
import stat

from rljob_sandbox_pool.guest.checks import MAX_FILE_BYTES, NewFile
from rljob_sandbox_pool.guest.folders import named
from rljob_sandbox_pool.guest.system import User
from rljob_sandbox_pool.guest.wire import RefusedError

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class Files:
    """Reads and writes; relative paths start at the workspace."""

    def __init__(self, user: User, workspace: str) -> None:
        self._user, self._workspace = user, workspace
        # What /proc/self shows is this process, whose memory holds the key: nothing there is a file to read.
        self._forbidden_device = os.stat("/proc").st_dev

    def read(self, path: str, max_bytes: int, offset: int | None = None) -> bytes:
        """The content of a regular file; with an offset what is there of it. Raises OSError, RefusedError."""
        with self._user.borrowed():
            # Non-blocking, so that a pipe put in the file's place does not stop the guest.
            fd = os.open(self._full(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            info = os.fstat(fd)
            if stat.S_ISDIR(info.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat.S_ISREG(info.st_mode) or info.st_dev == self._forbidden_device:
                raise PermissionError(errno.EACCES, "not a regular file", path)
            limit = min(max_bytes, MAX_FILE_BYTES)
            if offset is not None:
                os.lseek(fd, offset, os.SEEK_SET)
            elif info.st_size > limit:
                raise RefusedError(
                    413, "too_large", f"{path[:500]} holds {info.st_size} bytes, more than {limit}"
                )
            data = os.read(fd, limit)
            while len(data) < limit and (more := os.read(fd, limit - len(data))):
                data += more
            return data
        finally:
            os.close(fd)

    def write(self, file: NewFile) -> None:
        """Whole or not at all: beside its place, then renamed. A link in its place is replaced, not followed."""
        path = self._full(file.path)
        folder, name = os.path.split(path)
        if name in ("", ".", ".."):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file.path)
        with self._user.borrowed():
            try:
                self._write(folder, name, file)
            except FileNotFoundError:
                os.makedirs(folder, exist_ok=True)
                self._write(folder, name, file)

    def _write(self, folder: str, name: str, file: NewFile) -> None:
        if file.append:
            self._append(folder, name, file)
            return
        temporary = f".rljob-{secrets.token_hex(6)}"
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fd = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=at
            )
            try:
                _write_all(fd, file.data)
                _give_facts(fd, file)
                os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
            except OSError as error:
                os.unlink(temporary, dir_fd=at)
                raise OSError(error.errno, os.strerror(error.errno or 0), file.path) from None
            finally:
                os.close(fd)
        finally:
            os.close(at)

    def _append(self, folder: str, name: str, file: NewFile) -> None:
        """All of the data or nothing of it. A link in its place is not followed."""
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fd = os.open(name, _APPEND, 0o600, dir_fd=at)
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode) or info.st_dev == self._forbidden_device:
                    raise PermissionError(errno.EACCES, "not a regular file", file.path)
                try:
                    _write_all(fd, file.data)
                except OSError as error:
                    os.ftruncate(fd, info.st_size)
                    raise named(error, file.path) from None
                _give_facts(fd, file)
                if file.final:
                    os.rename(name, self._full(file.final), src_dir_fd=at)
            finally:
                os.close(fd)
        finally:
            os.close(at)

    def _full(self, path: str) -> str:
        return os.path.join(self._workspace, path)


def _give_facts(fd: int, file: NewFile) -> None:
    os.fchmod(fd, file.mode)
    if file.mtime_ns is not None:
        os.utime(fd, ns=(file.mtime_ns, file.mtime_ns))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
