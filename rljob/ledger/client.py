"""`Ledger`: the client that workers, trainer, operator and tools share.

redis-py is imported when a ledger is connected, not before: `rljob --help` must stay fast.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rljob.ledger.observer_calls import ObserverCalls
from rljob.ledger.trainer_calls import TrainerCalls
from rljob.ledger.validation_calls import ValidationCalls
from rljob.ledger.worker_calls import WorkerCalls


class Ledger(WorkerCalls, TrainerCalls, ValidationCalls, ObserverCalls):
    """One job's ledger. Every call is one script, is safe to repeat, and ends by its deadline.

    A call that cannot reach the store is repeated until `deadline_seconds` and then raises `StoreError`; later calls
    connect again by themselves. Calls may run concurrently.
    """

    @classmethod
    async def connect(cls, url: str, job: str, *, deadline_seconds: float = 30.0) -> Self:
        """Reach the store.

        Args:
            url: `redis://`, `rediss://` or `unix://`, with the password in it.
            job: Name of the job; all its keys begin with `rljob:{job}:`.
            deadline_seconds: For this and for each later call.

        Raises:
            StoreError: it cannot be reached, or refuses this client.
        """
        from rljob.ledger.connection import Store

        ledger = cls(Store(url, job, deadline_seconds))
        try:
            await ledger._store.command("PING")
        except BaseException:
            await ledger.aclose()
            raise
        return ledger

    async def aclose(self) -> None:
        """Close every connection."""
        await self._store.close()

    async def __aenter__(self) -> Self:
        """The ledger itself; leaving the block closes it."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close every connection."""
        await self.aclose()
