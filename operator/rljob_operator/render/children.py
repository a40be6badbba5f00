"""RLJob → the Kubernetes objects that should exist now: pure.

    rendered(context) ─ all that the job can have ──┐
    J-pinned          ─ as it was rendered first ───┴─► merge ─► shaped(…, Shape) ─► + Secret, PodMonitor, J-pinned

A `Shape` only chooses among rendered objects, numbers Jobs and sets replicas, so what is pinned is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rljob import labels
from rljob.api.rljob_types import RLJob
from rljob_operator.observed import ClusterConfig, Object, Owner, Shape
from rljob_operator.render import network, pools, secrets, storage, upkeep, workloads
from rljob_operator.render import pinned as pins
from rljob_operator.render.config import job_file, spec_hash
from rljob_operator.render.context import Context


def children(
    job: RLJob,
    owner: Owner,
    config: ClusterConfig,
    shape: Shape,
    *,
    secrets: Mapping[str, str],
    pinned: Mapping[str, Any] | None,
    crds: frozenset[str] = frozenset(),
) -> list[Object]:
    """Every object that should exist now, in the order in which to create them.

    Args:
        job: The manifest.
        owner: The RLJob.
        config: The operator's.
        shape: What should be up.
        secrets: Values of the Secret, see `render.secrets`.
        pinned: ConfigMap J-pinned as it exists; None where there is none.
        crds: Names of the CustomResourceDefinitions that exist and matter.

    Raises:
        ManifestError: what only rendering can know is wrong (`check` lists all of it).
        CorruptError: the pinned rendering does not decode.
    """
    context = Context(job, owner, config)
    kept = pins.unpinned(pinned, owner.uid) if pinned is not None else None
    spec = spec_hash(job)
    if kept is None or pinned is None:
        objects = rendered(context)
        pin = pins.pin(context, objects, spec)
    else:
        changed = kept.spec_hash != spec
        objects = pins.merge(kept.objects, rendered(context)) if changed else kept.objects
        body = {key: pinned[key] for key in ("data", "binaryData")}
        pin = context.child("v1", "ConfigMap", pins.SUFFIX, "job", body)
    return [
        pin,
        _secret(context, secrets),
        *shaped(objects, shape),
        *upkeep.monitor(context, crds),
    ]


def rendered(context: Context) -> list[Object]:
    """All that the job can have, each Job once, without a number.

    Raises:
        ManifestError: see `children`.
    """
    storage.refuse_local_artifacts(context.job)
    return [
        upkeep.account(context),
        job_file(context),
        *storage.claims(context),
        *network.policies(context),
        *network.services(context),
        *upkeep.budgets(context),
        *workloads.store(context),
        workloads.prepare(context),
        *pools.pools(context),
        workloads.rollouts(context),
        workloads.trainer(context),
    ]


def shaped(objects: Iterable[Object], shape: Shape) -> list[Object]:
    """Those objects that the shape wants, with its numbers."""
    return [made for item in objects for made in _shaped(item, shape)]


def _shaped(item: Object, shape: Shape) -> list[Object]:
    component = item["metadata"]["labels"][labels.COMPONENT]
    match item["kind"], component:
        case "StatefulSet", "store":
            return [_replicas(item, 1 if shape.store else 0)]
        case "StatefulSet", _:
            return [] if shape.rollouts is None else [_replicas(item, shape.rollouts)]
        case "Job", "prepare":
            return _numbered(item, shape.prepare_attempt)
        case "Job", _:
            return _numbered(item, shape.trainer_attempt)
        case pools.KIND, _:
            return [item] if shape.pools else []
        case _:
            return [item]


def _replicas(item: Object, count: int) -> Object:
    return {**item, "spec": {**item["spec"], "replicas": count}}


def _numbered(item: Object, attempt: int | None) -> list[Object]:
    if attempt is None:
        return []
    metadata, template = item["metadata"], item["spec"]["template"]
    name = metadata["name"].replace(workloads.ATTEMPT, str(attempt))
    pods = {**template, "metadata": _marked(template["metadata"], attempt)}
    return [
        {
            **item,
            "metadata": {**_marked(metadata, attempt), "name": name},
            "spec": {**item["spec"], "template": pods},
        }
    ]


def _marked(metadata: Mapping[str, Any], attempt: int) -> dict[str, Any]:
    return {**metadata, "labels": {**metadata["labels"], labels.ATTEMPT: str(attempt)}}


def _secret(context: Context, values: Mapping[str, str]) -> Object:
    return secrets.secret(context, values)
