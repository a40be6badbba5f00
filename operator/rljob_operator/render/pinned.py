"""The rendering that a job is pinned to: an operator upgrade must restart nothing.

    first rendering ─ pin ─► ConfigMap J-pinned (compressed) + hash of the spec
    later           ─ unpinned ─► the same objects; where the spec has changed since, the fields of MUTABLE come from
                                  the new rendering

Not pinned are Secrets (made once, never rendered again), and what no pod is made from (UNPINNED).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rljob import labels
from rljob.errors import CorruptError, ManifestError
from rljob_operator.observed import Object
from rljob_operator.render.context import JOB_WIDE, Context

SUFFIX, KEY, SPEC_HASH = "pinned", "children", "spec-hash"
LIMIT_BYTES = 900 * 1024
"""An object may have 1 MiB, metadata included."""
UNPINNED = ("Secret", "PodMonitor")

Path = tuple[str, ...]


class Mutable(NamedTuple):
    """A field that follows the spec of a job that runs already."""

    kind: str
    component: str
    path: Path
    why: str


_TEMPLATE: Path = ("spec", "template")
MUTABLE = (
    Mutable(
        "ConfigMap", JOB_WIDE, ("data", "job.json"), "deadlines, steps, pools: read by the pods"
    ),
    Mutable(
        "StatefulSet",
        "rollout",
        (*_TEMPLATE, "metadata", "annotations", labels.CONFIG_HASH),
        "rollout pods read the manifest when they start: one after the other drains and comes back",
    ),
    Mutable(
        "StatefulSet",
        "rollout",
        (*_TEMPLATE, "spec", "terminationGracePeriodSeconds"),
        "follows drainSeconds",
    ),
    Mutable("SandboxPool", "sandbox", ("spec", "warm"), "a pool grows and shrinks at any time"),
    Mutable("SandboxPool", "sandbox", ("spec", "max"), "a pool grows and shrinks at any time"),
)
"""Replicas are no part of this table: they are the shape's, not the rendering's."""


class Pinned(NamedTuple):
    """What a ConfigMap J-pinned holds."""

    spec_hash: str
    objects: list[Object]


def pin(context: Context, objects: Iterable[Object], spec_hash: str) -> Object:
    """The ConfigMap that holds a rendering.

    Raises:
        ManifestError: it is too large for one object.
    """
    kept = [item for item in objects if item["kind"] not in UNPINNED]
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(packed) > LIMIT_BYTES:
        raise ManifestError(
            "spec",
            f"its objects take {len(packed) // 1024} KiB compressed, of {LIMIT_BYTES // 1024} that fit",
            "make templates and prompts smaller",
        )
    body = {"data": {SPEC_HASH: spec_hash}, "binaryData": {KEY: packed}}
    return context.child("v1", "ConfigMap", SUFFIX, JOB_WIDE, body)


def unpinned(config_map: Mapping[str, Any], uid: str) -> Pinned | None:
    """What was pinned for the job of that uid; None where the ConfigMap is another job's of the same name.

    Raises:
        CorruptError: it does not decode.
    """
    owners: Sequence[Mapping[str, Any]] = config_map["metadata"].get("ownerReferences") or []
    if not any(owner.get("uid") == uid for owner in owners):
        return None
    try:
        packed = base64.b64decode(config_map["binaryData"][KEY], validate=True)
        objects = json.loads(zlib.decompress(packed))
        return Pinned(config_map["data"][SPEC_HASH], objects)
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        name = config_map["metadata"].get("name")
        raise CorruptError(
            f"ConfigMap {name} does not decode ({error!r}); delete it, and the job is rendered anew"
        ) from None


def merge(pinned: Iterable[Object], fresh: Iterable[Object]) -> list[Object]:
    """The pinned objects with the fields of `MUTABLE` from a rendering of the spec as it is now."""
    now = {_key(item): item for item in fresh}
    merged: list[Object] = []
    for item in pinned:
        found = item
        for field in MUTABLE:
            if _applies(field, item) and _key(item) in now:
                found = _with(found, now[_key(item)], field.path)
        merged.append(found)
    return merged


def _applies(field: Mutable, item: Object) -> bool:
    component = item["metadata"]["labels"][labels.COMPONENT]
    return (item["kind"], component) == (field.kind, field.component)


def _key(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _with(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`old` with the value at `path` of `new`, where both have one."""
    head, *rest = path
    if head not in old or head not in new:
        return dict(old)
    value = _with(old[head], new[head], tuple(rest)) if rest else new[head]
    return {**old, head: value}
