"""Pods: what all of a job's pods and containers have in common. They meet the *restricted* Pod Security Standard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rljob import labels
from rljob_operator.render import gpus, storage
from rljob_operator.render.component import Component
from rljob_operator.render.context import Context
from rljob_operator.render.places import filled, port, variable
from rljob_operator.render.probes import probes
from rljob_operator.render.quantities import parse, with_defaults

USER = 10_001
CPU, SMALL_CPU, SMALL_MIB = "250m", "100m", 1024
"""Requested of the CPU where the manifest does not say, by whether the component needs a GiB: so little that a node of
two cores holds a job."""
PORT_NAMES = {"engine/http": "engine", "gateway/metrics": "gateway-metrics"}
"""role/port → name in the pod, where it is not the port's own: Prometheus finds `metrics` by name."""
SHARED_MEMORY, GPU_SHARED_MEMORY = "1Gi", "16Gi"
"""Most of /dev/shm: NCCL and tensor parallel workers pass tensors there."""
SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
PERSON = {"HOME": f"{labels.WORK_PATH}/home", "USER": "rljob", "PYTHONUNBUFFERED": "1"}
"""An image need not know our user: torch asks for a name, and fails where it finds none."""
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
POD_IP = "POD_IP"
POD_INDEX, POD_INDEX_LABEL = "POD_INDEX", "apps.kubernetes.io/pod-index"


def container(
    context: Context,
    component: Component,
    image: str,
    *,
    resources: Mapping[str, Any] | None = None,
    path: str = "",
    numbered: bool = False,
    mounts: Sequence[Mapping[str, Any]] = (),
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The container of a component.

    Args:
        context: The job.
        component: From the plan.
        image: Its image.
        resources: What the manifest says.
        path: Where it says so.
        numbered: Its pod is one of several: the component's name ends in the pod's number.
        mounts: Beside those that every container has.
        env: Beside what the plan says.
    """
    needs = with_defaults(
        resources or {},
        path,
        cpu=SMALL_CPU if component.resources.memory_mib < SMALL_MIB else CPU,
        memory_mib=component.resources.memory_mib,
    )
    return {
        **bare(context, component.role, image),
        "command": [filled(context, component, part) for part in component.command],
        "env": environment(context, component, env or {}, needs, numbered=numbered),
        "ports": [
            {"name": name, "containerPort": number, "protocol": "TCP"}
            for name, number in _ports(component)
        ],
        "resources": needs,
        "volumeMounts": [*_common_mounts(context, component), *mounts],
        **probes(component, gpu=bool(gpus.names([needs]))),
    }


def bare(context: Context, name: str, image: str) -> dict[str, Any]:
    """What every container has, whatever it runs."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": context.config.image_pull_policy,
        "workingDir": labels.WORK_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": SECURITY,
    }


def environment(
    context: Context,
    component: Component,
    more: Mapping[str, str],
    resources: Mapping[str, Any],
    *,
    numbered: bool,
) -> list[dict[str, Any]]:
    """Variables of a container: secrets first, since the others are expanded from them."""
    env = {key: filled(context, component, value) for key, value in component.env.items()}
    env = PERSON | env | dict(more)
    if "RLJOB_BROKER_URL" in env:
        env["RLJOB_BROKER_URL"] = context.config.broker_url.rstrip("/").replace("$", "$$")
    first: list[dict[str, Any]] = []
    secret_ref = context.job.spec.store.redis.secret_ref
    if secret_ref is not None and "RLJOB_REDIS_URL" in env:
        first.append(_from_secret("redis_url", secret_ref.name, secret_ref.key))
        env["RLJOB_REDIS_URL"] = f"$({variable('redis_url')})"
    if (threads := _threads(resources)) is not None:
        env.setdefault("OMP_NUM_THREADS", threads)
    for secret in ("token", "redis"):
        # `$$(` is a person's text, which is not expanded
        if any(f"$({variable(secret)})" in value.replace("$$", "") for value in env.values()):
            first.append(_from_secret(secret, context.name("secrets"), secret))
    if numbered:
        first.append(_from_field(POD_INDEX, f"metadata.labels['{POD_INDEX_LABEL}']"))
        env["RLJOB_COMPONENT"] = f"{component.role}-$({POD_INDEX})"
    if component.role == "worker" and _shows_gateway(context):
        first.append(_from_field(POD_IP, "status.podIP"))
        env["RLJOB_GATEWAY_URL"] = f"http://$({POD_IP}):{labels.GATEWAY_PORT}"
    return [*first, *({"name": name, "value": value} for name, value in env.items())]


def _shows_gateway(context: Context) -> bool:
    """Whether agents inside of sandboxes are told where the gateway is: loopback there is their own."""
    return any(pool.egress == "gateway" for pool in context.job.spec.sandbox_pools)


def pod_template(
    context: Context,
    role: str,
    containers: Sequence[Mapping[str, Any]],
    *,
    init: Sequence[Mapping[str, Any]] = (),
    volumes: Sequence[Mapping[str, Any]] = (),
    grace_seconds: float,
    spec: Mapping[str, Any] | None = None,
    extra_labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The template of a pod of a role; what is empty in it, `settle` leaves out."""
    needs = [item.get("resources", {}) for item in (*init, *containers)]
    return {
        "metadata": {
            "labels": context.labels(role) | context.queue() | dict(extra_labels or {}),
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "serviceAccountName": context.name(),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            # a first process of its own namespace ignores SIGTERM until it has a handler: while it still starts
            "shareProcessNamespace": True,
            "securityContext": POD_SECURITY,
            "terminationGracePeriodSeconds": math.ceil(grace_seconds),
            "imagePullSecrets": [{"name": name} for name in context.config.image_pull_secrets],
            "tolerations": gpus.tolerations(needs),
            "priorityClassName": context.job.spec.scheduling.priority_class_name,
            "initContainers": list(init),
            "containers": list(containers),
            "volumes": [*_scratch_volumes(needs), *volumes],
            **dict(spec or {}),
        },
    }


def job_volumes(context: Context) -> list[dict[str, Any]]:
    """The volumes of every pod that works on the job: its manifest and its artifacts."""
    manifest = {"name": "job", "configMap": {"name": context.name("job")}}
    return [manifest, storage.artifacts_volume(context)]


def _scratch_volumes(needs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    memory = GPU_SHARED_MEMORY if gpus.names(needs) else SHARED_MEMORY
    return [
        {"name": "work", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": memory}},
    ]


def _common_mounts(context: Context, component: Component) -> list[dict[str, Any]]:
    scratch = [
        {"name": "work", "mountPath": labels.WORK_PATH},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if component.role == "store":
        return scratch
    folder = labels.JOB_FILE_PATH.rpartition("/")[0]
    reads = component.role in {"engine", "gateway"}
    return [
        *scratch,
        {"name": "job", "mountPath": folder, "readOnly": True},
        storage.artifacts_mount(context, read_only=reads),
    ]


def _ports(component: Component) -> list[tuple[str, int]]:
    return [
        (
            PORT_NAMES.get(f"{component.role}/{item.name}", item.name),
            port(f"{component.name}/{item.name}"),
        )
        for item in component.ports
    ]


def _threads(resources: Mapping[str, Any]) -> str | None:
    """A CPU limit is not seen by programs that count the node's cores; with GPUs their default is right."""
    limit = resources.get("limits", {}).get("cpu")
    if limit is None or gpus.names([resources]):
        return None
    return str(max(1, int(parse(limit, "cpu")[0])))


def _from_secret(secret: str, name: str, key: str) -> dict[str, Any]:
    return {
        "name": variable(secret),
        "valueFrom": {"secretKeyRef": {"name": name, "key": key}},
    }


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
