"""What the pod of a sandbox asks of its node: the pool manager makes the pods so, and `rljob plan` counts with it.

memory   the commands' · the guest's · /dev/shm · every writable folder that is memory
disk     the guest's files · its log · a seed of each writable path · every writable folder that is not memory
"""

from __future__ import annotations

from typing import Any

from rljob.api.sandboxpool_types import SandboxPoolSpec

GUEST_MEMORY_MIB = 64
"""What the guest itself may need beside the commands: requests, answers and output in flight."""
IN_MEMORY_MIB = 256
"""Up to so much a writable folder is memory: full is full at once and empty is empty. Above, it is the node's disk."""
SHM_MIB = 16
GUEST_DISK_MIB = 64
LOG_DISK_MIB = 64
OWN_FOLDERS = 2
"""/workspace and /tmp."""
COPYING: dict[str, Any] = {
    "requests": {"cpu": "10m", "memory": "16Mi"},
    "limits": {"memory": "64Mi"},
}
"""Of the init container that brings the guest."""


def is_in_memory(pool: SandboxPoolSpec) -> bool:
    """Whether the writable folders of a sandbox are memory, not disk."""
    return pool.limits.disk_mib <= IN_MEMORY_MIB


def seeds_mib(pool: SandboxPoolSpec) -> int:
    """What the seeds of all writable paths may hold together; as much again is what commands change."""
    return len(pool.writable_paths) * pool.limits.disk_mib


def seeding(pool: SandboxPoolSpec) -> dict[str, Any]:
    """Of the init container that copies the writable paths: what it writes into memory counts as its own."""
    memory = 64 + (seeds_mib(pool) if is_in_memory(pool) else 0)
    return {**COPYING, "limits": {"memory": f"{memory}Mi"}}


def requirements(pool: SandboxPoolSpec) -> dict[str, Any]:
    """Requests and limits of a sandbox's container: the person's own, or what follows from `limits`."""
    if pool.resources:
        return dict(pool.resources)
    limits, in_memory = pool.limits, is_in_memory(pool)
    writable = OWN_FOLDERS * limits.disk_mib + seeds_mib(pool)
    memory = limits.memory_mib + SHM_MIB + GUEST_MEMORY_MIB + (writable if in_memory else 0)
    disk = GUEST_DISK_MIB + LOG_DISK_MIB + seeds_mib(pool) + (0 if in_memory else writable)
    if not pool.read_only_root:
        disk += limits.disk_mib
    return {
        "requests": {"cpu": "50m", "memory": f"{min(128, memory)}Mi", "ephemeral-storage": "64Mi"},
        "limits": {"cpu": "2", "memory": f"{memory}Mi", "ephemeral-storage": f"{disk}Mi"},
    }
