"""What the API server refuses, by what the caller does about it.

    InfraError
    └── KubeError             ask again later; `status` 0: no answer at all
        ├── NotFoundError     404: it is not there
        ├── ExistsError       409 AlreadyExists: a create met an object of that name
        ├── ConflictError     409: it has changed, or is another object (uid): read it again
        ├── ForbiddenError    401, 403: who we are may not do this; quota and admission refuse so too
        ├── InvalidError      400, 413, 415, 422: the object itself is refused: do not repeat it
        └── GoneError         410: that resource version is no longer kept: list again

To add a class: name its status or reason in `error_of`.
"""

from __future__ import annotations

from typing import Any

from rljob.errors import InfraError


class KubeError(InfraError):
    """The API server did not do what it was asked.

    Args:
        status: HTTP status; 0 where no answer came.
        reason: The server's word for it (`NotFound`, `AlreadyExists`, …), or ours.
        message: In a sentence.
        details: The server's `details`: causes, kind, name, retryAfterSeconds.
    """

    def __init__(
        self, status: int, reason: str, message: str, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(status, reason, message, details or {})
        self.status, self.reason, self.message = status, reason, message
        self.details = details or {}
        self.is_doubtful = False
        """An earlier attempt of the same call failed otherwise, and may have been carried out."""

    def __str__(self) -> str:
        return self.message


class NotFoundError(KubeError):
    """There is no such object (or kind, or namespace)."""


class ExistsError(KubeError):
    """A create met an object of that name."""


class ConflictError(KubeError):
    """The object has changed since it was read, or has another uid than the one meant."""


class ForbiddenError(KubeError):
    """We may not do this. `exceeded quota` and refusals by admission arrive as this too."""


class InvalidError(KubeError):
    """The API server refuses the object or the request itself."""


class GoneError(KubeError):
    """The resource version asked for is no longer kept."""


_BY_STATUS: dict[int, type[KubeError]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    415: InvalidError,
    422: InvalidError,
}


def error_of(status: int, document: Any, fallback: str = "") -> KubeError:
    """The error of a refused call.

    Args:
        status: HTTP status.
        document: The decoded body: a `Status` object, or anything.
        fallback: The message where the body gives none.
    """
    fields: dict[str, Any] = document if isinstance(document, dict) else {}
    reason = str(fields.get("reason") or "")
    message = str(fields.get("message") or fallback or f"status {status}")[:4000]
    details = fields.get("details")
    kind = _BY_STATUS.get(status, KubeError)
    if reason == "AlreadyExists":
        kind = ExistsError
    elif reason == "Expired":
        kind = GoneError
    return kind(
        status, reason or f"Status{status}", message, details if isinstance(details, dict) else {}
    )
