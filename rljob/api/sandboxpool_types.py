"""A warm pool of sandboxes. Part of `rljob_types`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rljob.api.base import ApiModel, Image, Name, ObjectName, Quantities


class PoolImage(ApiModel):
    """One image of a pool (cluster only; the local sandbox shows the machine's own /usr)."""

    image: Image
    """The image."""
    weight: int = Field(default=1, ge=1, le=1000)
    """Share of the warm sandboxes."""


class Recycle(ApiModel):
    """What happens to a sandbox after its episode."""

    strategy: Literal["reset", "replace"] = "reset"
    """Reset and verify it, or replace it."""
    max_reuses: int | None = Field(default=None, ge=1, le=100_000)
    """With `reset`: episodes before it is replaced all the same (50)."""


class SandboxLimits(ApiModel):
    """What one sandbox may use."""

    memory_mib: int = Field(default=512, ge=16, le=1_048_576)
    """Memory, in MiB."""
    disk_mib: int = Field(default=64, ge=1, le=1_048_576)
    """Writable disk, in MiB."""
    pids: int = Field(default=128, ge=8, le=65_536)
    """Processes at once."""
    cpu_seconds: int | None = Field(default=None, ge=1, le=604_800)
    """CPU time of one process."""


class SandboxPoolSpec(ApiModel):
    """A warm pool of sandboxes: the spec of a SandboxPool object."""

    warm: int = Field(default=4, ge=0, le=100_000)
    """Sandboxes kept ready."""
    max: int = Field(default=64, ge=1, le=100_000)
    """Sandboxes at most, claimed ones included."""
    images: list[PoolImage] = Field(default_factory=list, max_length=32)
    """Images kept warm, by weight (cluster only)."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as gvisor (cluster only)."""
    pod_security: Literal["restricted", "baseline"] = "restricted"
    """Pod Security Standard of the pods (cluster only). `baseline` lets images run as root, so it needs a
    runtimeClassName that isolates them."""
    resources: Quantities = Field(default_factory=dict)
    """Kubernetes resource requirements of a sandbox (cluster only); without it they follow `limits`."""
    egress: Literal["none"] = "none"
    """Network of a sandbox: none."""
    recycle: Recycle = Recycle()
    limits: SandboxLimits = SandboxLimits()
    runtime: Literal["bubblewrap", "simulated"] = "bubblewrap"
    """What isolates on one machine; `simulated` runs nothing: for tests of scheduling and failures."""

    @model_validator(mode="after")
    def _warm_fits(self) -> Self:
        if self.warm > self.max:
            raise ValueError(f"warm {self.warm} is above max {self.max}")
        return self


class SandboxPool(SandboxPoolSpec):
    """A warm pool of sandboxes."""

    name: Name
    """What a task names as its pool. Immutable."""
