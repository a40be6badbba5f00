"""Writes the status of SandboxPool objects: each when it has changed, and not too often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from rljob import labels
from rljob.clock import Clock
from rljob.kube.client import KubeClient
from rljob.kube.errors import KubeError
from rljob.kube.informer import Key
from rljob.kube.resources import SANDBOX_POOL, Object
from rljob_sandbox_pool import pool_conditions

_log = structlog.get_logger("rljob.sandbox_pool")


@dataclass
class _Written:
    status: dict[str, Any] = field(default_factory=dict)
    at: float = float("-inf")


class StatusWriter:
    """See the module. Belongs to one event loop.

    Args:
        kube: Whom to tell.
        clock: Time.
    """

    def __init__(self, kube: KubeClient, clock: Clock) -> None:
        self._kube, self._clock = kube, clock
        self._written: dict[Key, _Written] = {}

    def begin(self, obj: Object, key: Key) -> None:
        """An object, with the status that it has."""
        self._written[key] = _Written(dict(obj.get("status") or {}))

    def forget(self, key: Key) -> None:
        """There is no such object any more."""
        self._written.pop(key, None)

    async def write(self, key: Key, wanted: Callable[[Mapping[str, Any], float], Object]) -> None:
        """Write it where it is due.

        Args:
            key: Which object.
            wanted: Its whole status, from what was written last and the time.
        """
        written = self._written.setdefault(key, _Written())
        status, now = wanted(written.status, self._clock.now()), self._clock.monotonic()
        if not pool_conditions.is_due(status, written.status, now - written.at):
            return
        written.at = now
        try:
            await self._kube.patch(
                SANDBOX_POOL,
                key.name,
                {"status": status},
                key.namespace,
                subresource="status",
                field_manager=labels.POOL_FIELD_MANAGER,
            )
        except KubeError as error:
            _log.warning("status_not_written", pool=key.name, reason=str(error))
        else:
            written.status = status
