"""Which keys of a manifest may not differ when a run is resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob.api.rljob_types import RLJob
from rljob.errors import ManifestError


def _scored(job: RLJob, key: str) -> Any:
    """Of the rows that mode `eval` scores; training may change what it is validated on."""
    return getattr(job.spec.data.validation, key, None) if job.spec.mode == "eval" else None


_FIXED: dict[str, Callable[[RLJob], Any]] = {
    "spec.mode": lambda job: job.spec.mode,
    "spec.model.source": lambda job: job.spec.model.source,
    "spec.model.revision": lambda job: job.spec.model.revision,
    "spec.model.maxContextLength": lambda job: job.spec.model.max_context_length,
    "spec.data.train.source": lambda job: job.spec.data.train.source,
    "spec.data.train.seed": lambda job: job.spec.data.train.seed,
    "spec.data.validation.source": lambda job: _scored(job, "source"),
    "spec.data.validation.samplesPerPrompt": lambda job: _scored(job, "samples_per_prompt"),
    "spec.rollout.groups": lambda job: job.spec.rollout.groups,
    "spec.rollout.groupSize": lambda job: job.spec.rollout.group_size,
    "spec.trainer.groupsPerStep": lambda job: job.spec.trainer.groups_per_step,
    "spec.trainer.backend": lambda job: job.spec.trainer.backend,
    "spec.store.redis.url": lambda job: job.spec.store.redis.url,
    "spec.store.artifacts": lambda job: job.spec.store.artifacts,
}
"""What the ledger, the archived batches and the checkpoints were made with."""


def changed_keys(old: RLJob, new: RLJob) -> list[ManifestError]:
    """One error per fixed key that differs."""
    return [
        ManifestError(
            path,
            f"is {value(new)!r}, but the run began with {value(old)!r}",
            "a resumed run keeps it; start a new one",
        )
        for path, value in _FIXED.items()
        if value(old) != value(new)
    ]
