"""Whose a sandbox pod is, and how the pods of a pool are found: labels, annotations, owner reference. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from rljob import labels
from rljob.api.rljob_types import API_VERSION
from rljob.kube.resources import SANDBOX_POOL, Object

TEMPLATE_HASH: Final = "rljob.dev/template-hash"
IMAGE: Final = "rljob.dev/sandbox-image"
"""Annotations: what the pod was made from, for a pool manager that takes over."""
IMAGE_HASH: Final = "rljob.dev/image-hash"
"""Label: sandboxes of one image find each other."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The SandboxPool object."""

    namespace: str
    name: str
    uid: str
    job: str = ""
    job_uid: str = ""


def owner_of(obj: Object) -> Owner:
    """A SandboxPool object as the owner of its pods."""
    metadata = obj["metadata"]
    given = metadata.get("labels") or {}
    return Owner(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        job=given.get(labels.JOB, ""),
        job_uid=given.get(labels.JOB_UID, ""),
    )


def owner_uid(obj: Object) -> str:
    """uid of the SandboxPool that something belongs to; empty: to none."""
    references = (obj.get("metadata") or {}).get("ownerReferences") or []
    return next((each["uid"] for each in references if each.get("kind") == SANDBOX_POOL.kind), "")


def label_value(name: str, most: int = 63) -> str:
    """A name as a label's value, or of no more characters."""
    if len(name) <= most:
        return name
    return f"{name[: most - 11].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def image_hash(image: str) -> str:
    """An image's name as a label's value."""
    return hashlib.sha256(image.encode()).hexdigest()[:16]


def selector() -> str:
    """Of all sandbox pods."""
    return f"{labels.MANAGED_BY}={labels.POOL_FIELD_MANAGER},{labels.COMPONENT}=sandbox"


def labels_of(owner: Owner, component: str) -> dict[str, str]:
    """Of everything that the pool manager makes for a pool."""
    found = {
        "app.kubernetes.io/name": "rljob",
        labels.COMPONENT: component,
        "app.kubernetes.io/part-of": "rljob",
        labels.MANAGED_BY: labels.POOL_FIELD_MANAGER,
        labels.POOL: label_value(owner.name),
    }
    if owner.job:
        found |= {"app.kubernetes.io/instance": owner.job, labels.JOB: owner.job}
    if owner.job_uid:
        found[labels.JOB_UID] = owner.job_uid
    return found


def reference(owner: Owner, *, controller: bool = True) -> dict[str, Any]:
    """The owner reference.

    Args:
        owner: Whose it is.
        controller: False for what is known by its name: that of a pool of the same name before it may still be there.
    """
    found: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": SANDBOX_POOL.kind,
        "name": owner.name,
        "uid": owner.uid,
    }
    return found | {"controller": True, "blockOwnerDeletion": True} if controller else found
