"""Deletes sandbox pods whose SandboxPool is no more.

Owner references do so too, as long as somebody collects garbage, and nobody has cut them. A pod goes when its
SandboxPool was missing from the copy for a minute, and the API server, asked by name, knows no such uid either. What
another controller made, with labels like ours, is that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal

import structlog

from rljob import telemetry
from rljob.clock import Clock
from rljob.kube.client import KubeClient
from rljob.kube.errors import KubeError
from rljob.kube.resources import POD, SANDBOX_POOL, Object, name_of, namespace_of, uid_of
from rljob_sandbox_pool.runtimes.pod_identity import owner_uid

GRACE_SECONDS = 60.0
LOOK_SECONDS = 15.0
PAUSE_SECONDS = 0.2
"""Between two deletions."""
MAX_AT_ONCE: Final = 50
"""Pods of one look; the next one goes on."""
_log = structlog.get_logger("rljob.sandbox_pool")


class Reaper:
    """See the module. Belongs to one event loop.

    Args:
        kube: Whom to ask.
        mode: `dry-run` only says which pods would go.
        clock: Time.
        pods: All sandbox pods, as the informers have them.
        owners: uids of all SandboxPool objects.
        may: Whether we may still delete anything.
    """

    def __init__(
        self,
        kube: KubeClient,
        mode: Literal["delete", "dry-run", "off"],
        clock: Clock,
        *,
        pods: Callable[[], Iterable[Object]],
        owners: Callable[[], set[str]],
        may: Callable[[], bool],
    ) -> None:
        self._kube, self._mode, self._clock = kube, mode, clock
        self._pods, self._owners, self._may = pods, owners, may
        self._since: dict[str, float] = {}
        """uid of a pod → when it was first seen without its SandboxPool."""
        self._told: set[str] = set()

    async def loop(self) -> None:
        """For ever."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            if self._mode != "off":
                await self.look()

    async def look(self) -> None:
        """Once."""
        owners, now = self._owners(), self._clock.monotonic()
        pods = [pod for pod in self._pods() if not _is_anothers(pod)]
        lost = {uid_of(pod): pod for pod in pods if owner_uid(pod) not in owners}
        self._since = {uid: self._since.get(uid, now) for uid in lost}
        self._told &= lost.keys()
        due = [pod for uid, pod in lost.items() if now - self._since[uid] >= GRACE_SECONDS]
        going = [pod for pod in due if not pod["metadata"].get("deletionTimestamp")]
        for pod in going[:MAX_AT_ONCE]:
            if not self._may():
                return
            await self._reap(pod)

    async def _reap(self, pod: Object) -> None:
        name, namespace = name_of(pod), namespace_of(pod)
        if self._mode == "dry-run" and uid_of(pod) in self._told:
            return
        try:
            if await self._has_owner(pod):
                return
            if self._mode == "delete":
                await self._kube.delete(POD, name, namespace, uid=uid_of(pod), grace_seconds=0)
        except KubeError as error:
            _log.warning("orphan_not_deleted", namespace=namespace, pod=name, reason=str(error))
        else:
            telemetry.SANDBOX_ORPHANS.inc(mode=self._mode)
            self._told.add(uid_of(pod))
            _log.warning("orphan", namespace=namespace, pod=name, mode=self._mode)
        await self._clock.sleep(PAUSE_SECONDS)

    async def _has_owner(self, pod: Object) -> bool:
        """As the API server says now."""
        references = pod["metadata"].get("ownerReferences") or []
        for each in references:
            if each.get("kind") == SANDBOX_POOL.kind:
                found = await self._kube.find(SANDBOX_POOL, each["name"], namespace_of(pod))
                return found is not None and uid_of(found) == each["uid"]
        return False


def _is_anothers(pod: Object) -> bool:
    references = pod["metadata"].get("ownerReferences") or []
    controllers = [each.get("kind") for each in references if each.get("controller")]
    return bool(controllers) and SANDBOX_POOL.kind not in controllers
