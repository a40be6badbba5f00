"""What a manifest may say on one machine but not in a cluster, and what only rendering can know."""

from __future__ import annotations

from rljob.api.placement import refused_in_cluster, sources
from rljob.api.problem import Problem
from rljob.api.rljob_types import RLJob
from rljob_operator.observed import ClusterConfig
from rljob_operator.render.checks import check


def cluster_faults(job: RLJob, config: ClusterConfig) -> list[str]:
    """Every such key, `path: problem; fix`, each once."""
    found: dict[str, str] = {}
    for line in (*map(str, (*_relative(job), *refused_in_cluster(job))), *check(job, config)):
        found.setdefault(line.partition(": ")[0], line)
    return list(found.values())


def _relative(job: RLJob) -> list[Problem]:
    """Only the machine of the manifest knows what a relative path means."""
    return [
        Problem(
            path,
            f"{value} is relative to the manifest's folder, which is on no node",
            "use pvc://CLAIM/PATH, hf://, recipe:// or an absolute path in the trainer's image",
        )
        for path, value in sources(job)
        if value.startswith("file://") and not value.startswith("file:///") and path[1] != "store"
    ]
