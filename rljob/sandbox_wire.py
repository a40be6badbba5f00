"""What broker and guest send to their client, decoded: answers of the right type, refusals with a reason."""

from __future__ import annotations

import errno
import json
from typing import Any, Literal, TypeVar

import msgspec

from rljob.errors import SandboxError
from rljob.http1 import Answer
from rljob.sandbox import ClaimStatus, PoolStatus

_T = TypeVar("_T")


class Refusal(msgspec.Struct):
    """Broker or guest → client: why not."""

    error: str
    message: str = ""


class _Status(msgspec.Struct):
    """API server → client: why a proxied call did not reach the broker."""

    kind: Literal["Status"]
    message: str = ""
    reason: str = ""


class Pools(msgspec.Struct):
    """Broker → client: `GET /v1/pools`."""

    pools: list[PoolStatus]


class Claims(msgspec.Struct):
    """Broker → client: `GET /v1/claims`."""

    claims: list[ClaimStatus]


FILE_ERRORS: dict[str, tuple[type[OSError], int]] = {
    "not_found": (FileNotFoundError, errno.ENOENT),
    "is_directory": (IsADirectoryError, errno.EISDIR),
    "not_directory": (NotADirectoryError, errno.ENOTDIR),
    "permission": (PermissionError, errno.EACCES),
    "no_space": (OSError, errno.ENOSPC),
    "os_error": (OSError, errno.EIO),
    "busy": (BlockingIOError, errno.EAGAIN),
    "no_shell": (ProcessLookupError, errno.ESRCH),
    "no_shells": (OSError, errno.ENOSYS),
    "shell_busy": (BlockingIOError, errno.EAGAIN),
    "shell_ended": (BrokenPipeError, errno.EPIPE),
    "shell_failed": (ChildProcessError, errno.ECHILD),
}
"""Refusals of the guest that are what the machine's own calls would raise; the sandbox is not lost with them."""


BAD_REQUESTS = frozenset({"too_large", "bad_request", "escapes", "not_here"})
"""Refusals of the guest that say what is wrong with the call."""


def is_away(answer: Answer) -> bool:
    """Time may cure it."""
    return answer.status in (0, 429) or answer.status >= 500


def encode(value: Any) -> bytes:
    """JSON of a request."""
    # ASCII escapes carry lone surrogates, which is how Python spells file names that are not UTF-8.
    return json.dumps(value).encode()


def decode(answer: Answer, kind: type[_T]) -> _T:
    """An answer of the broker. Raises SandboxError."""
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.MsgspecError as error:
        raise SandboxError(f"broker answered nonsense: {error}") from None


def refusal_of(answer: Answer) -> Refusal:
    """Why an answer is none."""
    try:
        return msgspec.json.decode(answer.body, type=Refusal)
    except msgspec.MsgspecError:
        pass
    try:
        status = msgspec.json.decode(answer.body, type=_Status)
    except msgspec.MsgspecError:
        return Refusal(error=f"status_{answer.status}", message="an answer without a reason")
    return Refusal("kubernetes", f"the API server says: {status.message or status.reason}")
