"""Where a valid job can run: keys that one machine leaves aside, and values that only one of the two places has.

`cluster_only_keys` are left aside by the local driver, in one line that names them. What it cannot leave aside it
refuses (`refused_locally`), and the operator refuses what only one machine has (`refused_in_cluster`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rljob.api.problem import Problem, holds
from rljob.api.rljob_types import RLJob
from rljob.api.source import KeyPath

CLUSTER_ONLY: tuple[KeyPath, ...] = tuple(
    tuple(path.split("."))
    for path in (
        "metadata.namespace",
        "spec.suspend",
        "spec.rollout.minReplicas",
        "spec.rollout.maxReplicas",
        "spec.rollout.engine.image",
        "spec.rollout.engine.resources",
        "spec.rollout.engine.template",
        "spec.rollout.worker.image",
        "spec.rollout.worker.resources",
        "spec.rollout.worker.template",
        "spec.trainer.image",
        "spec.trainer.resources",
        "spec.trainer.template",
        "spec.store.redis.secretRef",
        "spec.lifecycle.readyDeadlineSeconds",
        "spec.lifecycle.onFailure",
        "spec.lifecycle.ttlSecondsAfterFinished",
        "spec.scheduling.queueName",
        "spec.scheduling.priorityClassName",
        "spec.sandboxPools.*.images",
        "spec.sandboxPools.*.prePull",
        "spec.sandboxPools.*.readOnlyRoot",
        "spec.sandboxPools.*.runtimeClassName",
        "spec.sandboxPools.*.podSecurity",
        "spec.sandboxPools.*.hostUsers",
        "spec.sandboxPools.*.pod",
        "spec.sandboxPools.*.resources",
        "spec.tasks.*.sandbox.image",
    )
)
"""Keys that the local driver leaves aside; `*` stands for every list position."""


def cluster_only_keys(job: RLJob) -> list[str]:
    """Those of `CLUSTER_ONLY` that the manifest sets, as people write them."""
    given = job.model_dump(mode="json", exclude_unset=True, exclude_defaults=True)
    return [
        ".".join(map(str, path)).replace(".*", "[]") for path in CLUSTER_ONLY if holds(given, path)
    ]


def sources(job: RLJob) -> Iterator[tuple[KeyPath, str]]:
    """Every key that says where something lies, with its value, as far as the manifest gives it."""
    spec = job.spec
    yield ("spec", "model", "source"), spec.model.source
    if spec.mode != "eval":
        yield ("spec", "data", "train", "source"), spec.data.train.source
    if spec.data.validation is not None:
        yield ("spec", "data", "validation", "source"), spec.data.validation.source
    if spec.store.artifacts is not None:
        yield ("spec", "store", "artifacts"), spec.store.artifacts


def refused_locally(job: RLJob) -> list[Problem]:
    """What one machine does not have and cannot do without: volumes of a cluster, networks for sandboxes."""
    volumes = [
        Problem(path, f"{value} is a volume of a cluster", "use file:// on one machine")
        for path, value in sources(job)
        if value.startswith("pvc://")
    ]
    return volumes + [
        Problem(
            ("spec", "sandboxPools", index, "egress"),
            f"{pool.egress} is a policy of a cluster: sandboxes of one machine reach nothing",
            "use none",
        )
        for index, pool in enumerate(job.spec.sandbox_pools)
        if pool.egress != "none"
    ]


def refused_in_cluster(job: RLJob) -> list[Problem]:
    """What pods on several machines cannot share."""
    found: list[Problem] = []
    store = job.spec.store
    if store.artifacts is not None and store.artifacts.startswith("file://"):
        fix = "name a claim (pvc://CLAIM), or remove it: the job gets a volume of its own"
        found.append(
            Problem(("spec", "store", "artifacts"), "file:// is a folder of one machine", fix)
        )
    if store.redis.url is not None and store.redis.url.startswith("unix://"):
        fix = "use redis:// or rediss://, or remove it: the job gets a Valkey of its own"
        found.append(
            Problem(("spec", "store", "redis", "url"), "unix:// is a socket of one machine", fix)
        )
    return found
