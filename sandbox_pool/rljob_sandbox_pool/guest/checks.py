"""Request bodies, checked: every field has a type and a bound."""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
from dataclasses import dataclass
from typing import Any

from rljob_sandbox_pool.guest.wire import RefusedError

MAX_OUTPUT_BYTES = 4_000_000
"""Upper bound of `max_output_bytes`, per stream."""
MAX_STREAMED_BYTES = 1 << 30
"""The same where output is handed on as it comes."""
MAX_FILE_BYTES = 32 * 1024 * 1024
"""Largest file read, and largest request body."""
MAX_FILES = 1024
MAX_TTL_SECONDS = 7 * 86_400.0
MAX_ENV_CHARACTERS = 65_536
MAX_COMMAND_CHARACTERS = 1_000_000
MAX_PATH_CHARACTERS = 4096
_MAX_TIME_NS = 1 << 62


@dataclass(frozen=True)
class Command:
    """What `POST /exec` asks for."""

    command: list[str] | str
    cwd: str
    env: dict[str, str]
    stdin: bytes
    timeout_seconds: float
    max_output_bytes: int
    encoding: str = "text"
    """Of the output in the answer: `text` (UTF-8; what is none is replaced) or `base64`."""
    streamed: bool = False
    """The output is answered as it comes."""


@dataclass(frozen=True)
class NewFile:
    """One file of `PUT /files`."""

    path: str
    mode: int
    data: bytes
    append: bool = False
    """Behind what is there, instead of in its place."""
    final: str = ""
    """Where the file goes when the data is appended; empty: it stays."""
    mtime_ns: int | None = None


def bad(message: str) -> RefusedError:
    """A request that is malformed."""
    return RefusedError(400, "bad_request", message)


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; no body is an empty one."""
    try:
        value = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        raise bad("the body is not JSON") from None
    if not isinstance(value, dict):
        raise bad("the body is not a JSON object")
    return value


def text(
    request: dict[str, Any], name: str, default: str | None = None, limit: int = 65_536
) -> str:
    """A string field."""
    value = request.get(name, default)
    if not isinstance(value, str) or len(value) > limit or "\0" in value:
        raise bad(f"{name} is a string of at most {limit} characters")
    return value


def number(request: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A number field, brought into its bounds."""
    value = request.get(name, default)
    # Only of floats can that be asked: there are numbers that no float holds.
    is_nan = isinstance(value, float) and math.isnan(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or is_nan:
        raise bad(f"{name} is a number")
    return min(max(value, low), high)


def flag(request: dict[str, Any], name: str) -> bool:
    """A field that is true or false; without it false."""
    value = request.get(name, False)
    if not isinstance(value, bool):
        raise bad(f"{name} is true or false")
    return value


def choice(request: dict[str, Any], name: str, among: tuple[str, ...]) -> str:
    """A field that is one of a few words; without it the first."""
    value = request.get(name, among[0])
    if value not in among:
        raise bad(f"{name} is one of {', '.join(among)}")
    return value


def data(request: dict[str, Any], name: str) -> bytes:
    """A field of bytes, in base64."""
    try:
        return base64.b64decode(text(request, name, "", MAX_FILE_BYTES * 2), validate=True)
    except (binascii.Error, ValueError):
        raise bad(f"{name} is base64") from None


def environment(value: Any) -> dict[str, str]:
    """An environment: names without `=`, neither names nor values with NUL."""
    if not isinstance(value, dict):
        raise bad("env is an object of strings")
    for name, content in value.items():
        if (
            not name
            or "=" in name
            or "\0" in name
            or not isinstance(content, str)
            or "\0" in content
        ):
            raise bad("env is an object of strings without NUL; a name holds no =")
        file_name(name + content, "env")
    if sum(len(name) + len(content) for name, content in value.items()) > MAX_ENV_CHARACTERS:
        raise bad(f"env holds at most {MAX_ENV_CHARACTERS} characters")
    return value


def command(request: dict[str, Any], claim_env: dict[str, str]) -> Command:
    """The body of `POST /exec`."""
    line = request.get("command")
    if isinstance(line, list) and line and all(isinstance(part, str) for part in line):
        joined = "".join(line)
    elif isinstance(line, str):
        joined = line
    else:
        raise bad("command is a string or a list of strings")
    if len(joined) > MAX_COMMAND_CHARACTERS or "\0" in joined:
        raise bad(f"a command has at most {MAX_COMMAND_CHARACTERS} characters, none of them NUL")
    file_name(joined, "a command")
    streamed = flag(request, "stream")
    most = MAX_STREAMED_BYTES if streamed else MAX_OUTPUT_BYTES
    return Command(
        command=line,
        cwd=file_name(text(request, "cwd", "", MAX_PATH_CHARACTERS)),
        env={**claim_env, **environment(request.get("env", {}))},
        stdin=data(request, "stdin"),
        timeout_seconds=number(request, "timeout", 60.0, 0.0, MAX_TTL_SECONDS),
        max_output_bytes=int(number(request, "max_output_bytes", 1e6, 0, most)),
        encoding=choice(request, "encoding", ("text", "base64")),
        streamed=streamed,
    )


def new_files(request: dict[str, Any], data: memoryview) -> list[NewFile]:
    """The files of `PUT /files`: their heads are in the JSON line, their bytes follow it."""
    heads = request.get("files")
    if (
        not isinstance(heads, list)
        or len(heads) > MAX_FILES
        or not all(isinstance(h, dict) for h in heads)
    ):
        raise bad(f"files is a list of at most {MAX_FILES} objects")
    files: list[NewFile] = []
    for head in heads:
        size = int(number(head, "bytes", -1, -1, float(MAX_FILE_BYTES)))
        if size < 0 or size > len(data):
            raise bad("the files' sizes do not fit the body")
        mode = int(number(head, "mode", 0o644, 0, 0o777))
        final = file_name(text(head, "final", "", MAX_PATH_CHARACTERS))
        mtime = head.get("mtime_ns")
        mtime_ns = int(mtime) if isinstance(mtime, int) and 0 <= mtime < _MAX_TIME_NS else None
        append = head.get("append") is True
        files.append(NewFile(path(head), mode, bytes(data[:size]), append, final, mtime_ns))
        data = data[size:]
    if data:
        raise bad("the files' sizes do not fit the body")
    return files


def path(request: dict[str, Any]) -> str:
    """A path; relative ones start at the workspace."""
    value = text(request, "path", "", MAX_PATH_CHARACTERS)
    if not value:
        raise bad("path is missing")
    return file_name(value)


def file_name(value: str, what: str = "a path") -> str:
    """A name, or another string, that the system can have."""
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise bad(f"{what} holds characters that no file name has") from None
    return value
