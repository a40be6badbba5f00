"""The ledger as the driver sees it: looked at, never changed; a store that is down just has nothing to say."""

from __future__ import annotations

import asyncio
from typing import Protocol

from rljob.clock import Clock
from rljob.errors import StoreError
from rljob.ledger import Ledger, LedgerSnapshot

_CALL_SECONDS = 3.0


class Observer(Protocol):
    """What the driver asks of the ledger."""

    async def snapshot(self) -> LedgerSnapshot | None:
        """The state now; None while the store cannot be asked."""
        ...

    async def outcome(self, deadline_seconds: float) -> tuple[str | None, str]:
        """(phase, message) if the job has ended, else (None, ""); None too when the store cannot be asked in time."""
        ...


class LedgerObserver:
    """Over the store of a run."""

    def __init__(self, url: str, job: str, clock: Clock) -> None:
        self._url, self._job, self._clock = url, job, clock
        self._ledger: Ledger | None = None
        self._connecting = asyncio.Lock()

    async def ledger(self) -> Ledger:
        """The connected ledger.

        Raises:
            StoreError: the store cannot be reached now.
        """
        async with self._connecting:
            if self._ledger is None:
                self._ledger = await Ledger.connect(
                    self._url, self._job, deadline_seconds=_CALL_SECONDS
                )
        return self._ledger

    async def snapshot(self) -> LedgerSnapshot | None:
        """See `Observer.snapshot`."""
        try:
            return await (await self.ledger()).snapshot()
        except StoreError:
            return None

    async def outcome(self, deadline_seconds: float) -> tuple[str | None, str]:
        """See `Observer.outcome`."""
        deadline = self._clock.monotonic() + deadline_seconds
        while True:
            try:
                snapshot = await (await self.ledger()).snapshot()
                return snapshot.phase, snapshot.message
            except StoreError:
                if self._clock.monotonic() > deadline:
                    return None, ""
                await self._clock.sleep(0.2)

    async def aclose(self) -> None:
        """Close the connection."""
        if self._ledger is not None:
            await self._ledger.aclose()
