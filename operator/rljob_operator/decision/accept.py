"""What a manifest may say on one machine but not in a cluster."""

from __future__ import annotations

from rljob.api.placement import refused_in_cluster, sources
from rljob.api.problem import Problem
from rljob.api.rljob_types import RLJob
from rljob.api.source import dotted


def cluster_faults(job: RLJob) -> list[str]:
    """Every such key, `path: problem; fix`."""
    found = [*_relative(job), *refused_in_cluster(job)]
    return [f"{dotted(fault.path)}: {fault.problem}; {fault.fix}" for fault in found]


def _relative(job: RLJob) -> list[Problem]:
    """Only the machine of the manifest knows what a relative path means."""
    return [
        Problem(
            path,
            f"{value} is relative to the manifest's folder on another machine",
            "use pvc://CLAIM/PATH, hf://, recipe:// or an absolute path inside the image",
        )
        for path, value in sources(job)
        if value.startswith("file://") and not value.startswith("file:///") and path[1] != "store"
    ]
