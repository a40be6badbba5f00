"""What a pool has in its namespace beside its pods. Pure; `surroundings` makes and removes them.

NetworkPolicy POOL.sandboxes   of a pool that no RLJob owns: who may talk to its sandboxes, and they to whom
Secret POOL-claims             of a pool without a job: where claims go, and the token that opens this pool alone
DaemonSet POOL-pre-pull        with prePull: brings the images to every node that may run the pool
"""

from __future__ import annotations

import base64
from typing import Any, Final

from rljob import labels
from rljob.api import egress
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.kube.resources import DAEMON_SET, NETWORK_POLICY, SECRET, Object
from rljob_sandbox_pool import bundle
from rljob_sandbox_pool.runtimes.pod_identity import Owner, label_value, labels_of, reference
from rljob_sandbox_pool.runtimes.pod_template import (
    GID,
    GUEST_PATH,
    PodConfig,
    container_security,
    guest_container,
    placement,
)

SECRET_TYPE: Final = "rljob.dev/claims"
"""A type of its own: a type never changes, so an apply cannot take over a person's Secret of the same name."""
PRE_PULL: Final = "pre-pull"
_IDLE: Final = {
    "requests": {"cpu": "1m", "memory": "8Mi"},
    "limits": {"cpu": "100m", "memory": "32Mi"},
}


def needs_policy(pool: Object) -> bool:
    """A SandboxPool object whose pods no policy of a job selects, whatever its labels say."""
    references = pool["metadata"].get("ownerReferences") or []
    return all(each.get("kind") != "RLJob" for each in references)


def policy(owner: Owner, spec: SandboxPoolSpec, dns_namespace: str) -> Object:
    """Who may talk to whom. With a dot in its name it is never that of a job, whose names have none."""
    selected = {labels.POOL: label_value(owner.name), labels.COMPONENT: "sandbox"}
    found: dict[str, Any] = {
        "podSelector": {"matchLabels": selected},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"ports": [{"port": labels.GUEST_PORT, "protocol": "TCP"}]}],
        # said even where it is empty: a key that is left out stays as somebody else has set it
        "egress": egress.rules(spec, dns_namespace=dns_namespace, gateways=None),
    }
    return {
        "apiVersion": NETWORK_POLICY.api_version,
        "kind": NETWORK_POLICY.kind,
        "metadata": _metadata(owner, f"{label_value(owner.name)}.sandboxes", "sandbox"),
        "spec": found,
    }


def claims_secret(owner: Owner, url: str, token: str) -> Object:
    """What a person needs to claim from this pool."""
    data = {"url": url, "token": token}
    return {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": _metadata(owner, f"{owner.name}-claims", "claims"),
        "type": SECRET_TYPE,
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in data.items()},
    }


def pre_pull_name(owner: Owner) -> str:
    """Of the DaemonSet; its pods carry it in a label."""
    return f"{label_value(owner.name, 54)}-{PRE_PULL}"


def pre_pull(owner: Owner, spec: SandboxPoolSpec, config: PodConfig) -> Object:
    """A pod on every node that runs the bundle's interpreter in each image once: no image needs a shell for that."""
    metadata = _metadata(owner, pre_pull_name(owner), PRE_PULL)
    selected = {key: metadata["labels"][key] for key in (labels.POOL, labels.COMPONENT)}
    images = [each.image for each in spec.images] or [config.sandbox_image]
    pod: Object = {
        **placement(spec, config),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": GID,
            "runAsGroup": GID,
            "fsGroup": GID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [
            guest_container(config),
            *(
                _idle_container(f"image-{number}", image, bundle.check_command(GUEST_PATH), config)
                for number, image in enumerate(images)
            ),
        ],
        "containers": [
            _idle_container("idle", config.guest_image, ["sleep", "infinity"], config),
        ],
        "volumes": [{"name": "guest", "emptyDir": {"sizeLimit": "128Mi"}}],
    }
    return {
        "apiVersion": DAEMON_SET.api_version,
        "kind": DAEMON_SET.kind,
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": selected},
            "updateStrategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": "100%"},
            },
            "template": {
                "metadata": {"labels": {**spec.pod.labels, **metadata["labels"]}},
                "spec": pod,
            },
        },
    }


def _idle_container(name: str, image: str, command: list[str], config: PodConfig) -> Object:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": config.image_pull_policy,
        "command": command,
        "workingDir": "/",
        "securityContext": container_security(),
        "resources": _IDLE,
        "volumeMounts": [{"name": "guest", "mountPath": GUEST_PATH, "readOnly": True}],
    }


def _metadata(owner: Owner, name: str, component: str) -> Object:
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": labels_of(owner, component),
        "ownerReferences": [reference(owner, controller=False)],
    }
