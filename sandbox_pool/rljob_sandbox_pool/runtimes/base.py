"""What the pool asks of a runtime: start one sandbox, know where it is and when it ends, end it.

start ─► located ─► serves ─► failed: it serves no more ─► ended: nothing of it is left
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from rljob.api.rljob_types import SandboxLimits, SandboxPoolSpec


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Pool → runtime: the sandbox to start."""

    id: str
    key: bytes
    """The sandbox's own; see `guest.claims.sandbox_key`."""
    index: int
    """Free among the living sandboxes of this pool manager: where a uid of its own comes from."""
    limits: SandboxLimits
    image: str = ""
    """What it shows; empty where the runtime has but one."""
    writable_paths: tuple[str, ...] = ()
    """Folders besides its own that commands may change."""
    canary: str | None = None
    """Run at the start and after each reset."""


class RunningSandbox(Protocol):
    """One sandbox that was started; its guest may not answer yet."""

    failed: asyncio.Future[str]
    """Done when it can serve no more (again); why, in words. Where nothing outlives that, the same as `ended`."""
    ended: asyncio.Future[str]
    """Done when nothing of the sandbox is left; how it ended, in words."""

    async def locate(self) -> str:
        """URL where its guest listens, or soon will. Raises SandboxError where it will have none."""
        ...

    def trouble(self) -> Trouble | None:
        """What it waits for although nothing is on its way: a node with room, an image that can be pulled."""
        ...

    def kill(self) -> None:
        """End it at once, with everything in it. `ended` tells when that is so."""
        ...


class Trouble(msgspec.Struct, frozen=True):
    """Why sandboxes do not come up."""

    reason: str
    """One word, as for a condition."""
    message: str


class Runtime(Protocol):
    """Starts the sandboxes of a pool, or of several."""

    name: str
    max_starting: int
    """How many of a pool may start at once."""
    start_seconds: float
    """How long a located sandbox's guest may stay silent."""

    def limits(self) -> dict[str, str]:
        """Which limits hold, and by what: `{"pids": "cgroup", "disk": "tmpfs", …}`."""
        ...

    def images(self, spec: SandboxPoolSpec) -> dict[str, int]:
        """What can be claimed from such a pool, with its weight; the first is what a claim gets that names none."""
        ...

    def take_starts(self, wanted: int) -> int:
        """How many of `wanted` sandboxes may be started now; the rest later."""
        ...

    def start(self, spec: SandboxSpec) -> RunningSandbox:
        """Start one; does not wait for its guest. Raises SandboxError where it cannot even be tried."""
        ...

    def is_outdated(self, running: RunningSandbox) -> bool:
        """It was started from an earlier spec of its pool: not used again."""
        ...

    def close(self) -> None:
        """Free what the runtime itself holds, after all its sandboxes have ended."""
        ...


class LocalRuntime:
    """What the runtimes of one machine have in common: one image, no queue before a start."""

    max_starting = 4
    """A start is a tenth of a second of CPU, and the machine has other work."""
    start_seconds = 30.0

    def images(self, spec: SandboxPoolSpec) -> dict[str, int]:
        """See `Runtime`."""
        return {"": 1}

    def take_starts(self, wanted: int) -> int:
        """See `Runtime`."""
        return wanted

    def is_outdated(self, running: RunningSandbox) -> bool:
        """See `Runtime`."""
        return False


class LocalSandbox:
    """What the sandboxes of one machine have in common: their address is known at once, nothing outlives them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.failed = self.ended

    async def locate(self) -> str:
        """See `RunningSandbox`."""
        return self.url

    def trouble(self) -> Trouble | None:
        """See `RunningSandbox`."""
        return None
