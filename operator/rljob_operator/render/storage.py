"""Volumes: what the children mount where, and the claims that the operator makes.

/artifacts      J-artifacts, or the folder of pvc://CLAIM/PATH (pvc://CLAIM: its folder NAMESPACE/JOB)
/store          J-store, the append-only file of the job's own Valkey
/volumes/CLAIM  the claim of a pvc:// source, read-only, in prepare alone
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob import labels
from rljob.api.rljob_types import RLJob
from rljob.errors import ManifestError
from rljob_operator.observed import Object
from rljob_operator.render.context import JOB_WIDE, Context
from rljob_operator.render.quantities import canonical

PVC = "pvc://"
ARTIFACTS = "artifacts"
"""Name of the volume in a pod."""


def claims(context: Context) -> list[Object]:
    """The claims that are the job's own."""
    config, found = context.config, list[Object]()
    if context.job.spec.store.artifacts is None:
        size, mode = config.artifacts_size, config.artifacts_access_mode
        found.append(_claim(context, "artifacts", JOB_WIDE, size, mode))
    if context.own_store:
        found.append(_claim(context, "store", "store", config.store_size, "ReadWriteOnce"))
    return found


def _claim(context: Context, suffix: str, component: str, size: str, mode: str) -> Object:
    storage = {"storage": canonical(size, f"operator configuration, {suffix}_size")}
    spec: dict[str, Any] = {"accessModes": [mode], "resources": {"requests": storage}}
    if context.config.storage_class is not None:
        spec["storageClassName"] = context.config.storage_class
    return context.child("v1", "PersistentVolumeClaim", suffix, component, {"spec": spec})


def artifacts_volume(context: Context) -> dict[str, Any]:
    """The volume of a pod that holds the artifacts."""
    claim = _split(context.job.spec.store.artifacts or "")[0] or context.name(ARTIFACTS)
    return {"name": ARTIFACTS, "persistentVolumeClaim": {"claimName": claim}}


def artifacts_mount(context: Context, *, read_only: bool) -> dict[str, Any]:
    """Where a container sees the artifacts."""
    mount: dict[str, Any] = {"name": ARTIFACTS, "mountPath": labels.ARTIFACTS_PATH}
    if context.job.spec.store.artifacts is not None:
        folder = _split(context.job.spec.store.artifacts)[1]
        mount["subPath"] = folder or f"{context.owner.namespace}/{context.owner.name}"
    return {**mount, "readOnly": True} if read_only else mount


def refuse_local_artifacts(job: RLJob) -> None:
    """A file:// store is a folder of one machine.

    Raises:
        ManifestError: the job names one.
    """
    path, artifacts = "spec.store.artifacts", job.spec.store.artifacts
    if artifacts is None:
        return
    if not artifacts.startswith(PVC):
        raise ManifestError(
            path, f"{artifacts} is a folder of one machine", "use pvc://CLAIM, or leave it out"
        )
    if ".." in _split(artifacts)[1].split("/"):
        raise ManifestError(path, f"{artifacts} leaves its volume", "remove the ..")


def refuse_local_sources(job: RLJob) -> None:
    """A relative file:// source lies beside a manifest, and pods have none beside them.

    Raises:
        ManifestError: the job names one.
    """
    for path, source in _sources(job):
        if source.startswith("file://") and not source.startswith("file:///"):
            raise ManifestError(
                path,
                f"{source} is relative to the manifest's folder, which is on no node",
                "use hf://, pvc://, or an absolute path in the trainer's image",
            )


def source_claims(job: RLJob) -> list[str]:
    """Claims of the pvc:// sources, each once."""
    return sorted({_split(source)[0] for _, source in _sources(job) if source.startswith(PVC)})


def source_volumes(context: Context) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts of the pvc:// sources."""
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    artifacts = artifacts_volume(context)["persistentVolumeClaim"]["claimName"]
    for index, claim in enumerate(source_claims(context.job)):
        # a pod with two volumes of one claim may wait for the second mount for ever
        name = ARTIFACTS if claim == artifacts else f"source-{index}"
        mounts.append(
            {"name": name, "mountPath": f"{labels.VOLUMES_PATH}/{claim}", "readOnly": True}
        )
        if name != ARTIFACTS:
            source = {"claimName": claim, "readOnly": True}
            volumes.append({"name": name, "persistentVolumeClaim": source})
    return volumes, mounts


def _sources(job: RLJob) -> Iterator[tuple[str, str]]:
    data = job.spec.data
    yield "spec.model.source", job.spec.model.source
    if "train" in data.model_fields_set:
        yield "spec.data.train.source", data.train.source
    if data.validation is not None:
        yield "spec.data.validation.source", data.validation.source


def _split(url: str) -> tuple[str, str]:
    """Claim and folder of pvc://CLAIM/FOLDER."""
    claim, _, folder = url.removeprefix(PVC).partition("/")
    return claim, folder.strip("/")
