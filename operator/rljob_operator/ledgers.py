"""The jobs' ledgers as the operator sees them: looked at every few seconds, one connection per job.

    view(uid, address) ─► fresh enough? the same again : connect (bounded) ─► snapshot ─► kept with its age
                               store is away: the error, and a pause that doubles

The job's own Valkey is reached at its pod's address: no name has to be resolved, and a pod that moved is a new address.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from rljob.clock import Clock, SystemClock
from rljob.errors import RLJobError, StoreError
from rljob.ledger import Ledger, LedgerSnapshot
from rljob_operator.observed import LedgerView

REFRESH_SECONDS = 3.0
CALL_SECONDS = 2.0
"""Of a connect and of a look; a pass waits no longer for the store."""
AT_ONCE = 8
"""Looks at the same time, over all jobs."""
DESTROY_SECONDS = 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 30.0


class Address(NamedTuple):
    """Where a ledger is."""

    url: str
    name: str
    """`RLJob.ledger_name`."""


@dataclass
class _Entry:
    address: Address
    ledger: Ledger | None = None
    snapshot: LedgerSnapshot | None = None
    taken: float = float("-inf")
    error: str = ""
    failures: int = 0
    next_look: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Ledgers:
    """See the picture above. Belongs to one event loop."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._entries: dict[str, _Entry] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)

    def last(self, uid: str) -> LedgerSnapshot | None:
        """What was seen last, however old; for metrics, from any thread."""
        entry = self._entries.get(uid)
        return entry.snapshot if entry else None

    def unasked(self, uid: str, why: str = "") -> LedgerView:
        """The last view, when the store cannot be asked now; `why`, where that is more than a store on its way."""
        entry = self._entries.get(uid)
        return LedgerView(error=why) if entry is None else self._view(entry, why)

    async def view(self, uid: str, address: Address) -> LedgerView:
        """The ledger now, or as it was seen last and why it was not seen now."""
        entry = self._entries.get(uid)
        if entry is None:
            entry = self._entries[uid] = _Entry(address)
        async with entry.lock:
            if entry.address != address:
                await self._disconnect(entry)
                entry.address, entry.failures, entry.next_look = address, 0, float("-inf")
            if self._clock.monotonic() >= entry.next_look:
                async with self._slots:
                    await self._look(entry)
        return self._view(entry, entry.error)

    async def _look(self, entry: _Entry) -> None:
        try:
            async with asyncio.timeout(CALL_SECONDS + 1.0):
                if entry.ledger is None:
                    url, name = entry.address
                    entry.ledger = await Ledger.connect(url, name, deadline_seconds=CALL_SECONDS)
                entry.snapshot = await entry.ledger.snapshot()
        except (RLJobError, TimeoutError) as error:
            entry.error = str(error) or "the store did not answer in time"
            entry.failures += 1
            pause = FIRST_PAUSE_SECONDS * 2.0 ** min(entry.failures - 1, 8)
            entry.next_look = self._clock.monotonic() + min(LONGEST_PAUSE_SECONDS, pause)
            await self._disconnect(entry)
            return
        entry.error, entry.failures, entry.taken = "", 0, self._clock.monotonic()
        entry.next_look = entry.taken + REFRESH_SECONDS

    def _view(self, entry: _Entry, error: str) -> LedgerView:
        age = max(0.0, self._clock.monotonic() - entry.taken) if entry.snapshot else 0.0
        return LedgerView(snapshot=entry.snapshot, age_seconds=age, error=error)

    async def destroy(self, address: Address) -> str:
        """Remove every key of a job; what went wrong, or empty. Ends by its deadline."""
        try:
            async with asyncio.timeout(DESTROY_SECONDS):
                async with await Ledger.connect(
                    address.url, address.name, deadline_seconds=DESTROY_SECONDS
                ) as ledger:
                    await ledger.destroy()
        except TimeoutError:
            return f"the store did not answer within {DESTROY_SECONDS:g} s"
        except RLJobError as error:
            return str(error)
        return ""

    async def forget(self, uid: str) -> None:
        """The job is gone, or its store is meant to be down."""
        if entry := self._entries.pop(uid, None):
            await self._disconnect(entry)

    async def aclose(self) -> None:
        """Close every connection."""
        for uid in list(self._entries):
            await self.forget(uid)

    async def _disconnect(self, entry: _Entry) -> None:
        ledger, entry.ledger = entry.ledger, None
        if ledger is not None:
            try:
                async with asyncio.timeout(1.0):
                    await ledger.aclose()
            except (StoreError, TimeoutError, OSError):
                pass  # it was broken already
