"""Carries out the actions of a plan, and turns what is refused into data for the next decision.

deletes ─► accounts, files, volumes, Services, policies ─► pools ─► workloads          side by side within a stage
     answered            ─► expectations: pending, going, settled
     refused (403, 422)  ─► expectations: held for a while, and a warning `ApplyFailed`, as an Event would say it
     name is taken       ─► the same, `NameCollision`; what is somebody else's is never touched
     verb is missing     ─► the same, `PermissionDenied`
     a webhook is down   ─► the same, `ApplyFailed`: it may stay so for long
     no answer           ─► KubeError, the pass is repeated
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import groupby

import structlog

from rljob import labels
from rljob.kube import resources
from rljob.kube.client import KubeClient
from rljob.kube.errors import (
    ConflictError,
    ExistsError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
)
from rljob.kube.resources import Object
from rljob_operator.cluster_client import MissingPermissionError, why_forbidden
from rljob_operator.expectations import Expectations
from rljob_operator.observed import ChildKey, Owner
from rljob_operator.plan import FOREGROUND, Action, Verb, is_owned, settled_digest

SIDE_BY_SIDE = 8
"""Calls of one job at the same time."""
APPLY_FAILED = "ApplyFailed"
NAME_COLLISION = "NameCollision"
PERMISSION_DENIED = "PermissionDenied"
WEBHOOK = "failed calling webhook"
"""A 500 that says so: whoever must be asked, such as Kueue, is down, maybe for long. The job says whom it waits for."""
_STAGES = {"SandboxPool": 2, "StatefulSet": 3, "Job": 3}
_log = structlog.get_logger("rljob.operator")


class NameCollisionError(InvalidError):
    """An object of that name is there and belongs to somebody else."""


class Applier:
    """Carries out the actions of one job's plan."""

    def __init__(self, client: KubeClient, owner: Owner, expectations: Expectations) -> None:
        self._client, self._owner, self._expectations = client, owner, expectations
        self._slots = asyncio.Semaphore(SIDE_BY_SIDE)

    async def carry_out(self, actions: Iterable[Action], now: float) -> None:
        """Do them all. Raises KubeError where the API server did not answer, after the rest of the stage."""
        for _, stage in groupby(sorted(actions, key=_stage), key=_stage):
            todo = (self._do(action, now) for action in stage)
            results = await asyncio.gather(*todo, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def _do(self, action: Action, now: float) -> None:
        async with self._slots:
            try:
                await self._call(action, now)
            except (ForbiddenError, InvalidError) as error:
                self._refused(action, await self._explained(action, error), now)
            except KubeError as error:
                if WEBHOOK not in str(error):
                    raise
                self._refused(action, error, now)

    async def _call(self, action: Action, now: float) -> None:
        if action.verb is Verb.DELETE:
            await self._delete(action, now)
            return
        if action.verb is Verb.CREATE:
            answer = await self._create(action)
        else:
            answer = await self._apply(action)
        if answer is None:
            return
        assert action.obj is not None
        self._expectations.written(action.key, action.live, answer, now)
        digest = settled_digest(action.obj, answer)
        self._expectations.settled[action.key] = (str(answer["metadata"].get("uid")), digest)
        _log.info(
            "child",
            verb=action.verb.value,
            kind=action.key.kind,
            name=action.key.name,
            job=self._owner.name,
        )

    async def _create(self, action: Action) -> Object:
        """Make it. What is already there and ours (our copy lagged, or we died before the answer) is taken as made."""
        assert action.obj is not None
        kind, namespace = resources.by_kind(action.key.kind), self._owner.namespace
        path = kind.path(namespace)
        params = {"fieldManager": labels.FIELD_MANAGER}
        if action.key.kind not in FOREGROUND:
            # Server-side apply makes it too, but would also take over what somebody else has made: look first.
            found = await self._client.find(kind, action.key.name, namespace)
            self._check_owner(action.key, found)
            return await self._client.apply(
                kind, action.obj, namespace, field_manager=labels.FIELD_MANAGER
            )
        try:
            return await self._client.call("POST", path, body=action.obj, params=params)
        except ExistsError:
            found = await self._client.get(kind, action.key.name, namespace)
            self._check_owner(action.key, found)
            return found

    def _check_owner(self, key: ChildKey, found: Object | None) -> None:
        if found is not None and not is_owned(found, self._owner.uid):
            message = (
                f"{key.kind} {key.name} exists and does not belong to this RLJob: "
                "remove or rename it, or give the job another name"
            )
            raise NameCollisionError(409, NAME_COLLISION, message)

    async def _apply(self, action: Action) -> Object | None:
        """Set our fields on this very object; None where it is gone or another by now: the watch will tell."""
        assert action.obj is not None
        assert action.live is not None
        kind = resources.by_kind(action.key.kind)
        metadata = {**action.obj["metadata"], "uid": action.live["metadata"]["uid"]}
        body = {**action.obj, "metadata": metadata}
        try:
            return await self._client.apply(
                kind, body, self._owner.namespace, field_manager=labels.FIELD_MANAGER
            )
        except (ConflictError, NotFoundError):
            return None

    async def _delete(self, action: Action, now: float) -> None:
        assert action.live is not None
        uid = str(action.live["metadata"]["uid"])
        propagation = "Foreground" if action.key.kind in FOREGROUND else "Background"
        kind = resources.by_kind(action.key.kind)
        await self._client.delete(
            kind, action.key.name, self._owner.namespace, uid=uid, propagation=propagation
        )
        self._expectations.deleted(uid, now)
        _log.info(
            "child", verb="delete", kind=action.key.kind, name=action.key.name, job=self._owner.name
        )

    async def _explained(self, action: Action, error: KubeError) -> KubeError:
        if not isinstance(error, ForbiddenError):
            return error
        kind = resources.by_kind(action.key.kind)
        verbs: Sequence[str] = ("create", "patch")
        if action.verb is Verb.DELETE:
            verbs = ("delete",)
        for verb in verbs:
            error = await why_forbidden(self._client, error, verb, kind, self._owner.namespace)
            if isinstance(error, MissingPermissionError):
                break
        return error

    def _refused(self, action: Action, error: KubeError, now: float) -> None:
        reason = APPLY_FAILED
        if isinstance(error, NameCollisionError):
            reason = NAME_COLLISION
        elif isinstance(error, MissingPermissionError):
            reason = PERMISSION_DENIED
        warning = warning_of(action.key, self._owner.namespace, reason, str(error))
        self._expectations.refused(action.key, action.wanted, warning, now)
        _log.warning(
            "child_refused",
            verb=action.verb.value,
            kind=action.key.kind,
            name=action.key.name,
            reason=str(error),
        )


def warning_of(key: ChildKey, namespace: str, reason: str, message: str) -> Object:
    """What was refused, in the form of an Event."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "type": "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": key.kind, "name": key.name, "namespace": namespace},
    }


def _stage(action: Action) -> int:
    return 0 if action.verb is Verb.DELETE else _STAGES.get(action.key.kind, 1)
