"""What the pod of a sandbox asks of its node: the pool manager makes the pods so, and `rljob plan` counts with it."""

from __future__ import annotations

from typing import Any

from rljob.api.sandboxpool_types import SandboxPoolSpec

GUEST_MEMORY_MIB = 64
"""What the guest itself may need beside the commands: requests, answers and output in flight."""
IN_MEMORY_MIB = 256
"""Up to so much a writable folder is memory: full is full at once and empty is empty. Above, it is the node's disk."""
SHM_MIB = 16
COPYING: dict[str, Any] = {
    "requests": {"cpu": "10m", "memory": "16Mi"},
    "limits": {"memory": "64Mi"},
}
"""Of the init container that brings the guest."""


def is_in_memory(pool: SandboxPoolSpec) -> bool:
    """Whether the writable folders of a sandbox are memory, not disk."""
    return pool.limits.disk_mib <= IN_MEMORY_MIB


def requirements(pool: SandboxPoolSpec) -> dict[str, Any]:
    """Requests and limits of a sandbox's container: the person's own, or what follows from `limits`."""
    if pool.resources:
        return dict(pool.resources)
    limits = pool.limits
    writable = SHM_MIB + (2 * limits.disk_mib if is_in_memory(pool) else 0)
    memory = limits.memory_mib + writable + GUEST_MEMORY_MIB
    disk = 64 + (0 if is_in_memory(pool) else 2 * limits.disk_mib)
    return {
        "requests": {"cpu": "50m", "memory": f"{min(128, memory)}Mi", "ephemeral-storage": "64Mi"},
        "limits": {"cpu": "2", "memory": f"{memory}Mi", "ephemeral-storage": f"{disk + 64}Mi"},
    }
