"""What the groups of routes share: how a handler is called, and what it may ask of the guest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rljob_sandbox_pool.guest.claims import Claim
from rljob_sandbox_pool.guest.wire import Admit, Request, Response

Reply = Callable[[Response], None]
Handler = Callable[[Request, Reply], None]
"""Answers one request: calls the reply once, now or later, or raises RefusedError or OSError."""
SMALL_BYTES = 1_000_000
"""Bodies up to here are taken from anyone."""
Routes = dict[tuple[str, str], Handler]
"""By method and path; a path may hold one `{id}`, which the handler finds as `request.id`."""


class Guest(Protocol):
    """The guest as a handler sees it."""

    counts: dict[str, int]
    """What `GET /metrics` tells."""

    def owner(self, request: Request) -> Claim:
        """The claim that the request holds. Raises RefusedError."""
        ...

    def touch(self) -> None:
        """The claim is used."""
        ...

    def holds(self, claim: Claim) -> bool:
        """Whether that claim still holds the sandbox."""
        ...

    def ran(self, result: Mapping[str, Any]) -> None:
        """A command has ended: counted."""
        ...

    def once(self, body: dict[str, Any], reply: Reply, run: Callable[[Reply], None]) -> None:
        """Run unless this request id ran before; then its answer is given again, errors included."""
        ...


def admit(guest: Guest) -> Admit:
    """Large bodies are taken from the owner of the claim alone: they are in memory before they are looked at."""

    def check(method: str, target: str, headers: Mapping[str, str], length: int) -> None:
        if length > SMALL_BYTES:
            guest.owner(Request(method, target, {}, dict(headers), b""))

    return check


def find(routes: Routes, method: str, path: str) -> tuple[Handler | None, str, bool]:
    """The handler of a request, what stands for `{id}`, and whether another method knows the path."""
    patterns = [(path, "")]
    parts = path.split("/")
    if len(parts) > 2 and parts[2]:
        patterns.append(("/".join([*parts[:2], "{id}", *parts[3:]]), parts[2]))
    for pattern, given in patterns:
        if handler := routes.get((method, pattern)):
            return handler, given, True
    known = {pattern for pattern, _ in patterns}
    return None, "", any(pattern in known for _, pattern in routes)
