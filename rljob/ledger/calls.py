"""What every group of calls shares."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rljob.ledger.connection import Store


class Calls:
    """Base of the mixins that make up `Ledger`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lease_lock = asyncio.Lock()

    @property
    def job(self) -> str:
        """Name of the job whose ledger this is."""
        return self._store.job
