"""A file of warm pools for one machine: a SandboxPool object, or the pools of an RLJob manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rljob.api.base import ApiModel
from rljob.api.load import check, faults, read, validate
from rljob.api.placement import refused_locally
from rljob.api.pool_effects import pool_problems
from rljob.api.problem import Problem
from rljob.api.rljob_types import ObjectMeta
from rljob.api.sandboxpool_types import SandboxPool, SandboxPoolSpec
from rljob.api.source import Source
from rljob.errors import ManifestError


class _PoolObject(ApiModel):
    """What a person writes of a SandboxPool object."""

    api_version: Literal["rljob.dev/v1alpha1"]
    kind: Literal["SandboxPool"]
    metadata: ObjectMeta
    spec: SandboxPoolSpec = SandboxPoolSpec()


def load_pools(file: Path) -> list[SandboxPool]:
    """The pools that a file describes.

    Raises:
        ManifestError: it cannot be read or parsed, or holds no pool.
        ManifestFaultsError: keys are wrong, or are those of a cluster; all of them are listed.
    """
    source = read(file)
    if source.data.get("kind") == "SandboxPool":
        return [_pool(source)]
    job = check(source)
    if problems := [each for each in refused_locally(job) if "sandboxPools" in each.path]:
        raise faults(source, problems)
    if not job.spec.sandbox_pools:
        where = f"{source.where(('spec',))}: spec.sandboxPools"
        raise ManifestError(where, "there is no pool", "add one, or give a SandboxPool")
    return job.spec.sandbox_pools


def _pool(source: Source) -> SandboxPool:
    given = validate(source, _PoolObject)
    problems = [each._replace(path=("spec", *each.path)) for each in pool_problems(given.spec)]
    if given.spec.egress != "none":
        fault = (
            f"{given.spec.egress} is a policy of a cluster: sandboxes of one machine reach nothing"
        )
        problems.append(Problem(("spec", "egress"), fault, "use none"))
    if problems:
        raise faults(source, problems)
    spec = {name: getattr(given.spec, name) for name in given.spec.model_fields_set}
    return SandboxPool(name=given.metadata.name, **spec)
