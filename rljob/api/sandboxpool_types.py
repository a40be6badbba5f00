"""A warm pool of sandboxes. Part of `rljob_types`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rljob.api.base import (
    AnnotationMap,
    ApiModel,
    FolderPath,
    FreeObject,
    Image,
    LabelMap,
    Name,
    ObjectName,
    Quantities,
)


class PoolImage(ApiModel):
    """One image of a pool (cluster only; the local sandbox shows the machine's own /usr)."""

    image: Image
    """The image."""
    weight: int = Field(default=1, ge=1, le=1000)
    """Share of the warm sandboxes."""


class Recycle(ApiModel):
    """What happens to a sandbox after its episode."""

    strategy: Literal["reset", "recreate"] = "reset"
    """Reset, verify and use it again, or replace it by a new one."""
    max_reuses: int | None = Field(default=None, ge=1, le=100_000)
    """With `reset`: episodes before it is replaced all the same (50)."""
    canary: str | None = Field(default=None, min_length=1, max_length=4096)
    """With `reset`: a shell line that is run at the start and after every reset; where its exit code or output differs,
    the sandbox is not used again."""
    quarantine_seconds: int | None = Field(default=None, ge=0, le=86_400)
    """With `reset`: how long a sandbox that did not verify is kept for a look (600); its place is the first to be taken
    when sandboxes are missing."""


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


class SandboxPod(ApiModel):
    """What the pods of a pool carry besides (cluster only)."""

    labels: LabelMap = Field(default_factory=dict)
    """Labels; those of rljob.dev and app.kubernetes.io are taken."""
    annotations: AnnotationMap = Field(default_factory=dict)
    """Annotations; those of rljob.dev are taken."""
    node_selector: LabelMap = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: list[FreeObject] = Field(default_factory=list, max_length=16)
    """Taints that a node may have, as in a pod's spec."""
    image_pull_secrets: list[ObjectName] = Field(default_factory=list, max_length=8)
    """Secrets for the pool's images, besides those of the installation."""


class SandboxPoolSpec(ApiModel):
    """A warm pool of sandboxes: the spec of a SandboxPool object."""

    warm: int = Field(default=4, ge=0, le=100_000)
    """Sandboxes kept ready."""
    max: int = Field(default=64, ge=1, le=100_000)
    """Sandboxes at most, claimed ones included."""
    images: list[PoolImage] = Field(default_factory=list, max_length=32)
    """Images kept warm, by weight (cluster only)."""
    pre_pull: bool = False
    """Pull every image on every node that may run the pool, before it is wanted there (cluster only)."""
    max_per_job: int | None = Field(default=None, ge=1, le=100_000)
    """Sandboxes that one job may hold at once, in a pool that several share."""
    writable_paths: list[FolderPath] = Field(default_factory=list, max_length=16)
    """Folders of the image that commands may change, besides /workspace and /tmp. Each holds `limits.diskMib`, begins
    as the image has it, and a reset brings that back."""
    read_only_root: bool = True
    """false: commands may change the image's own files anywhere, which only strategy `recreate` takes back (cluster
    only)."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as gvisor (cluster only)."""
    pod_security: Literal["restricted", "baseline"] = "restricted"
    """Pod Security Standard of the pods (cluster only). `baseline` lets images run as root, so it needs a
    runtimeClassName that isolates them, or hostUsers: false."""
    host_users: bool = True
    """false: a user namespace for every pod, so that its root is nobody on the node (cluster only)."""
    pod: SandboxPod = SandboxPod()
    """Labels, annotations and placement of the pods (cluster only)."""
    resources: Quantities = Field(default_factory=dict)
    """Kubernetes resource requirements of a sandbox (cluster only); without it they follow `limits`."""
    egress: Literal["none", "dns", "gateway", "public", "custom"] = "none"
    """What a sandbox may reach: nothing; the cluster's DNS; the gateways of its job; the public internet and DNS, but
    no private address; what `egressRules` say. On one machine only `none`."""
    egress_rules: list[FreeObject] = Field(default_factory=list, max_length=32)
    """With egress `custom`: the egress rules of a NetworkPolicy."""
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
