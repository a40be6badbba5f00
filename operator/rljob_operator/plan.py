"""Desired children × observed children → what to do about it. Pure.

wanted, absent                     create
wanted, there, other than applied  apply      (hash of what is wanted differs, or somebody changed a field of ours)
wanted, there, immutable           nothing    (Jobs, volume claims)
wanted, being deleted              nothing: its end wakes the next pass
not wanted, ours                   delete     (volume claims never: they go with the job)
not wanted, somebody else's        nothing, ever
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rljob import labels
from rljob_operator.compare import contains, project
from rljob_operator.expectations import Expectations
from rljob_operator.observed import ChildKey, Object, Observed

IMMUTABLE = frozenset({"Job", "PersistentVolumeClaim"})
"""Made once and never changed: the API server refuses it, and a running attempt must not change under its pods."""
KEPT = frozenset({"PersistentVolumeClaim", "Secret"})
"""Data: only the end of the job removes them, by their owner reference."""
FOREGROUND = frozenset({"Job"})
"""Deleted after its pods, so that an attempt is there for as long as one of them is."""
_SCALERS = frozenset({"kube-controller-manager"})
"""Field manager of the HorizontalPodAutoscaler, on the scale subresource."""


class Verb(StrEnum):
    """What to do with a child."""

    CREATE = "create"
    APPLY = "apply"
    DELETE = "delete"


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do."""

    verb: Verb
    key: ChildKey
    wanted: str = ""
    """Hash of `obj`."""
    obj: Object | None = None
    """To create or apply, its hash in the annotation."""
    live: Object | None = None
    """As it is observed; to delete or apply only this very object."""


def plan(
    desired: Iterable[Object], observed: Observed, expectations: Expectations, now: float
) -> list[Action]:
    """What makes the observed children the desired ones; deletes first."""
    uid = str(observed.resource["metadata"]["uid"])
    wanted = {key_of(child): child for child in desired}
    # The owner is going: what is there may be scaled down, nothing new is made.
    going = "deletionTimestamp" in observed.resource["metadata"]
    actions: list[Action] = []
    for key, live in observed.children.items():
        if key not in wanted and is_ours(live, uid) and not _stays(key, live):
            actions.append(Action(verb=Verb.DELETE, key=key, wanted="absent", live=live))
    for key, child in wanted.items():
        live = observed.children.get(key)
        if live is None and going:
            continue
        if action := _bring(key, child, live, expectations):
            actions.append(action)
    return [action for action in actions if not expectations.held(action.key, action.wanted, now)]


def _stays(key: ChildKey, live: Object) -> bool:
    return key.kind in KEPT or "deletionTimestamp" in live["metadata"]


def _bring(
    key: ChildKey, child: Object, live: Object | None, expectations: Expectations
) -> Action | None:
    if live is None:
        child, wanted = stamped(child)
        return Action(verb=Verb.CREATE, key=key, wanted=wanted, obj=child)
    if key.kind in IMMUTABLE or "deletionTimestamp" in live["metadata"]:
        return None
    child, wanted = stamped(_without_foreign_replicas(child, live))
    if _annotation(live) == wanted and not _drifted(key, child, live, expectations):
        return None
    return Action(verb=Verb.APPLY, key=key, wanted=wanted, obj=child, live=live)


def _drifted(key: ChildKey, child: Object, live: Object, expectations: Expectations) -> bool:
    """Whether a field of ours has another value. What the API server itself makes of our values is no drift."""
    uid, digest = expectations.settled.get(key, ("", ""))
    if uid == live["metadata"].get("uid") and digest == settled_digest(child, live):
        return False
    return not contains(live, child)


def settled_digest(child: Object, live: Object) -> str:
    """The live values of the fields that we apply, in short."""
    return _digest(project(live, child))


def stamped(child: Object) -> tuple[Object, str]:
    """The child with the hash of itself in its annotation, and that hash."""
    wanted = _digest(child)
    metadata = child["metadata"]
    annotations = {**(metadata.get("annotations") or {}), labels.APPLIED: wanted}
    return {**child, "metadata": {**metadata, "annotations": annotations}}, wanted


def key_of(child: Object) -> ChildKey:
    """Kind and name."""
    return ChildKey(str(child["kind"]), str(child["metadata"]["name"]))


def is_ours(child: Object, uid: str) -> bool:
    """Whether a child may be deleted as the job's: it says so by its label and by its owner reference."""
    label = (child["metadata"].get("labels") or {}).get(labels.JOB_UID)
    return label == uid and is_owned(child, uid)


def is_owned(child: Object, uid: str) -> bool:
    """Whether an object was made for the job, whatever became of its labels."""
    owners = child["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == uid for owner in owners)


def scaler_of(child: Object) -> str:
    """Who else decides `spec.replicas`: a field manager on the scale subresource; empty: nobody."""
    for entry in child["metadata"].get("managedFields") or ():
        fields = (entry.get("fieldsV1") or {}).get("f:spec") or {}
        ours = entry.get("manager") not in _SCALERS
        if entry.get("subresource") == "scale" and "f:replicas" in fields and not ours:
            return str(entry["manager"])
    return ""


def _without_foreign_replicas(child: Object, live: Object) -> Object:
    """Replicas that an autoscaler decides are left to it, unless none are wanted: at 0 it does not act anyway."""
    spec: Mapping[str, Any] = child.get("spec") or {}
    if not spec.get("replicas") or not live["spec"].get("replicas") or not scaler_of(live):
        return child
    return {**child, "spec": {name: value for name, value in spec.items() if name != "replicas"}}


def _annotation(live: Object) -> str:
    return str((live["metadata"].get("annotations") or {}).get(labels.APPLIED, ""))


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]
