"""What a manifest may say on one machine but not in a cluster, and what only rendering can know."""

from __future__ import annotations

from collections.abc import Iterator

from rljob import plugins
from rljob.api.placement import refused_in_cluster, sources
from rljob.api.plugin_names import plugin_names
from rljob.api.problem import Problem
from rljob.api.rljob_types import RLJob
from rljob_operator.observed import ClusterConfig
from rljob_operator.render.checks import check


def cluster_faults(job: RLJob, config: ClusterConfig) -> list[str]:
    """Every such key, `path: problem; fix`, each once."""
    found: dict[str, str] = {}
    problems = (*_relative(job), *refused_in_cluster(job), *_unknown_names(job))
    for line in (*map(str, problems), *check(job, config)):
        found.setdefault(line.partition(": ")[0], line)
    return list(found.values())


def _unknown_names(job: RLJob) -> Iterator[Problem]:
    """Plugins by entry point that rljob's own worker does not bring. An image of one's own may bring others."""
    if job.spec.rollout.worker.image is not None:
        return
    for path, group, name in plugin_names(job):
        known = plugins.names(group)
        if ":" not in name and name not in known and plugins.names("rljob.tasks"):
            yield Problem(
                path,
                f"unknown {plugins.KINDS[group]} {name!r}",
                f"known: {', '.join(known) or 'none'}; or name rollout.worker.image, which brings it",
            )


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
