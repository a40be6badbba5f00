"""Tar archives as a sandbox sends them, read with distrust. Pure.

Our guest writes one kind of archive (POSIX, with extended headers); whatever else comes is nonsense. Nothing is read
past the bytes at hand, every name is checked, and a link that may lead out of the folder is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_DEPTH = 128
BLOCK = 512
LARGE = "RLJOB.size"
"""A key: the member is empty here, its content of so many bytes has to be read otherwise."""
FILE, FOLDER, SYMLINK, HARD_LINK = b"0", b"5", b"2", b"1"
_KNOWN = frozenset({"path", "linkpath", "mtime", "size", "hdrcharset", LARGE})
_NANO = 10**9
_MAX_DIGITS = 18


class NonsenseError(Exception):
    """Not an archive that a guest would send."""


class Member(NamedTuple):
    """One entry."""

    parts: tuple[str, ...]
    kind: bytes
    mode: int
    mtime_ns: int
    link: str
    data: memoryview
    large: int | None
    """Its size, where the content is not here."""


def members(archive: bytes) -> Iterator[Member]:
    """The entries in order. Raises NonsenseError."""
    view, at, more = memoryview(archive), 0, dict[str, str]()
    while at < len(view):
        head = bytes(view[at : at + BLOCK])
        if not head.strip(b"\0"):
            return
        if (
            len(head) < BLOCK
            or head[257:263] != b"ustar\0"
            or _checksum(head) != _octal(head[148:156])
        ):
            raise NonsenseError("a head that is none")
        size = _octal(head[124:136])
        if "size" in more:
            size = _decimal(more["size"])
        data = view[at + BLOCK : at + BLOCK + size]
        if len(data) < size:
            raise NonsenseError("it ends within a member")
        at += BLOCK + size + -size % BLOCK
        if head[156:157] == b"x":
            if more:
                raise NonsenseError("two extended heads in a row")
            more = _records(bytes(data))
        else:
            yield _member(head, more, data)
            more = {}


def _member(head: bytes, more: dict[str, str], data: memoryview) -> Member:
    kind = head[156:157]
    if kind not in (FILE, FOLDER, SYMLINK, HARD_LINK) or (data and kind != FILE):
        raise NonsenseError(f"a member of kind {kind!r}")
    prefix, name = _text(head[345:500]), _text(head[:100])
    path = more.get("path", f"{prefix}/{name}" if prefix else name)
    return Member(
        parts=parts_of(path),
        kind=kind,
        mode=_octal(head[100:108]) & 0o777,
        mtime_ns=_time(more["mtime"]) if "mtime" in more else _octal(head[136:148]) * _NANO,
        link=more.get("linkpath", _text(head[157:257])),
        data=data,
        large=_decimal(more[LARGE]) if LARGE in more else None,
    )


def parts_of(path: str) -> tuple[str, ...]:
    """A name's parts. Raises NonsenseError where it leads anywhere but down."""
    parts = tuple(path.removesuffix("/").split("/"))
    if "\0" in path or len(parts) > MAX_DEPTH or any(part in ("", ".", "..") for part in parts):
        raise NonsenseError(f"the name {path[:200]!r}")
    return parts


def leads_outside(depth: int, target: str) -> bool:
    """Whether a symbolic link `depth` folders below the top may lead out of it.

    `..` is allowed first of all only: what it leads through are folders. Behind another name, which may be a link, it
    could be anywhere.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    num_up = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    return target.startswith("/") or num_up > depth or ".." in parts[num_up:]


def _records(data: bytes) -> dict[str, str]:
    """Each says its own length: `25 mtime=1700000000.25` and the end of a line."""
    found: dict[str, str] = {}
    at = 0
    while at < len(data):
        digits, space, _ = data[at : at + 12].partition(b" ")
        end = at + _decimal(digits.decode("latin-1"))
        key, equals, value = data[at + len(digits) + len(space) : end].partition(b"=")
        if not space or not equals or not at < end <= len(data) or value[-1:] != b"\n":
            raise NonsenseError("an extended head that is none")
        if (name := key.decode("latin-1")) not in _KNOWN:
            raise NonsenseError(f"an extended head with {name[:100]!r}")
        found[name] = value[:-1].decode("utf-8", "surrogateescape")
        at = end
    return found


def _checksum(head: bytes) -> int:
    return sum(head[:148]) + 8 * 32 + sum(head[156:])


def _octal(field: bytes) -> int:
    digits = field.strip(b"\0 ")
    if digits and not set(digits) <= set(b"01234567"):
        raise NonsenseError("a number that is none")
    return int(digits or b"0", 8)


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise NonsenseError("a number that is none")
    return int(text)


def _time(text: str) -> int:
    seconds, _, fraction = text.partition(".")
    return _decimal(seconds[:12]) * _NANO + _decimal(fraction[:9].ljust(9, "0"))


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")
