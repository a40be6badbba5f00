"""A sandbox and its broker in memory: files are a dict, commands are a function, deaths are on request."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence

from rljob.errors import DeadlineError, ManifestError, SandboxError
from rljob.sandbox import ExecResult

Shell = Callable[["FakeSandbox", str], ExecResult | str | None]
"""What a command does. A string is its output; None means that the built-in commands have a look."""
Fault = Callable[[str], Awaitable[None]]
"""Called with the name of each operation; may raise or take time."""


async def no_fault(_operation: str) -> None:
    """Nothing goes wrong."""


class FakeSandbox:
    """One claimed sandbox.

    Args:
        sandbox_id: Its id.
        shell: What commands do.
        fault: Called before each operation.
    """

    def __init__(
        self, sandbox_id: str = "box-0", shell: Shell | None = None, fault: Fault = no_fault
    ) -> None:
        self.id = sandbox_id
        self.claim_id = f"claim-of-{sandbox_id}"
        self.files: dict[str, bytes] = {}
        self.env: dict[str, str] = {}
        self.image: str | None = None
        self.commands: list[str] = []
        self.lost = False
        self._shell, self._fault = shell, fault
        self.on_release: Callable[[], None] = lambda: None
        self._released = False

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
        """See `rljob.sandbox.Sandbox.exec`."""
        await self._operation("exec")
        line = command if isinstance(command, str) else " ".join(command)
        self.commands.append(line)
        result = self._shell(self, line) if self._shell is not None else None
        if result is None:
            result = self._builtin(line)
        return (
            ExecResult(exit_code=0, stdout=result, stderr="") if isinstance(result, str) else result
        )

    async def read_file(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """See `rljob.sandbox.Sandbox.read_file`."""
        await self._operation("read_file")
        if path not in self.files:
            raise FileNotFoundError(path)
        if len(self.files[path]) > max_bytes:
            raise ValueError(f"{path} is larger than {max_bytes} bytes")
        return self.files[path]

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `rljob.sandbox.Sandbox.write_file`."""
        await self.write_files({path: data}, mode=mode)

    async def write_files(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """See `rljob.sandbox.Sandbox.write_files`."""
        await self._operation("write_files")
        self.files.update(files)

    async def release(self) -> None:
        """Give it back. A second call does nothing."""
        if not self._released:
            self._released = True
            self.on_release()

    async def _operation(self, name: str) -> None:
        if self._released:
            raise SandboxError(f"sandbox {self.id}: already released")
        if self.lost:
            raise SandboxError(f"sandbox {self.id}: is gone")
        try:
            await self._fault(name)
        except SandboxError:
            self.lost = True
            raise

    def _builtin(self, line: str) -> ExecResult:
        """`cat PATH`, `ls` and `rm -rf -- PATH`; anything else is not found."""
        words = line.split()
        match words:
            case ["cat", path] if path in self.files:
                return ExecResult(exit_code=0, stdout=self.files[path].decode(), stderr="")
            case ["ls", *_]:
                names = "".join(f"{name}\n" for name in sorted(self.files))
                return ExecResult(exit_code=0, stdout=names, stderr="")
            case ["rm", "-rf", "--", path]:
                self.files.pop(path, None)
                return ExecResult(exit_code=0, stdout="", stderr="")
            case _:
                return ExecResult(exit_code=127, stdout="", stderr=f"{words[0]}: not found\n")


class FakeBroker:
    """Claims of a pool in memory; the interface of `rljob.sandbox_client.SandboxClient`.

    Args:
        size: Sandboxes at most.
        shell: What commands do in them.
        fault: Called before each operation, `acquire` included.
        pools: Names it knows; None: every name.
    """

    def __init__(
        self,
        size: int = 1000,
        shell: Shell | None = None,
        fault: Fault = no_fault,
        pools: Sequence[str] | None = None,
    ) -> None:
        self._shell, self._fault, self._pools = shell, fault, pools
        self._free = asyncio.Semaphore(size)
        self._numbers = itertools.count(1)
        self.claimed: dict[str, FakeSandbox] = {}
        """Sandboxes that are claimed now, by claim id."""
        self.most_claimed = 0
        self.num_claims = 0
        self.priorities: list[int] = []
        """Of the claims that were asked for, in order."""
        self.returned: list[str] = []
        """Claim ids given back by `release_claim`."""

    async def acquire(
        self,
        pool: str,
        *,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        ttl_seconds: float = 3600.0,
        timeout: float = 600.0,
        priority: int = 0,
    ) -> FakeSandbox:
        """See `rljob.sandbox_client.SandboxClient.acquire`."""
        if self._pools is not None and pool not in self._pools:
            raise ManifestError("sandbox", f"no pool {pool!r}", "name a pool of spec.sandboxPools")
        self.priorities.append(priority)
        try:
            async with asyncio.timeout(timeout):
                await self._free.acquire()
        except TimeoutError:
            raise DeadlineError(f"acquire: no sandbox within {timeout:g} s") from None
        try:
            await self._fault("acquire")
        except BaseException:
            self._free.release()
            raise
        return self._hand_out(image, env)

    async def release_claim(self, claim_id: str, *, broken: bool = False) -> bool:
        """See `rljob.sandbox_client.SandboxClient.release_claim`."""
        self.returned.append(claim_id)
        if box := self.claimed.get(claim_id):
            await box.release()
        return True

    def _hand_out(self, image: str | None, env: Mapping[str, str] | None) -> FakeSandbox:
        box = FakeSandbox(f"box-{next(self._numbers)}", self._shell, self._fault)
        box.image, box.env = image, dict(env or {})
        box.on_release = lambda: self._take_back(box)
        self.claimed[box.claim_id] = box
        self.num_claims += 1
        self.most_claimed = max(self.most_claimed, len(self.claimed))
        return box

    def _take_back(self, box: FakeSandbox) -> None:
        del self.claimed[box.claim_id]
        self._free.release()
