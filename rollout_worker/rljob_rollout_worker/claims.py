"""Claims of this worker, so that none outlives it for long.

A worker that is killed leaves its sandboxes claimed until their time to live ends, which is as long
as an episode may take. So each claim is noted in a small journal in the artifact store, and the
next start of the worker gives back what it finds there. The journal is a hint, never a lock: the
claim itself lives in the sandbox, and the time to live still ends what the journal missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rljob.errors import DeadlineError
from rljob.sandbox import Sandbox

CLAIM_SLICE_SECONDS = 10.0
"""One request to the broker waits so long at most; what a cancelled episode may still hold its place in the queue."""

STRAY_SECONDS = 2.0
"""What the end of the worker waits for a claim that was under way."""
JOURNAL_NOTES = 10_000
"""After so many lines the journal is written anew with the open claims alone."""


class Box(Sandbox, Protocol):
    """A claimed sandbox."""

    claim_id: str

    async def release(self) -> None:
        """Give it back; never raises."""
        ...


class Broker(Protocol):
    """What of `rljob.sandbox_client.SandboxClient` the worker uses."""

    async def acquire(
        self,
        pool: str,
        *,
        image: str | None,
        env: Mapping[str, str] | None,
        ttl_seconds: float,
        timeout: float,
        priority: int,
    ) -> Box:
        """Claim a sandbox. Raises DeadlineError, ManifestError, SandboxError."""
        ...

    async def release_claim(self, claim_id: str, *, broken: bool = False) -> bool:
        """Give a claim back by its id."""
        ...


class Claims:
    """Claims and gives back, with the journal.

    Args:
        broker: Client of the broker.
        journal: File of open claims; its folder is made.
    """

    def __init__(self, broker: Broker, journal: Path) -> None:
        journal.parent.mkdir(parents=True, exist_ok=True)
        self._broker, self._journal = broker, journal
        self._open: set[str] = set()
        self._notes = 0
        self._strays: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Sandboxes held now."""
        return len(self._open)

    async def recover(self) -> int:
        """Give back what an earlier start of this worker held; how many those were."""
        found = self._journal.read_text().split() if self._journal.exists() else []
        left = {name[1:] for name in found if name.startswith("+")} - {
            name[1:] for name in found if name.startswith("-")
        }
        await asyncio.gather(*(self._broker.release_claim(claim, broken=True) for claim in left))
        self._journal.write_text("")
        return len(left)

    async def acquire(
        self,
        pool: str,
        *,
        image: str | None,
        env: Mapping[str, str],
        ttl_seconds: float,
        timeout: float,
        priority: int = 0,
    ) -> Box:
        """Claim a sandbox; a caller that is cancelled meanwhile leaves nothing claimed.

        Raises:
            DeadlineError, ManifestError, SandboxError: see `SandboxClient.acquire`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            left = end - loop.time()
            request = self._broker.acquire(
                pool,
                image=image,
                env=env,
                ttl_seconds=ttl_seconds,
                timeout=max(min(left, CLAIM_SLICE_SECONDS), 0.1),
                priority=priority,
            )
            task = asyncio.ensure_future(request)
            try:
                box = await asyncio.shield(task)
            except DeadlineError:
                if left <= CLAIM_SLICE_SECONDS:
                    raise
                continue
            except asyncio.CancelledError:
                self._adopt(task)
                raise
            self._note("+", box.claim_id)
            return box

    async def release(self, box: Box) -> None:
        """Give a sandbox back; never raises."""
        await box.release()
        self._note("-", box.claim_id)

    async def aclose(self) -> None:
        """Give back claims that nobody wants any more; those that are not granted soon are let go."""
        if self._strays:
            await asyncio.wait(self._strays, timeout=STRAY_SECONDS)
        for stray in list(self._strays):
            stray.cancel()

    def _adopt(self, task: asyncio.Task[Box]) -> None:
        stray = asyncio.create_task(self._return(task), name="stray-claim")
        self._strays.add(stray)
        stray.add_done_callback(self._strays.discard)

    async def _return(self, task: asyncio.Task[Box]) -> None:
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(outcome, BaseException):
            await outcome.release()

    def _note(self, sign: str, claim_id: str) -> None:
        (self._open.add if sign == "+" else self._open.discard)(claim_id)
        self._notes += 1
        if not self._open or self._notes > JOURNAL_NOTES:
            self._journal.write_text("".join(f"+{claim}\n" for claim in self._open))
            self._notes = 0
            return
        with self._journal.open("a") as file:
            file.write(f"{sign}{claim_id}\n")
