"""Members of an archive that nobody trusts, written below one folder of this machine, or to one file.

Every name is walked from the folder's descriptor, and no link on the way is followed: neither one that the archive
brought nor one that lay there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rljob.sandbox_tar import (
    FILE,
    FOLDER,
    HARD_LINK,
    SYMLINK,
    Member,
    NonsenseError,
    leads_outside,
    parts_of,
)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@dataclass
class Downloaded:
    """What came."""

    num_files: int = 0
    num_bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    """Links that would have led out of the folder."""


class Target:
    """Where members go.

    Args:
        local: A folder, or a file; made where it is missing.
        is_folder: Which.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, local: Path, *, is_folder: bool) -> None:
        self._is_folder, self._name = is_folder, local.name
        folder = local if is_folder else local.parent
        folder.mkdir(parents=True, exist_ok=True)
        if not is_folder and local.is_dir():
            raise IsADirectoryError(21, "a folder lies there", str(local))
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._result = Downloaded()
        self._files: set[tuple[str, ...]] = set()
        """Those that came: a hard link leads to one of them, or nowhere."""
        self._folders: dict[tuple[str, ...], tuple[int, int]] = {}

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._root)

    def make(self, member: Member) -> None:
        """Write one member. Raises OSError, NonsenseError."""
        if member.kind == FOLDER:
            with self._at(member.parts):
                self._folders[member.parts] = (member.mode, member.mtime_ns)
        elif member.kind == SYMLINK:
            self._symlink(member)
        elif member.kind == HARD_LINK:
            self._hard_link(member)
        else:
            with self.new_file(member) as file:
                file.write(member.data)

    @contextmanager
    def new_file(self, member: Member) -> Iterator[NewFile]:
        """A file that is at its place when the block has ended well. Raises OSError, NonsenseError."""
        if member.kind != FILE or (not self._is_folder and (len(member.parts) > 1 or self._files)):
            raise NonsenseError("more than the file that was asked for")
        parts = list(member.parts) if self._is_folder else [self._name]
        with self._at(tuple(parts[:-1])) as at, NewFile(at) as file:
            yield file
            file.place(parts[-1], member.mode, member.mtime_ns)
        self._files.add(member.parts)
        self._result.num_files += 1
        self._result.num_bytes += file.num_bytes

    def finish(self) -> Downloaded:
        """Modes and times of folders, the inner ones first; what came."""
        for parts, (mode, mtime_ns) in sorted(self._folders.items(), reverse=True):
            with self._at(parts) as at:
                os.fchmod(at, mode)
                os.utime(at, ns=(mtime_ns, mtime_ns))
        return self._result

    def _symlink(self, member: Member) -> None:
        self._only_in_folder()
        if (
            not member.link
            or "\0" in member.link
            or leads_outside(len(member.parts) - 1, member.link)
        ):
            self._result.left_out.append("/".join(member.parts))
            return
        with self._at(member.parts[:-1]) as at, _temporary(at) as temporary:
            os.symlink(member.link, temporary, dir_fd=at)
            times = (member.mtime_ns, member.mtime_ns)
            os.utime(temporary, ns=times, dir_fd=at, follow_symlinks=False)
            os.rename(temporary, member.parts[-1], src_dir_fd=at, dst_dir_fd=at)

    def _hard_link(self, member: Member) -> None:
        self._only_in_folder()
        source = parts_of(member.link)
        if source not in self._files:
            raise NonsenseError("a hard link to what did not come")
        with (
            self._at(source[:-1]) as there,
            self._at(member.parts[:-1]) as at,
            _temporary(at) as temporary,
        ):
            os.link(source[-1], temporary, src_dir_fd=there, dst_dir_fd=at, follow_symlinks=False)
            os.rename(temporary, member.parts[-1], src_dir_fd=at, dst_dir_fd=at)
        self._files.add(member.parts)

    def _only_in_folder(self) -> None:
        if not self._is_folder:
            raise NonsenseError("more than the file that was asked for")

    @contextmanager
    def _at(self, parts: tuple[str, ...]) -> Iterator[int]:
        """The descriptor of a folder below the top, which is made where it is missing."""
        if not self._is_folder and parts:
            raise NonsenseError("more than the file that was asked for")
        at = os.dup(self._root)
        try:
            for part in parts:
                try:
                    inner = os.open(part, _FOLDER, dir_fd=at)
                except FileNotFoundError:
                    os.mkdir(part, 0o700, dir_fd=at)
                    inner = os.open(part, _FOLDER, dir_fd=at)
                os.close(at)
                at = inner
            yield at
        finally:
            os.close(at)


class NewFile:
    """A file without its name yet: a name nobody asks for, gone unless `place` was called."""

    def __init__(self, at: int) -> None:
        self._at, self._temporary = at, f".rljob-{secrets.token_hex(6)}"
        self._fd = os.open(self._temporary, _NEW, 0o600, dir_fd=at)
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        with suppress(FileNotFoundError):
            os.unlink(self._temporary, dir_fd=self._at)

    def write(self, data: bytes | memoryview) -> None:
        """Behind what is there. Raises OSError."""
        self.num_bytes += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def place(self, name: str, mode: int, mtime_ns: int) -> None:
        """At its name, whole. Raises OSError."""
        os.fchmod(self._fd, mode)
        os.utime(self._fd, ns=(mtime_ns, mtime_ns))
        os.rename(self._temporary, name, src_dir_fd=self._at, dst_dir_fd=self._at)


@contextmanager
def _temporary(at: int) -> Iterator[str]:
    """A name; what bears it afterwards goes."""
    name = f".rljob-{secrets.token_hex(6)}"
    try:
        yield name
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
