"""Which keys of an accepted RLJob may change. Everything else is immutable, and the API server refuses to change it.

What a job has sampled, archived and checkpointed depends on nearly every key, and its children are rendered once; so a
key is mutable only if a running job takes it over.
"""

from __future__ import annotations

from typing import Final

MUTABLE: Final[frozenset[str]] = frozenset({
    "suspend",
    "rollout.replicas",
    "rollout.minReplicas",
    "rollout.maxReplicas",
    "rollout.deadlines",
    "sandboxPools.warm",
    "sandboxPools.max",
    "lifecycle",
})  # fmt: skip
"""Paths below `spec`; a list's name stands for its items."""


def is_mutable(path: str) -> bool:
    """Whether a path below `spec`, or a key that it lies in, may change."""
    return any(path == known or path.startswith(f"{known}.") for known in MUTABLE)


def holds_mutable(path: str) -> bool:
    """Whether something below `path` may change."""
    return any(known.startswith(f"{path}.") for known in MUTABLE)
