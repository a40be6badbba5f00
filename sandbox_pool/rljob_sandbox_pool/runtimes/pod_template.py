"""The pod of one sandbox. Pure.

    init `guest`      copies interpreter and guest ──► emptyDir ── read-only ──► container `sandbox`: PID 1
    init `seed`       copies the pool's writable paths out of the image: once to begin with, once to go back to

`restricted`: a user of its own, no capability. `baseline`: the image's user, with what root needs to be of use on its
own files, and nothing that reaches past them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rljob import labels
from rljob.api.egress import dns_of_pod
from rljob.api.rljob_types import SandboxPoolSpec
from rljob.api.sandbox_requirements import (
    COPYING,
    SHM_MIB,
    is_in_memory,
    requirements,
    seeding,
    seeds_mib,
)
from rljob.kube.resources import Object
from rljob_sandbox_pool import bundle
from rljob_sandbox_pool.guest.pod import VARIABLE
from rljob_sandbox_pool.runtimes.base import SandboxSpec
from rljob_sandbox_pool.runtimes.pod_identity import (
    IMAGE,
    IMAGE_HASH,
    TEMPLATE_HASH,
    Owner,
    image_hash,
    labels_of,
    reference,
)

GUEST_PATH = "/opt/rljob/guest"
SEEDS_PATH = "/opt/rljob/seeds"
COPIES_PATH = "/opt/rljob/copies"
"""Only in the init container `seed`: what the sandbox sees at the paths themselves."""
WORKSPACE = "/workspace"
BOOT_FOLDER = "/run/rljob"
TERMINATION_LOG = "/dev/termination-log"
OF_ROOT = ("/etc/hosts", "/dev/")
"""The kubelet's file and the runtime's folder, which root may write."""
GID = 10001
GUEST_PIDS = 2
ROOT_CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""Of images whose user is root: its own files, its own processes, its own users. Not among them, since the guest is
the same user: SYS_PTRACE, SYS_RESOURCE, SYS_ADMIN, NET_RAW, MKNOD, SYS_CHROOT."""
_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": WORKSPACE,
    "PWD": WORKSPACE,
    "USER": "agent",
    "LOGNAME": "agent",
    "LANG": "C.UTF-8",
}
_NOT_OF_THE_POD: Final = {
    "warm", "max", "max_per_job", "pre_pull", "recycle", "images", "name", "egress", "egress_rules",
}  # fmt: skip


class PodConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods of all pools have in common."""

    guest_image: str
    """Brings the guest."""
    sandbox_image: str
    """What a sandbox shows where its pool names no image."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: list[str] = []


def template_hash(pool: SandboxPoolSpec, config: PodConfig) -> str:
    """Of everything that makes a pod of this pool differ from one of another spec; images have a place of their own."""
    spec = pool.model_dump(mode="json", exclude=set(_NOT_OF_THE_POD))
    parts = [spec, pool.recycle.canary, dns_of_pod(pool), msgspec.to_builtins(config)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def pod(
    spec: SandboxSpec,
    pool: SandboxPoolSpec,
    owner: Owner,
    config: PodConfig,
    *,
    avoided: Sequence[str] = (),
) -> Object:
    """The whole object; rather not on one of these nodes."""
    own = {
        **labels_of(owner, "sandbox"),
        IMAGE_HASH: image_hash(spec.image),
        labels.STATE: "starting",
    }
    notes = {TEMPLATE_HASH: template_hash(pool, config), IMAGE: spec.image}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": spec.id,
            "namespace": owner.namespace,
            "labels": {**pool.pod.labels, **own},
            "annotations": {**pool.pod.annotations, **notes},
            "ownerReferences": [reference(owner)],
        },
        "spec": _spec(spec, pool, config, avoided),
    }


def placement(pool: SandboxPoolSpec, config: PodConfig) -> Object:
    """Keys of the spec of every pod that runs on the nodes of a pool: where, and with which Secrets."""
    found: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
    }
    if pool.runtime_class_name:
        found["runtimeClassName"] = pool.runtime_class_name
    if pool.pod.node_selector:
        found["nodeSelector"] = dict(pool.pod.node_selector)
    if pool.pod.tolerations:
        found["tolerations"] = list(pool.pod.tolerations)
    if secrets := dict.fromkeys([*config.image_pull_secrets, *pool.pod.image_pull_secrets]):
        found["imagePullSecrets"] = [{"name": name} for name in secrets]
    return found


def _spec(
    spec: SandboxSpec, pool: SandboxPoolSpec, config: PodConfig, avoided: Sequence[str]
) -> Object:
    found: Object = {
        **placement(pool, config),
        "restartPolicy": "Never",
        "hostname": "sandbox",
        **dns_of_pod(pool),
        "securityContext": _pod_security(spec, pool),
        "initContainers": [guest_container(config)],
        "containers": [_sandbox_container(spec, pool, config)],
        "volumes": [
            {"name": "guest", "emptyDir": {"sizeLimit": "128Mi"}},
            {"name": "boot", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}},
            *(_folder(name, pool, pool.limits.disk_mib) for name in ("workspace", "tmp")),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHM_MIB}Mi"}},
        ],
    }
    if pool.writable_paths:
        found["initContainers"].append(_seed_container(spec, pool, config))
        seeds = {"name": "seeds", "emptyDir": {"sizeLimit": f"{seeds_mib(pool)}Mi"}}
        # Twice: what a path holds at first, and what commands may add.
        found["volumes"] += [seeds, _folder("writable", pool, seeds_mib(pool))]
    if not pool.host_users:
        found["hostUsers"] = False
    affinity = _beside_the_same_image(spec.image) if len(pool.images) > 1 else {}
    if affinity := affinity | (_elsewhere(avoided) if avoided else {}):
        found["affinity"] = affinity
    return found


def _elsewhere(nodes: Sequence[str]) -> Object:
    """Rather on none of these nodes."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    wish = [{"weight": 100, "preference": {"matchFields": fields}}]
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wish}}


def _beside_the_same_image(image: str) -> Object:
    """Rather on a node that has it already."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {IMAGE_HASH: image_hash(image)}},
    }
    wish = [{"weight": 50, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wish}}


def _folder(name: str, pool: SandboxPoolSpec, mib: int) -> Object:
    size = {"sizeLimit": f"{mib}Mi"}
    return {"name": name, "emptyDir": {"medium": "Memory", **size} if is_in_memory(pool) else size}


def _pod_security(spec: SandboxSpec, pool: SandboxPoolSpec) -> Object:
    found: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    if pool.pod_security == "baseline":
        return found
    uid = GID  # a user namespace knows 65,536 users, and they are its own
    if pool.host_users:
        # A uid of its own for each: the kernel counts processes against their limit by user, over the whole node.
        digest = hashlib.sha256(spec.id.encode()).digest()
        uid = 100_000 + int.from_bytes(digest[:4]) % 1_000_000_000
    return found | {"fsGroup": GID, "runAsNonRoot": True, "runAsUser": uid, "runAsGroup": GID}


def container_security() -> Object:
    """Of a container that needs no power at all."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _powers(pool: SandboxPoolSpec) -> Object:
    """Of a container of the pool's own image."""
    found = container_security()
    if pool.pod_security == "baseline":
        found["capabilities"]["add"] = list(ROOT_CAPABILITIES)
    return found


def guest_container(config: PodConfig) -> Object:
    """The init container that brings the guest."""
    return {
        "name": "guest",
        "image": config.guest_image,
        "imagePullPolicy": config.image_pull_policy,
        "command": ["cp", "-R", f"{GUEST_PATH}/.", "/guest/"],
        "securityContext": container_security(),
        "resources": COPYING,
        "volumeMounts": [{"name": "guest", "mountPath": "/guest"}],
    }


def _seed_container(spec: SandboxSpec, pool: SandboxPoolSpec, config: PodConfig) -> Object:
    paths, most = pool.writable_paths, pool.limits.disk_mib
    return {
        "name": "seed",
        "image": spec.image,
        "imagePullPolicy": config.image_pull_policy,
        "command": bundle.seed_command(GUEST_PATH, SEEDS_PATH, COPIES_PATH, paths, max_mib=most),
        "workingDir": "/",
        # its one line says which path cannot be copied
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _powers(pool),
        "resources": seeding(pool),
        "volumeMounts": [
            {"name": "guest", "mountPath": GUEST_PATH, "readOnly": True},
            {"name": "seeds", "mountPath": SEEDS_PATH},
            {"name": "writable", "mountPath": COPIES_PATH},
        ],
    }


def _sandbox_container(spec: SandboxSpec, pool: SandboxPoolSpec, config: PodConfig) -> Object:
    # `$(NAME)` in a value would be replaced; JSON has its own way to write a dollar.
    value = json.dumps(_guest_config(spec, pool)).replace("$", "\\u0024")
    return {
        "name": "sandbox",
        "image": spec.image,
        "imagePullPolicy": config.image_pull_policy,
        "command": bundle.command(GUEST_PATH),
        "workingDir": WORKSPACE,
        "env": [{"name": VARIABLE, "value": value}],
        "ports": [{"name": "guest", "containerPort": labels.GUEST_PORT}],
        "securityContext": _powers(pool) | {"readOnlyRootFilesystem": pool.read_only_root},
        "resources": requirements(pool),
        "volumeMounts": [
            {"name": "guest", "mountPath": GUEST_PATH, "readOnly": True},
            {"name": "boot", "mountPath": BOOT_FOLDER},
            {"name": "workspace", "mountPath": WORKSPACE},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *_writable_mounts(pool),
        ],
    }


def _writable_mounts(pool: SandboxPoolSpec) -> list[Object]:
    if not pool.writable_paths:
        return []
    return [
        {"name": "seeds", "mountPath": SEEDS_PATH, "readOnly": True},
        *(
            {"name": "writable", "mountPath": path, "subPath": str(number)}
            for number, path in enumerate(pool.writable_paths)
        ),
    ]


def _guest_config(spec: SandboxSpec, pool: SandboxPoolSpec) -> dict[str, Any]:
    rlimits = {
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,  # a POSIX queue would outlive the episode, and no list of them can be had
        "RLIMIT_NOFILE": 4096,
        "RLIMIT_NPROC": pool.limits.pids + GUEST_PIDS,
    }
    if pool.limits.cpu_seconds is not None:
        rlimits["RLIMIT_CPU"] = pool.limits.cpu_seconds
    folders, sealed = [WORKSPACE, "/tmp", "/dev/shm"], [BOOT_FOLDER, TERMINATION_LOG]
    if pool.pod_security == "baseline":
        sealed += OF_ROOT
    return {
        "id": spec.id,
        "key": spec.key.hex(),
        "port": labels.GUEST_PORT,
        "env": _ENV,
        "workspace": WORKSPACE,
        "folders": folders,
        "shared_folders": [] if is_in_memory(pool) else folders[:2],
        "sealed": sealed,
        "rlimits": rlimits,
        "marker": f"{BOOT_FOLDER}/booted",
        "writable": [
            {"path": path, "seed": f"{SEEDS_PATH}/{number}"}
            for number, path in enumerate(pool.writable_paths)
        ],
        "canary": pool.recycle.canary,
    }
