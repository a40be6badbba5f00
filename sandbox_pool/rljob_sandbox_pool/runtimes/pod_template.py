"""The pod of one sandbox. Pure.

init container `guest` ── copies interpreter and guest ──► emptyDir ── read-only ──► container `sandbox`: PID 1
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from rljob import labels
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.api.sandbox_requirements import COPYING, SHM_MIB, is_in_memory, requirements
from rljob.kube.resources import Object
from rljob_sandbox_pool import bundle
from rljob_sandbox_pool.guest.pod import VARIABLE
from rljob_sandbox_pool.runtimes.base import SandboxSpec

GUEST_PATH = "/opt/rljob/guest"
WORKSPACE = "/workspace"
BOOT_FOLDER = "/run/rljob"
TERMINATION_LOG = "/dev/termination-log"
GID = 10001
GUEST_PIDS = 2
TEMPLATE_HASH = "rljob.dev/template-hash"
IMAGE = "rljob.dev/sandbox-image"
"""Annotations: what the pod was made from, for a pool manager that takes over."""
_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": WORKSPACE,
    "PWD": WORKSPACE,
    "USER": "agent",
    "LOGNAME": "agent",
    "LANG": "C.UTF-8",
}


class PodConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods of all pools have in common."""

    guest_image: str
    """Brings the guest."""
    sandbox_image: str
    """What a sandbox shows where its pool names no image."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: list[str] = []


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The SandboxPool object."""

    namespace: str
    name: str
    uid: str
    job: str = ""
    job_uid: str = ""


def label_value(name: str) -> str:
    """A name as a label's value: at most 63 characters."""
    if len(name) <= 63:
        return name
    return f"{name[:52].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def selector() -> str:
    """Of all sandbox pods."""
    return f"{labels.MANAGED_BY}={labels.POOL_FIELD_MANAGER},{labels.COMPONENT}=sandbox"


def template_hash(pool: SandboxPoolSpec, config: PodConfig) -> str:
    """Of everything that makes a pod of this pool differ from one of another spec; images have a place of their own."""
    spec = pool.model_dump(
        mode="json", exclude={"warm", "max", "recycle", "images", "name", "egress"}
    )
    text = json.dumps([spec, msgspec.to_builtins(config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pod(spec: SandboxSpec, pool: SandboxPoolSpec, owner: Owner, config: PodConfig) -> Object:
    """The whole object."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": spec.id,
            "namespace": owner.namespace,
            "labels": _labels(owner),
            "annotations": {TEMPLATE_HASH: template_hash(pool, config), IMAGE: spec.image},
            "ownerReferences": [_reference(owner)],
        },
        "spec": _spec(spec, pool, config),
    }


def _labels(owner: Owner) -> dict[str, str]:
    found = {
        "app.kubernetes.io/name": "rljob",
        labels.COMPONENT: "sandbox",
        "app.kubernetes.io/part-of": "rljob",
        labels.MANAGED_BY: labels.POOL_FIELD_MANAGER,
        labels.POOL: label_value(owner.name),
    }
    if owner.job:
        found |= {"app.kubernetes.io/instance": owner.job, labels.JOB: owner.job}
    if owner.job_uid:
        found[labels.JOB_UID] = owner.job_uid
    return found


def _reference(owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "SandboxPool",
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _spec(spec: SandboxSpec, pool: SandboxPoolSpec, config: PodConfig) -> Object:
    found: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "terminationGracePeriodSeconds": 1,
        # A sandbox reaches nobody: a look-up fails at once instead of after its time-outs.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": _pod_security(spec, pool),
        "initContainers": [_guest_container(config, pool)],
        "containers": [_sandbox_container(spec, pool, config)],
        "volumes": [
            {"name": "guest", "emptyDir": {"sizeLimit": "128Mi"}},
            {"name": "boot", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}},
            *({"name": name, "emptyDir": _folder(pool)} for name in ("workspace", "tmp")),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHM_MIB}Mi"}},
        ],
    }
    if pool.runtime_class_name:
        found["runtimeClassName"] = pool.runtime_class_name
    if config.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": name} for name in config.image_pull_secrets]
    return found


def _folder(pool: SandboxPoolSpec) -> Object:
    size = {"sizeLimit": f"{pool.limits.disk_mib}Mi"}
    return {"medium": "Memory", **size} if is_in_memory(pool) else size


def _pod_security(spec: SandboxSpec, pool: SandboxPoolSpec) -> Object:
    found: Object = {"fsGroup": GID, "seccompProfile": {"type": "RuntimeDefault"}}
    if pool.pod_security == "restricted":
        # A uid of its own for each: the kernel counts processes against their limit by user, over the whole node.
        uid = (
            100_000 + int.from_bytes(hashlib.sha256(spec.id.encode()).digest()[:4]) % 1_000_000_000
        )
        found |= {"runAsNonRoot": True, "runAsUser": uid, "runAsGroup": GID}
    return found


def _container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _guest_container(config: PodConfig, pool: SandboxPoolSpec) -> Object:
    return {
        "name": "guest",
        "image": config.guest_image,
        "imagePullPolicy": config.image_pull_policy,
        "command": ["cp", "-R", f"{GUEST_PATH}/.", "/guest/"],
        "securityContext": _container_security(),
        "resources": COPYING,
        "volumeMounts": [{"name": "guest", "mountPath": "/guest"}],
    }


def _sandbox_container(spec: SandboxSpec, pool: SandboxPoolSpec, config: PodConfig) -> Object:
    return {
        "name": "sandbox",
        "image": spec.image,
        "imagePullPolicy": config.image_pull_policy,
        "command": bundle.command(GUEST_PATH),
        "workingDir": WORKSPACE,
        # `$(NAME)` in a value would be replaced; JSON has its own way to write a dollar.
        "env": [
            {
                "name": VARIABLE,
                "value": json.dumps(_guest_config(spec, pool)).replace("$", "\\u0024"),
            }
        ],
        "ports": [{"name": "guest", "containerPort": labels.GUEST_PORT}],
        "securityContext": _container_security(),
        "resources": requirements(pool),
        "volumeMounts": [
            {"name": "guest", "mountPath": GUEST_PATH, "readOnly": True},
            {"name": "boot", "mountPath": BOOT_FOLDER},
            {"name": "workspace", "mountPath": WORKSPACE},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _guest_config(spec: SandboxSpec, pool: SandboxPoolSpec) -> dict[str, Any]:
    rlimits = {
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,  # a POSIX queue would outlive the episode, and no list of them can be had
        "RLIMIT_NOFILE": 4096,
        "RLIMIT_NPROC": pool.limits.pids + GUEST_PIDS,
    }
    if pool.limits.cpu_seconds is not None:
        rlimits["RLIMIT_CPU"] = pool.limits.cpu_seconds
    folders = [WORKSPACE, "/tmp", "/dev/shm"]
    return {
        "id": spec.id,
        "key": spec.key.hex(),
        "port": labels.GUEST_PORT,
        "env": _ENV,
        "workspace": WORKSPACE,
        "folders": folders,
        "shared_folders": [] if is_in_memory(pool) else folders[:2],
        "sealed": [BOOT_FOLDER, TERMINATION_LOG],
        "rlimits": rlimits,
        "marker": f"{BOOT_FOLDER}/booted",
    }
