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
from rljob_operator.render.config import spec_hash
from rljob_operator.render.context import Context
from rljob_operator.render.quantities import resources
from rljob_operator.render.settle import with_templates

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
    if engine.kind == "vllm" and "PYTHONPATH" in engine.env:
        raise ManifestError(
            "spec.rollout.engine.env.PYTHONPATH",
            "is how rljob's own code gets into the engine's image",
            "install what you need in the image instead",
        )


def _requirements(path: str, given: Callable[[RLJob], Mapping[str, Any]]) -> Check:
    def rule(context: Context) -> None:
        resources(given(context.job), path)

    return rule


def _pool_requirements(context: Context) -> None:
    for index, pool in enumerate(context.job.spec.sandbox_pools):
        resources(pool.resources, f"spec.sandboxPools[{index}].resources")


def _template(path: str, role: str, given: Callable[[RLJob], Mapping[str, Any]]) -> Check:
    """A template alone, over a pod of that role without any other fault."""

    def rule(context: Context) -> None:
        if override := given(context.job):
            bare = Context(_without_overrides(context.job), context.owner, context.config)
            make = workloads.rollouts if role == "rollout" else workloads.trainer
            with_templates(make(bare)["spec"]["template"], [(path, override)])

    return rule


def _without_overrides(job: RLJob) -> RLJob:
    rollout, trainer = job.spec.rollout, job.spec.trainer
    nothing: dict[str, Any] = {"template": {}, "resources": {}}
    spec = job.spec.model_copy(
        update={
            "rollout": rollout.model_copy(
                update={
                    "engine": rollout.engine.model_copy(update=nothing),
                    "worker": rollout.worker.model_copy(update=nothing),
                }
            ),
            "trainer": trainer.model_copy(update=nothing),
        }
    )
    return job.model_copy(update={"spec": spec})


_RULES: tuple[Check, ...] = (
    _names,
    _pool_names,
    _sources,
    _engine_env,
    _requirements("spec.rollout.engine.resources", lambda job: job.spec.rollout.engine.resources),
    _requirements("spec.rollout.worker.resources", lambda job: job.spec.rollout.worker.resources),
    _requirements("spec.trainer.resources", lambda job: job.spec.trainer.resources),
    _pool_requirements,
    _template(
        "spec.rollout.engine.template", "rollout", lambda job: job.spec.rollout.engine.template
    ),
    _template(
        "spec.rollout.worker.template", "rollout", lambda job: job.spec.rollout.worker.template
    ),
    _template("spec.trainer.template", "trainer", lambda job: job.spec.trainer.template),
)
