"""What the system refuses, as the guest's answer."""

from __future__ import annotations

from errno import EADDRINUSE, EDQUOT, ELOOP, ENOSPC, EROFS

from rljob_sandbox_pool.guest.wire import RefusedError

_KINDS: list[tuple[type[OSError], int, str]] = [
    (FileNotFoundError, 404, "not_found"),
    (IsADirectoryError, 409, "is_directory"),
    (NotADirectoryError, 409, "not_directory"),
    (PermissionError, 403, "permission"),
]
_NUMBERS = {
    ENOSPC: (507, "no_space"),
    EDQUOT: (507, "no_space"),
    EROFS: (403, "permission"),
    ELOOP: (403, "permission"),
    EADDRINUSE: (409, "port_taken"),
}


def refusal_of(error: OSError) -> RefusedError:
    """The refusal that says so."""
    name = error.filename if isinstance(error.filename, str) else ""
    message = f"{error.strerror or error}: {name}"[:1000]
    for kind, status, word in _KINDS:
        if isinstance(error, kind):
            return RefusedError(status, word, message)
    return RefusedError(*_NUMBERS.get(error.errno or 0, (409, "os_error")), message)
