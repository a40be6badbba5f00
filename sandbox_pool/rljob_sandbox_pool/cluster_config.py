"""What the pool manager is told in a cluster: one file, two keys, three variables; and the rights that it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from rljob import labels
from rljob.errors import MachineError
from rljob_sandbox_pool.runtimes.pod_template import PodConfig

LEASE_NAME: Final = "rljob-sandbox-pool"
ACTIVE: Final = "rljob.dev/active"
"""Label of the pod that holds the Lease: the Service selects it."""

RULES: Final[list[dict[str, Any]]] = [
    {"apiGroups": [labels.GROUP], "resources": ["sandboxpools"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [labels.GROUP], "resources": ["sandboxpools/status"], "verbs": ["patch"]},
    {"apiGroups": [labels.GROUP], "resources": ["sandboxpools/finalizers"], "verbs": ["update"]},
    {
        "apiGroups": [""],
        "resources": ["pods"],
        "verbs": ["list", "watch", "create", "patch", "delete"],
    },
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    {
        "apiGroups": ["networking.k8s.io"],
        "resources": ["networkpolicies"],
        "verbs": ["create", "patch"],
    },
    {
        "apiGroups": ["apps"],
        "resources": ["daemonsets"],
        "verbs": ["get", "create", "patch", "delete"],
    },
    {"apiGroups": ["node.k8s.io"], "resources": ["runtimeclasses"], "verbs": ["get"]},
]
"""In every namespace that it serves. `sandboxpools/finalizers` is for owner references that block deletion. Secrets are
only written, but a patch is answered with the object: who has these rights and a Secret's name can read it.

A RuntimeClass belongs to no namespace: where only some are served, it cannot be looked at, and a missing one is known
when the API server refuses the first pod.
"""
OWN_RULES: Final[list[dict[str, Any]]] = [
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "create", "update"],
    },
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
]
"""In its own namespace: the Lease, and the label on its own pod."""


class PoolManagerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration file (YAML, written by the chart)."""

    guest_image: str
    """Brings the guest into sandbox pods: the pool manager's own image."""
    sandbox_image: str
    """What a sandbox shows where a pool names no image."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: list[str] = []
    operator_namespace: str = "rljob-system"
    """Where the Lease is."""
    namespaces: list[str] = []
    """Served; empty: all."""
    keys_path: str = "/etc/rljob/keys"
    """Folder with the files `broker_key` and `pool_key`."""
    bind_host: str = "0.0.0.0"
    port: int = labels.BROKER_PORT
    metrics_port: int = labels.METRICS_PORT
    starts_per_second: float = 50.0
    """Of all pools together."""
    broker_url: str = ""
    """Where claims go, for the Secrets of pools without a job; empty: there are no such Secrets."""
    dns_namespace: str = "kube-system"
    """Where cluster DNS runs: sandboxes with egress may ask it."""
    reaper: Literal["delete", "dry-run", "off"] = "delete"
    """What becomes of sandbox pods whose SandboxPool is no more; `dry-run` only says it."""

    def pods(self) -> PodConfig:
        """What all sandbox pods have in common."""
        return PodConfig(
            guest_image=self.guest_image,
            sandbox_image=self.sandbox_image,
            image_pull_policy=self.image_pull_policy,
            image_pull_secrets=self.image_pull_secrets,
        )


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Which pod this is, from the downward API; empty outside of a cluster."""

    pod: str = ""
    namespace: str = ""
    ip: str = "127.0.0.1"

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Identity:
        """POD_NAME, POD_NAMESPACE, POD_IP."""
        return cls(
            pod=env.get("POD_NAME", ""),
            namespace=env.get("POD_NAMESPACE", ""),
            ip=env.get("POD_IP", "127.0.0.1"),
        )


def load(path: Path) -> PoolManagerConfig:
    """Read the configuration file. Raises MachineError."""
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=PoolManagerConfig)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (msgspec.MsgspecError, ValueError) as error:
        problem = str(error)
    raise MachineError(str(path), problem, "see the chart's configuration of the sandbox pool")


def read_key(config: PoolManagerConfig, name: str) -> str:
    """One of the keys. Raises MachineError."""
    path = Path(config.keys_path) / name
    try:
        key = path.read_text().strip()
    except OSError as error:
        raise MachineError(
            str(path), f"cannot be read ({error.strerror})", "mount the Secret of keys"
        ) from None
    if len(key) < 16:
        raise MachineError(str(path), "holds less than 16 characters", "make a random key")
    return key
