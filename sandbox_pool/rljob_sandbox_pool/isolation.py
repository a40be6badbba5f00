"""The NetworkPolicy of a pool that no RLJob owns: the operator makes one for a job's own pools only.

Nothing goes out; only the guest's port lets anything in.
"""

from __future__ import annotations

import structlog

from rljob import labels
from rljob.kube.client import KubeClient
from rljob.kube.errors import KubeError
from rljob.kube.resources import NETWORK_POLICY, Object
from rljob_sandbox_pool.runtimes.base import Trouble
from rljob_sandbox_pool.runtimes.pod_identity import Owner, label_value

NOT_ISOLATED = "NotIsolated"
"""Reason of a trouble: without its policy a pool starts nothing."""
_log = structlog.get_logger("rljob.sandbox_pool")


def needs_policy(pool: Object) -> bool:
    """A SandboxPool object whose pods no policy of a job selects, whatever its labels say."""
    references = pool["metadata"].get("ownerReferences") or []
    return all(each.get("kind") != "RLJob" for each in references)


def policy(owner: Owner) -> Object:
    """The whole object. With a dot in its name it is never that of a job, whose names have none."""
    mine = {labels.POOL: label_value(owner.name), labels.COMPONENT: "sandbox"}
    return {
        "apiVersion": NETWORK_POLICY.api_version,
        "kind": NETWORK_POLICY.kind,
        "metadata": {
            "name": f"{label_value(owner.name)}.sandboxes",
            "namespace": owner.namespace,
            "labels": {**mine, labels.MANAGED_BY: labels.POOL_FIELD_MANAGER},
            # not the controller: that of a pool of the same name before it may still be there
            "ownerReferences": [
                {
                    "apiVersion": "rljob.dev/v1alpha1",
                    "kind": "SandboxPool",
                    "name": owner.name,
                    "uid": owner.uid,
                }
            ],
        },
        "spec": {
            "podSelector": {"matchLabels": mine},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"port": labels.GUEST_PORT, "protocol": "TCP"}]}],
        },
    }


async def isolate(kube: KubeClient, owner: Owner) -> Trouble | None:
    """Make the policy; why it could not be, or None."""
    manager = labels.POOL_FIELD_MANAGER
    try:
        await kube.apply(NETWORK_POLICY, policy(owner), owner.namespace, field_manager=manager)
    except KubeError as error:
        _log.warning("pool_not_isolated", pool=owner.name, reason=str(error))
        return Trouble(NOT_ISOLATED, f"its NetworkPolicy cannot be made: {error}")
    return None
