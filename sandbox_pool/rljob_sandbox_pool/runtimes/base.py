"""What the pool asks of a runtime: start one sandbox, know when it ends, end it."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from rljob.api.rljob_types import SandboxLimits


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Pool → runtime: the sandbox to start."""

    id: str
    key: bytes
    """The sandbox's own; see `guest.claims.sandbox_key`."""
    index: int
    """Free among the living sandboxes of this pool manager: where a uid of its own comes from."""
    limits: SandboxLimits


class RunningSandbox(Protocol):
    """One sandbox that was started; its guest may not answer yet."""

    url: str
    ended: asyncio.Future[str]
    """Done when nothing of the sandbox is left; how it ended, in words."""

    def kill(self) -> None:
        """End it at once, with everything in it. `ended` tells when that is so."""
        ...


class Runtime(Protocol):
    """Starts sandboxes."""

    name: str

    def limits(self) -> dict[str, str]:
        """Which limits hold, and by what: `{"pids": "cgroup", "disk": "tmpfs", …}`."""
        ...

    def start(self, spec: SandboxSpec) -> RunningSandbox:
        """Start one; does not wait for its guest. Raises SandboxError where it cannot even be tried."""
        ...

    def close(self) -> None:
        """Free what the runtime itself holds, after all its sandboxes have ended."""
        ...
