"""One leader at a time, by a Lease.

    acquire ─► hold: renew every few seconds ─► lost (somebody else's, or not renewed in time) ─► end the process
                    └─ release: the next one takes over at once

Nobody's clock is compared with another's: a candidate counts the seconds in which it saw the Lease unchanged. A leader
that cannot renew stops before any candidate may start (RENEW_DEADLINE < DURATION).
"""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import structlog

from rljob.clock import Clock, SystemClock
from rljob.kube.client import KubeClient
from rljob.kube.errors import ConflictError, ExistsError, KubeError
from rljob.kube.resources import LEASE, Object

DURATION_SECONDS = 15
"""A leader that was not heard for so long is succeeded."""
RENEW_DEADLINE_SECONDS = 10.0
"""A leader that could not renew for so long stops."""
RETRY_SECONDS = 2.0
"""Between two looks, and two renewals."""
CALL_SECONDS = 4.0

_log = structlog.get_logger("rljob.kube")


class LeaseLostError(Exception):
    """We lead no more: end the process, its successor starts afresh."""


class LeaderLease:
    """Leadership of one process. Use from one event loop.

    Args:
        client: Whom to ask.
        namespace: Where the Lease is.
        name: Its name.
        identity: Ours, unique: the pod's name.
        clock: Time.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.identity = identity
        self.holder = ""
        """Who leads, as last seen."""
        self._client, self._namespace, self._name = client, namespace, name
        self._clock = clock or SystemClock()
        self._seen: tuple[str, str] | None = None
        self._seen_at = self._renewed = float("-inf")
        self._ours: Object | None = None

    @property
    def leads(self) -> bool:
        """We lead, and can still be sure of it."""
        age = self._clock.monotonic() - self._renewed
        return self._ours is not None and age < RENEW_DEADLINE_SECONDS

    async def acquire(self) -> None:
        """Wait until we lead."""
        while True:
            try:
                if await self._try():
                    _log.info("leads", lease=self._name, identity=self.identity)
                    return
            except KubeError as error:
                _log.warning("lease_not_read", lease=self._name, reason=str(error))
            await self._clock.sleep(RETRY_SECONDS * random.uniform(0.8, 1.2))

    async def hold(self) -> None:
        """Renew until that fails for too long or somebody else leads. Raises LeaseLostError."""
        while True:
            await self._clock.sleep(RETRY_SECONDS)
            began = self._clock.monotonic()
            try:
                if not await self._renew(began):
                    raise LeaseLostError(f"lease {self._name} is held by {self.holder}")
            except KubeError as error:
                if not self.leads:
                    raise LeaseLostError(f"lease {self._name} was not renewed: {error}") from None
                _log.warning("lease_not_renewed", lease=self._name, reason=str(error))

    async def release(self) -> None:
        """Let the next one lead now. Failing that, it takes over when the Lease has run out."""
        lease, self._ours = self._ours, None
        if lease is None:
            return
        given_back = {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            try:
                await self._put("PUT", {**lease, "spec": lease["spec"] | given_back})
            except ConflictError:
                # A renewal that was cancelled may have arrived all the same.
                lease = await self._client.get(LEASE, self._name, self._namespace)
                if lease["spec"].get("holderIdentity") == self.identity:
                    await self._put("PUT", {**lease, "spec": lease["spec"] | given_back})
        except KubeError as error:
            _log.warning("lease_not_released", lease=self._name, reason=str(error))

    async def _try(self) -> bool:
        began = self._clock.monotonic()
        lease = await self._client.find(LEASE, self._name, self._namespace)
        try:
            if lease is None:
                new: Object = {"apiVersion": LEASE.api_version, "kind": LEASE.kind}
                new["metadata"] = {"name": self._name, "namespace": self._namespace}
                new["spec"] = self._claim({"leaseTransitions": 0})
                self._became_ours(await self._put("POST", new), began)
                return True
            if not self._is_free(lease):
                return False
            lease["spec"] = self._claim(lease.get("spec") or {}, takes_over=True)
            self._became_ours(await self._put("PUT", lease), began)
        except (ConflictError, ExistsError):
            return False
        return True

    def _is_free(self, lease: Object) -> bool:
        spec = lease.get("spec") or {}
        self.holder = str(spec.get("holderIdentity") or "")
        now, seen = self._clock.monotonic(), (self.holder, str(spec.get("renewTime")))
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        duration = float(spec.get("leaseDurationSeconds") or DURATION_SECONDS)
        return self.holder in ("", self.identity) or now - self._seen_at > duration

    async def _renew(self, began: float) -> bool:
        assert self._ours is not None
        lease = {**self._ours, "spec": self._claim(self._ours["spec"])}
        try:
            self._became_ours(await self._put("PUT", lease), began)
        except ConflictError:
            # Somebody wrote it: a successor, or a human who annotated it.
            found = await self._client.get(LEASE, self._name, self._namespace)
            self.holder = str((found.get("spec") or {}).get("holderIdentity") or "")
            if self.holder != self.identity:
                return False
            self._ours = found
        return True

    def _claim(self, spec: dict[str, Any], *, takes_over: bool = False) -> dict[str, Any]:
        now = datetime.fromtimestamp(self._clock.now(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        claimed = {
            **spec,
            "holderIdentity": self.identity,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": now,
        }
        if takes_over or "acquireTime" not in spec:
            claimed["acquireTime"] = now
            claimed["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + int(takes_over)
        return claimed

    def _became_ours(self, lease: Object, began: float) -> None:
        # Counted from before the call: that is when others may have begun to count.
        self._ours, self._renewed, self.holder = lease, began, self.identity

    async def _put(self, method: str, lease: Object) -> Object:
        name = "" if method == "POST" else self._name
        path = LEASE.path(self._namespace, name)
        return await self._client.call(method, path, body=lease, deadline_seconds=CALL_SECONDS)
