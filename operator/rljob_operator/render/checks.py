"""What only rendering can know is wrong with a manifest: one line each, path first.

The API server has judged the schema, `rljob.api.effects` the rules between keys; here are templates, quantities, names
that grow too long, and what has no meaning in a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rljob.api.rljob_types import RLJob
from rljob.errors import ManifestError
from rljob_operator.observed import ClusterConfig, Owner
from rljob_operator.render import pinned, storage, workloads
from rljob_operator.render.children import rendered
from rljob_operator.render.config import job_file, spec_hash
from rljob_operator.render.context import Context
from rljob_operator.render.places import variable
from rljob_operator.render.pods import POD_INDEX
from rljob_operator.render.quantities import resources

LABEL_LENGTH = 63
STATEFUL_SUFFIX = len("-rollout-0123456789")
"""Pods of a StatefulSet carry its name and a hash of ten in one label."""
JOB_SUFFIX = len("-trainer-9999-")
"""Pods of an Indexed Job have its name and their index as host name."""
POOL_POD_SUFFIX = len("-abcdef")
"""Sandbox pods are named by their pool; the name is their host name too."""

Check = Callable[[Context], object]


def check(job: RLJob, config: ClusterConfig) -> list[str]:
    """Every problem that rendering this job would meet; empty: it can be rendered."""
    owner = Owner(job.metadata.namespace or "default", job.name, "0" * 36)
    context = Context(job, owner, config)
    found: list[str] = []
    for rule in _RULES:
        try:
            rule(context)
        except ManifestError as error:
            found.append(str(error))
    return found or list(_whole(context))


def _whole(context: Context) -> Iterator[str]:
    """What no single rule sees: the sum."""
    try:
        pinned.pin(context, rendered(context), spec_hash(context.job))
    except ManifestError as error:
        yield str(error)


def _names(context: Context) -> None:
    replicas = context.job.spec.trainer.replicas
    longest = max(STATEFUL_SUFFIX, JOB_SUFFIX + len(str(replicas - 1)))
    _refuse_long("metadata.name", context.owner.name, LABEL_LENGTH - longest)


def _pool_names(context: Context) -> None:
    longest = LABEL_LENGTH - POOL_POD_SUFFIX - len(context.owner.name) - 1
    for index, pool in enumerate(context.job.spec.sandbox_pools):
        _refuse_long(f"spec.sandboxPools[{index}].name", pool.name, longest)


def _refuse_long(path: str, name: str, longest: int) -> None:
    if len(name) > longest:
        raise ManifestError(
            path, f"{name} is {len(name)} characters long", f"at most {longest} fit into pod names"
        )


def _sources(context: Context) -> None:
    storage.refuse_local_artifacts(context.job)
    storage.refuse_local_sources(context.job)


def _engine_env(context: Context) -> None:
    engine = context.job.spec.rollout.engine
    for name in engine.env:
        if name == POD_INDEX or name.startswith(variable("")):
            path = f"spec.rollout.engine.env.{name}"
            raise ManifestError(path, "is set by rljob itself", "remove it")
    if engine.kind == "vllm" and "PYTHONPATH" in engine.env:
        raise ManifestError(
            "spec.rollout.engine.env.PYTHONPATH",
            "is how rljob's own code gets into the engine's image",
            "install what you need in the image instead",
        )


def _size(context: Context) -> None:
    """A manifest may be larger than what a ConfigMap holds."""
    size = len(job_file(context)["data"]["job.json"])
    if size > pinned.LIMIT_BYTES:
        fits = pinned.LIMIT_BYTES // 1024
        raise ManifestError(
            "spec", f"takes {size // 1024} KiB, of {fits} that fit", "make prompts smaller"
        )


def _requirements(path: str, given: Callable[[RLJob], Mapping[str, Any]]) -> Check:
    def rule(context: Context) -> None:
        resources(given(context.job), path)

    return rule


def _pool_requirements(context: Context) -> None:
    for index, pool in enumerate(context.job.spec.sandbox_pools):
        resources(pool.resources, f"spec.sandboxPools[{index}].resources")


def _template(part: str) -> Check:
    """A template alone: the pods that it is for, without any other override."""

    def rule(context: Context) -> None:
        alone = Context(_with_one_template(context.job, part), context.owner, context.config)
        if part == "trainer":
            workloads.prepare(alone)
            workloads.trainer(alone)
        else:
            workloads.rollouts(alone)

    return rule


def _with_one_template(job: RLJob, part: str) -> RLJob:
    rollout, trainer = job.spec.rollout, job.spec.trainer

    def update(name: str) -> dict[str, Any]:
        return {"resources": {}} if name == part else {"resources": {}, "template": {}}

    engine = rollout.engine.model_copy(update=update("engine"))
    worker = rollout.worker.model_copy(update=update("worker"))
    parts = {
        "rollout": rollout.model_copy(update={"engine": engine, "worker": worker}),
        "trainer": trainer.model_copy(update=update("trainer")),
    }
    return job.model_copy(update={"spec": job.spec.model_copy(update=parts)})


_RULES: tuple[Check, ...] = (
    _names,
    _pool_names,
    _sources,
    _engine_env,
    _size,
    _requirements("spec.rollout.engine.resources", lambda job: job.spec.rollout.engine.resources),
    _requirements("spec.rollout.worker.resources", lambda job: job.spec.rollout.worker.resources),
    _requirements("spec.trainer.resources", lambda job: job.spec.trainer.resources),
    _pool_requirements,
    _template("engine"),
    _template("worker"),
    _template("trainer"),
)
