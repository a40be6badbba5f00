"""The manifest as its pods read it, and what of it they start with.

`job.json` leaves defaults out: a newer operator then writes the same file for the same spec, and an older image reads
it although the operator knows keys that the image does not.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rljob.api.base import ApiModel
from rljob.api.rljob_types import RLJob
from rljob_operator.observed import Object
from rljob_operator.render.context import JOB_WIDE, Context

OPERATORS_OWN: tuple[tuple[str, ...], ...] = (
    ("suspend",),
    ("lifecycle",),
    ("scheduling",),
    ("rollout", "replicas"),
    ("rollout", "minReplicas"),
    ("rollout", "maxReplicas"),
    ("sandboxPools",),
)
"""Keys of the spec that only the operator and the pool manager read: a change restarts no rollout pod."""


def job_file(context: Context) -> Object:
    """ConfigMap J-job."""
    owner = context.owner
    # labels and annotations come and go by other hands
    manifest = {
        **_given(context.job),
        "metadata": {"name": owner.name, "namespace": owner.namespace},
    }
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return context.child("v1", "ConfigMap", "job", JOB_WIDE, {"data": {"job.json": text}})


def config_hash(job: RLJob) -> str:
    """Of what a rollout pod reads when it starts."""
    spec = _given(job)["spec"]
    for path in OPERATORS_OWN:
        at: Any = spec
        for key in path[:-1]:
            at = at.get(key, {})
        at.pop(path[-1], None)
    return _hash(spec)


def spec_hash(job: RLJob) -> str:
    """Of everything that a person wrote."""
    return _hash(_given(job)["spec"])


def _given(job: RLJob) -> dict[str, Any]:
    def dumped(model: ApiModel) -> dict[str, Any]:
        return model.model_dump(mode="json", exclude_defaults=True, exclude_none=True)

    values: dict[str, Any] = {"apiVersion": job.api_version, "kind": job.kind, **dumped(job)}
    # these two have a default only for the modes that refuse them
    if "trainer" in job.spec.model_fields_set:
        values["spec"]["trainer"] = dumped(job.spec.trainer)
    if "train" in job.spec.data.model_fields_set:
        values["spec"].setdefault("data", {})["train"] = dumped(job.spec.data.train)
    return values


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
