"""Files that are either whole or absent: temporary name, fsync, rename; the manifest last.

A reader that finds the manifest finds everything it names. A writer that died leaves a `.tmp-*` entry, which the next
writer of the same place removes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TMP = ".tmp-"


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; after a crash it holds the old or the new bytes, never a mix."""
    write_pieces(path, [data])


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """`write_atomic` of what need not fit in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_TMP}{path.name}")
    with temporary.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_directory(path.parent)


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Give an empty directory that becomes `final` when the block ends, and vanishes when it raises.

    An existing `final` is replaced: whoever calls this has decided that it is not worth keeping.
    """
    temporary = final.with_name(f"{_TMP}{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync_directory(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256(path: Path) -> str:
    """Hash of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    if path.is_dir():
        _sync_directory(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
