"""One pass over one RLJob, level-triggered: whatever woke it, it looks at everything and does what is missing.

    observe ─► decide ─► children ─► plan ─► apply ─► status, if it changed ─► events ─► when to look again
     copies     pure      pure       pure    API       API

What the API server refuses (quota, admission, a missing verb, a name that is taken) goes back into the next decision as
a warning. What it does not answer ends the pass, and `wake.py` repeats it. Nothing here needs to have been finished by
the pass before: it may have died anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import structlog

from rljob import labels
from rljob.api.rljob_types import RLJob
from rljob.broker_token import job_token
from rljob.clock import Clock
from rljob.errors import CorruptError, ManifestError
from rljob.kube import resources
from rljob.kube.client import KubeClient
from rljob.kube.errors import ConflictError, NotFoundError
from rljob.kube.resources import RLJOB, name_of, namespace_of, uid_of
from rljob_operator.apply import APPLY_FAILED, Applier, warning_of
from rljob_operator.copies import Jobs
from rljob_operator.events import EventPoster
from rljob_operator.ledgers import Ledgers
from rljob_operator.observe import Observer, State
from rljob_operator.observed import (
    ChildKey,
    ClusterConfig,
    Decision,
    Event,
    Object,
    Observed,
    Owner,
)
from rljob_operator.parse import parse
from rljob_operator.plan import plan
from rljob_operator.render.context import Context
from rljob_operator.render.secrets import decoded, secret_values, store_password
from rljob_operator.status_patch import STATUS_SECONDS, is_urgent, merge_patch, without_nulls
from rljob_operator.wake import GONE

CONFLICTS = 5
"""Reads of a changed object before a write to it is left to the next pass."""

Decide = Callable[[Observed, ClusterConfig], Decision]
Render = Callable[..., list[Object]]

_log = structlog.get_logger("rljob.operator")


class Reconciler:
    """See the picture above.

    Args:
        client: The API server.
        config: The operator's.
        broker_key: For the jobs' tokens.
        jobs: Every RLJob.
        observer: Looks.
        ledgers: Closed when a job is gone.
        poster: Posts events.
        decide: Pure: what should be.
        render: Pure: `render.children.children`.
        crds: CustomResourceDefinitions that exist and matter.
        clock: Time.
    """

    def __init__(
        self,
        client: KubeClient,
        config: ClusterConfig,
        broker_key: bytes,
        *,
        jobs: Jobs,
        observer: Observer,
        ledgers: Ledgers,
        poster: EventPoster,
        decide: Decide,
        render: Render,
        crds: frozenset[str],
        clock: Clock,
    ) -> None:
        self._client, self._config, self._broker_key = client, config, broker_key
        self._jobs, self._observer, self._ledgers, self._poster = jobs, observer, ledgers, poster
        self._decide, self._render, self._crds, self._clock = decide, render, crds, clock
        self._states: dict[str, State] = {}

    async def reconcile(self, uid: str) -> float | None:
        """One pass. Raises KubeError."""
        resource = self._jobs.get(uid)
        if resource is None:
            self._states.pop(uid, None)
            self._observer.forget(uid)
            await self._ledgers.forget(uid)
            return GONE
        if _is_deleted(resource) and labels.FINALIZER not in _finalizers(resource):
            return None
        state = self._states.setdefault(uid, State())
        parsed = parse(resource)
        job = parsed if isinstance(parsed, RLJob) else None
        observed = await self._observer.observe(resource, job, state)
        decision = self._decide(observed, self._config)
        if decision.shape is not None and job is not None:
            await self._bring(observed, decision, job, state)
        await self._end(observed, decision, job, state)
        wait = await self._tell(observed, decision, state)
        return self._next_look(decision, state, wait)

    # ── children ──

    async def _bring(
        self, observed: Observed, decision: Decision, job: RLJob, state: State
    ) -> None:
        """Make the children what they should be; the finalizer stands before the first of them."""
        resource = observed.resource
        owner = Owner(namespace_of(resource), name_of(resource), uid_of(resource))
        if not _is_deleted(resource) and labels.FINALIZER not in _finalizers(resource):
            await self._set_finalizer(resource, present=True)
        now = self._clock.monotonic()
        try:
            desired = self._desired(observed, decision, job, owner)
        except (ManifestError, CorruptError) as error:
            self._not_rendered(owner, state, str(error))
            return
        except Exception as error:  # noqa: BLE001 (a fault of ours must not keep a job from being deleted, or be silent)
            _log.exception("not_rendered", job=owner.name, namespace=owner.namespace)
            self._not_rendered(owner, state, f"cannot be rendered ({type(error).__name__})")
            return
        actions = plan(desired, observed, state.expectations, now)
        state.expectations.forget_refusals(_keys(desired) | observed.children.keys())
        try:
            await Applier(self._client, owner, state.expectations).carry_out(actions, now)
        finally:
            if any(action.key.kind == resources.SECRET.kind for action in actions):
                state.secrets.clear()

    def _not_rendered(self, owner: Owner, state: State, why: str) -> None:
        key = ChildKey(RLJOB.kind, owner.name)
        warning = warning_of(key, owner.namespace, APPLY_FAILED, why)
        state.expectations.refused(key, "rendering", warning, self._clock.monotonic())

    def _desired(
        self, observed: Observed, decision: Decision, job: RLJob, owner: Owner
    ) -> list[Object]:
        children, name = observed.children, owner.name
        secret = children.get(ChildKey("Secret", f"{name}-secrets"))
        values = secret_values(
            Context(job, owner, self._config),
            decoded(secret) if secret else None,
            token=job_token(self._broker_key, owner.namespace, name),
            password=store_password(self._broker_key, owner),
        )
        pinned = children.get(ChildKey("ConfigMap", f"{name}-pinned"))
        return self._render(
            job,
            owner,
            self._config,
            decision.shape,
            secrets=values,
            pinned=pinned,
            crds=self._crds,
        )

    # ── the job itself ──

    async def _end(
        self, observed: Observed, decision: Decision, job: RLJob | None, state: State
    ) -> None:
        """What a decision asks for once: keys removed, finalizer off, suspended, deleted."""
        resource = observed.resource
        if decision.suspend_because and not (resource.get("spec") or {}).get("suspend"):
            await self._patch(resource, {"spec": {"suspend": True}})
        if decision.destroy_ledger and job is not None:
            await self._destroy_ledger(observed, job, state)
        if decision.remove_finalizer:
            await self._set_finalizer(resource, present=False)
        if decision.delete_job:
            await self._client.delete(
                RLJOB, name_of(resource), namespace_of(resource), uid=uid_of(resource)
            )

    async def _destroy_ledger(self, observed: Observed, job: RLJob, state: State) -> None:
        """Remove the job's keys from a Redis that outlives it. One that cannot be reached holds up nothing."""
        redis = job.spec.store.redis
        if redis.url is None and redis.secret_ref is None:
            return
        address = await self._observer.address(observed.resource, job, (), None, state)
        problem = "its Secret holds no URL"
        if address is not None:
            problem = await self._ledgers.destroy(address)
        if problem:
            message = f"the keys of this job may be left in its Redis: {problem}"
            await self._poster.post(
                observed.resource, [Event("Warning", "LedgerNotCleared", message)]
            )

    async def _set_finalizer(self, resource: Object, *, present: bool) -> None:
        """Put ours on or take it off, leaving those of others alone."""
        for _ in range(CONFLICTS):
            others = [item for item in _finalizers(resource) if item != labels.FINALIZER]
            wanted = [*others, labels.FINALIZER] if present else others
            if wanted == _finalizers(resource):
                return
            version = resource["metadata"].get("resourceVersion")
            patch = {"metadata": {"finalizers": wanted, "resourceVersion": version}}
            try:
                await self._patch(resource, patch)
            except ConflictError:
                found = await self._client.find(RLJOB, name_of(resource), namespace_of(resource))
                if found is None or uid_of(found) != uid_of(resource):
                    return
                resource = found
            except NotFoundError:
                return
            else:
                return

    async def _patch(self, resource: Object, patch: Mapping[str, Any]) -> None:
        answer = await self._client.patch(
            RLJOB,
            name_of(resource),
            patch,
            namespace_of(resource),
            field_manager=labels.FIELD_MANAGER,
        )
        self._jobs.wrote(answer)

    # ── what people see ──

    async def _tell(self, observed: Observed, decision: Decision, state: State) -> float | None:
        """Write the status if it changed, then post the events; seconds until a held status may be written."""
        if decision.remove_finalizer or decision.delete_job:
            await self._poster.post(observed.resource, decision.events)
            return None
        resource = observed.resource
        old, new = resource.get("status") or {}, without_nulls(decision.status)
        patch = merge_patch(old, new)
        if patch and patch != state.status_unkept:
            due = state.status_written + STATUS_SECONDS - self._clock.monotonic()
            if due > 0 and not decision.events and not is_urgent(old, new):
                return due
            await self._write_status(resource, patch, new, state)
        await self._poster.post(resource, decision.events)
        return None

    async def _write_status(
        self, resource: Object, patch: Mapping[str, Any], new: Mapping[str, Any], state: State
    ) -> None:
        body = {"metadata": {"uid": uid_of(resource)}, "status": patch}
        try:
            answer = await self._client.patch(
                RLJOB,
                name_of(resource),
                body,
                namespace_of(resource),
                subresource="status",
                field_manager=labels.FIELD_MANAGER,
            )
        except (NotFoundError, ConflictError):
            return  # gone, or another job of that name: kopf will tell
        self._jobs.wrote(answer)
        state.status_written = self._clock.monotonic()
        state.status_unkept = merge_patch(answer.get("status") or {}, new)

    def _next_look(self, decision: Decision, state: State, wait: float | None) -> float | None:
        now, retry = self._clock.monotonic(), state.expectations.next_try()
        waits = [decision.requeue_seconds, wait, None if retry is None else max(0.1, retry - now)]
        return min((seconds for seconds in waits if seconds is not None), default=None)


def _is_deleted(resource: Object) -> bool:
    return "deletionTimestamp" in resource["metadata"]


def _finalizers(resource: Object) -> list[str]:
    return list(resource["metadata"].get("finalizers") or ())


def _keys(objects: list[Object]) -> set[ChildKey]:
    return {ChildKey(item["kind"], item["metadata"]["name"]) for item in objects}
