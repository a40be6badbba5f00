"""Keeps what a pool has beside its pods, and says whether the pool may start any.

    spec ─► RuntimeClass there? ─► NetworkPolicy made? ─► may start          Secret, DaemonSet: made beside it
                  │ no                  │ no
                  └─────────────────────┴─► trouble: starts nothing, looks again

Each object is applied when what it should be has changed, and now and then in case somebody has taken it away.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from rljob import broker_token, labels
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.clock import Clock
from rljob.kube.client import KubeClient
from rljob.kube.errors import ForbiddenError, KubeError, NotFoundError
from rljob.kube.resources import (
    DAEMON_SET,
    NETWORK_POLICY,
    RUNTIME_CLASS,
    SECRET,
    Object,
    Resource,
    uid_of,
)
from rljob_sandbox_pool import pool_objects
from rljob_sandbox_pool.cluster_config import PoolManagerConfig
from rljob_sandbox_pool.runtimes.base import Trouble
from rljob_sandbox_pool.runtimes.pod_identity import Owner, owner_of, owner_uid

LOOK_SECONDS = 1.0
AGAIN_SECONDS = 300.0
"""How often what is there is made sure of."""
RETRY_SECONDS = 5.0
"""How soon after a failure of what no sandbox waits for."""
NOT_ISOLATED: Final = "NotIsolated"
NO_RUNTIME_CLASS: Final = "RuntimeClassNotFound"
"""Reasons of a trouble: until it is over the pool starts nothing."""
_NOTHING: Final = "nothing"
_log = structlog.get_logger("rljob.sandbox_pool")


@dataclass
class _Pool:
    """What is known about one SandboxPool, by its uid."""

    needs_policy: bool = True
    runtime_class: str | None = None
    has_policy: bool = False
    policy: Object = field(default_factory=dict)
    """As it was made last."""
    trouble: Trouble | None = None
    done: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Kind → what it was made from (empty: that failed), and when."""


class Surroundings:
    """See the picture above. Belongs to one event loop.

    Args:
        kube: Whom to ask.
        config: The configuration file.
        broker_key: What tokens are made with.
        clock: Time.
    """

    def __init__(
        self, kube: KubeClient, config: PoolManagerConfig, broker_key: bytes, clock: Clock
    ) -> None:
        self._kube, self._config, self._key, self._clock = kube, config, broker_key, clock
        self._pools: dict[str, _Pool] = {}
        self._classes: dict[str, tuple[bool, float]] = {}
        """RuntimeClass → whether it is there, and when that was seen."""
        self._changed = asyncio.Event()

    def expect(self, obj: Object, spec: SandboxPoolSpec) -> None:
        """There is such a pool, or its spec is another one now."""
        known = self._pools.setdefault(uid_of(obj), _Pool())
        known.needs_policy = pool_objects.needs_policy(obj)
        known.runtime_class = spec.runtime_class_name
        # What was made from an earlier spec may let more out.
        known.has_policy &= known.policy == self._policy(owner_of(obj), spec)
        self._changed.set()

    def forget(self, uid: str) -> None:
        """There is no such pool any more; what it had goes with it, by owner reference."""
        self._pools.pop(uid, None)

    def may_start(self, uid: str) -> bool:
        """Nothing is missing that its sandboxes need."""
        if (pool := self._pools.get(uid)) is None:
            return False
        if pool.runtime_class and not self._classes.get(pool.runtime_class, (False, 0.0))[0]:
            return False
        return pool.has_policy or not pool.needs_policy

    def trouble(self, uid: str) -> Trouble | None:
        """What is missing."""
        return pool.trouble if (pool := self._pools.get(uid)) else None

    async def loop(self, pools: Callable[[], Iterable[tuple[Object, SandboxPoolSpec]]]) -> None:
        """For ever: look at every pool, each second and whenever one has changed."""
        while True:
            self._changed.clear()
            for obj, spec in list(pools()):
                if (pool := self._pools.get(uid_of(obj))) is not None:
                    await self._look(pool, obj, spec)
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _look(self, pool: _Pool, obj: Object, spec: SandboxPoolSpec) -> None:
        owner = owner_of(obj)
        pool.trouble = await self._runtime_class(spec) or await self._isolate(pool, owner, spec)
        if pool.trouble is not None:
            return
        if not owner.job and self._config.broker_url:
            token = broker_token.pool_token(self._key, owner.namespace, owner.name)
            secret = pool_objects.claims_secret(owner, self._config.broker_url, token)
            await self._beside(pool, SECRET, secret)
        await self._pre_pull(pool, owner, spec)

    # ── what a start waits for ──

    async def _runtime_class(self, spec: SandboxPoolSpec) -> Trouble | None:
        if not (name := spec.runtime_class_name):
            return None
        now = self._clock.monotonic()
        found, at = self._classes.get(name, (False, float("-inf")))
        if now - at > (AGAIN_SECONDS if found else RETRY_SECONDS):
            try:
                found = await self._kube.find(RUNTIME_CLASS, name) is not None
            except ForbiddenError:
                # Served namespaces only, and no rights elsewhere: the API server refuses the pods, with the name.
                found = True
            except KubeError as error:
                _log.warning("runtime_class_not_read", name=name, reason=str(error))
                return None if found else Trouble(NO_RUNTIME_CLASS, f"{name}: {error}")
            self._classes[name] = (found, now)
        if found:
            return None
        words = f"there is no RuntimeClass {name}; make it, or name another in runtimeClassName"
        return Trouble(NO_RUNTIME_CLASS, words)

    async def _isolate(self, pool: _Pool, owner: Owner, spec: SandboxPoolSpec) -> Trouble | None:
        if not pool.needs_policy:
            return None
        policy = self._policy(owner, spec)
        if not self._is_due(pool, NETWORK_POLICY, digest := _digest(policy), RETRY_SECONDS):
            return pool.trouble if pool.trouble and pool.trouble.reason == NOT_ISOLATED else None
        try:
            await self._apply(NETWORK_POLICY, policy)
        except KubeError as error:
            _log.warning("pool_not_isolated", pool=owner.name, reason=str(error))
            pool.done[NETWORK_POLICY.kind] = ("", self._clock.monotonic())
            return Trouble(NOT_ISOLATED, f"its NetworkPolicy cannot be made: {error}")
        pool.has_policy, pool.policy = True, policy
        pool.done[NETWORK_POLICY.kind] = (digest, self._clock.monotonic())
        return None

    def _policy(self, owner: Owner, spec: SandboxPoolSpec) -> Object:
        return pool_objects.policy(owner, spec, self._config.dns_namespace)

    # ── what nobody waits for ──

    async def _pre_pull(self, pool: _Pool, owner: Owner, spec: SandboxPoolSpec) -> None:
        if spec.pre_pull:
            wanted = pool_objects.pre_pull(owner, spec, self._config.pods())
            await self._beside(pool, DAEMON_SET, wanted)
        elif self._is_due(pool, DAEMON_SET, _NOTHING, RETRY_SECONDS):
            remove = self._remove_pre_pull(owner)
            await self._try(pool, DAEMON_SET, _NOTHING, remove, owner.name)

    async def _remove_pre_pull(self, owner: Owner) -> None:
        name = pool_objects.pre_pull_name(owner)
        found = await self._kube.find(DAEMON_SET, name, owner.namespace)
        if found is not None and owner_uid(found) == owner.uid:
            await self._kube.delete(DAEMON_SET, name, owner.namespace, uid=uid_of(found))

    async def _beside(self, pool: _Pool, resource: Resource, wanted: Object) -> None:
        if self._is_due(pool, resource, digest := _digest(wanted), RETRY_SECONDS):
            name = wanted["metadata"]["name"]
            await self._try(pool, resource, digest, self._apply(resource, wanted), name)

    async def _try(
        self, pool: _Pool, resource: Resource, digest: str, work: Awaitable[None], name: str
    ) -> None:
        try:
            await work
        except NotFoundError:
            digest = ""  # the namespace goes, and the pool with it
        except KubeError as error:
            _log.warning("not_applied", kind=resource.kind, name=name, reason=str(error))
            digest = ""
        pool.done[resource.kind] = (digest, self._clock.monotonic())

    def _is_due(self, pool: _Pool, resource: Resource, digest: str, retry_seconds: float) -> bool:
        made_from, at = pool.done.get(resource.kind, (_NOTHING, float("-inf")))
        age = self._clock.monotonic() - at
        if not made_from:
            return age >= retry_seconds
        return made_from != digest or age >= AGAIN_SECONDS

    async def _apply(self, resource: Resource, wanted: Object) -> None:
        namespace, manager = wanted["metadata"]["namespace"], labels.POOL_FIELD_MANAGER
        await self._kube.apply(resource, wanted, namespace, field_manager=manager)


def _digest(wanted: Object) -> str:
    return json.dumps(wanted, sort_keys=True)
