"""Sandboxes as everybody but the pool manager sees them: protocol and results.

The clients are `rljob.sandbox_client`, which claims, and `rljob.claimed_sandbox`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class ExecResult(msgspec.Struct, kw_only=True):
    """How a command in a sandbox ended."""

    exit_code: int
    """The process's exit code; 128 + signal where a signal ended it; 124 where the timeout did."""
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    """Output past the limit was dropped."""
    seconds: float = 0.0


class BytesResult(msgspec.Struct, kw_only=True):
    """`ExecResult` with output as it was written."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    seconds: float = 0.0


class ClaimAnswer(msgspec.Struct):
    """Broker → client: where the claimed sandbox is, and what opens it."""

    claim_id: str
    sandbox_id: str
    url: str
    token: str
    boot_nonce: str


class ClaimStatus(msgspec.Struct):
    """Broker → client: one claim as `GET /v1/claims` tells it."""

    claim_id: str
    sandbox_id: str
    pool: str
    image: str
    owner: str
    seconds_left: float


class PoolStatus(msgspec.Struct):
    """Broker → client: one pool as `GET /v1/pools` tells it."""

    name: str
    runtime: str
    warm: int
    max: int
    ready: int
    claimed: int
    starting: int
    resetting: int
    quarantined: int = 0
    """Did not verify after a reset; kept for a look."""
    waiting: int = 0
    """Claims that wait for a sandbox."""
    started_total: int = 0
    failed_total: int = 0
    limits: dict[str, str] = {}
    """Which limits hold on this machine, and by what (`pids: cgroup`)."""


class Sandbox(Protocol):
    """One claimed sandbox. Every method raises `SandboxError` when the sandbox is lost."""

    id: str

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_output_bytes: int = 1_000_000,
    ) -> ExecResult:
        """Run argv (a sequence) or a shell line (a string). A timeout kills the whole process group and is a result."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """Read a file.

        Raises FileNotFoundError, IsADirectoryError, PermissionError, ValueError (larger than `max_bytes`).
        """
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making its parent folders. Raises PermissionError, IsADirectoryError, OSError (no space)."""
        ...

    async def write_files(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """Write several files in one call, in order; those before a failure stay written. Errors as `write_file`."""
        ...
