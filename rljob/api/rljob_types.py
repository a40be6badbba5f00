"""RLJob: what a person writes. Read this page first.

One field, one line of why. Defaults are what the quick start and a first real run want; every number has bounds. A key
whose meaning hangs on another has no default in the schema: `None` means "not set", and `rljob.api.effects` refuses it
where it would have no effect. Fields marked *immutable* are fixed once the job has been accepted.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rljob.api.base import (
    HANGS,
    ApiModel,
    EnvVars,
    Image,
    JobName,
    Name,
    Namespace,
    ObjectName,
    Options,
    PluginName,
)
from rljob.api.rollout_types import Deadlines, Engine, Rollout, Sampling, Worker
from rljob.api.sandboxpool_types import (
    PoolImage,
    Recycle,
    SandboxLimits,
    SandboxPool,
    SandboxPoolSpec,
)
from rljob.api.trainer_types import Algorithm, Checkpoint, Correction, Optimizer, Trainer, Weights

__all__ = [
    "API_VERSION", "KIND", "AgentRef", "Algorithm", "Checkpoint", "Correction", "Data", "Deadlines", "Engine",
    "Lifecycle", "Model", "ObjectMeta", "Optimizer", "PoolImage", "RLJob", "RLJobSpec", "Recycle", "Redis",
    "RewardRef", "Rollout", "Sampling", "SandboxLimits", "SandboxPool", "SandboxPoolSpec", "Scheduling", "SecretRef",
    "Store", "Task", "TaskSandbox", "ToolRef", "TrainData", "Trainer", "ValidationData", "Weights", "Worker",
]  # fmt: skip

API_VERSION = "rljob.dev/v1alpha1"
KIND = "RLJob"

SourceUrl = Annotated[
    str,
    Field(
        pattern=r"^((hf|file|recipe)://.+|pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/.+)$",
        max_length=1024,
    ),
]
"""`hf://ORG/NAME`, `file://PATH` (absolute, or relative to the manifest), `recipe://NAME` (a builder) or, in a cluster
only, `pvc://CLAIM/PATH`."""


class Model(ApiModel):
    """The policy model. Immutable."""

    source: SourceUrl
    """Where the starting weights, tokenizer and chat template come from."""
    revision: str | None = Field(default=None, max_length=128)
    """Commit or tag of an `hf://` source; without effect elsewhere, so refused there."""
    max_context_length: int = Field(default=4096, ge=64, le=1_048_576)
    """Tokens per chain, prompt included."""


class ValidationSampling(ApiModel):
    """How a validation turn is sampled; a key that is not given is that of training."""

    temperature: float | None = Field(default=None, gt=0, le=5)
    """Softmax temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus mass."""
    max_tokens_per_turn: int | None = Field(default=None, ge=1, le=1_048_576)
    """Sampled tokens per assistant turn."""

    def over(self, training: Sampling) -> Sampling:
        """Sampling with what is not given here taken from training."""
        return training.model_copy(update=self.model_dump(by_alias=False, exclude_none=True))


class TrainData(ApiModel):
    """Rows that are trained on. Immutable."""

    source: SourceUrl
    """JSON lines or parquet."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Order of the rows: the row at an index is a pure function of (seed, data hash, index)."""


class ValidationData(ApiModel):
    """Rows that are only ever scored."""

    source: SourceUrl
    """JSON lines or parquet; never shown to the trainer."""
    every_steps: int = Field(default=10, ge=1, le=1_000_000, json_schema_extra=HANGS)
    """Score after every so many steps; version 0 and the last are always scored. Only mode `train` has steps."""
    samples_per_prompt: int = Field(default=1, ge=1, le=256)
    """Episodes per row."""
    pass_at: list[Annotated[int, Field(ge=1, le=256)]] = Field(
        default_factory=lambda: [1], max_length=8
    )
    """The k of pass@k; each at most `samplesPerPrompt`."""
    sampling: ValidationSampling = ValidationSampling()
    max_rows: int | None = Field(default=None, ge=1, le=1_000_000)
    """Score only the first so many rows."""

    @model_validator(mode="after")
    def _pass_at_fits(self) -> ValidationData:
        if self.pass_at and max(self.pass_at) > self.samples_per_prompt:
            raise ValueError(
                f"passAt {max(self.pass_at)} needs samplesPerPrompt of at least as much"
            )
        return self


class Data(ApiModel):
    """The datasets."""

    train: TrainData = Field(default=TrainData(source="file://none"), json_schema_extra=HANGS)
    """Rows of modes `train` and `rollout`, required there; mode `eval` has none."""
    validation: ValidationData | None = None
    """Rows that are scored: required in mode `eval`, and without effect in mode `rollout`."""


class TaskSandbox(ApiModel):
    """Where episodes of a task run."""

    pool: Name
    """A pool of `spec.sandboxPools`."""
    image: Image | None = None
    """Image to claim; without it the pool's first."""
    env: EnvVars = Field(default_factory=dict)
    """Environment of every command in the sandbox."""


class ToolRef(ApiModel):
    """A tool by name, with its own options beside the name."""

    name: PluginName
    """The tool."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the tool's constructor."""


class AgentRef(ApiModel):
    """An agent by name."""

    name: PluginName = "react"
    """The agent."""
    max_turns: int = Field(default=16, ge=1, le=1000)
    """Assistant turns before the episode ends as `max_turns`."""
    tools: list[ToolRef] = Field(
        default_factory=lambda: [ToolRef(name="bash"), ToolRef(name="submit")], max_length=64
    )
    """Tools the model may call."""
    system_prompt: str | None = Field(default=None, max_length=65_536)
    """First message of every episode; without it the task's own, or none."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the agent's constructor."""


class RewardRef(ApiModel):
    """How an episode is scored."""

    name: PluginName | None = None
    """A reward by name; without it the task type's own."""
    fresh_sandbox: bool = False
    """Score in a newly claimed sandbox that gets only the exported result."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the reward's constructor, where it is a class."""


class Task(ApiModel):
    """One Task Config: a row names it, and it says how to run and reward the row."""

    name: Name
    """What a row's `task` names."""
    type: PluginName
    """The task family."""
    sandbox: TaskSandbox
    agent: AgentRef = AgentRef()
    reward: RewardRef = RewardRef()
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the task's constructor."""


class SecretRef(ApiModel):
    """A key of a Secret in the job's namespace (cluster only)."""

    name: ObjectName
    """The Secret."""
    key: str = Field(default="url", pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)
    """The key that holds the URL."""


class Redis(ApiModel):
    """A Redis or Valkey of one's own."""

    url: str | None = Field(default=None, pattern=r"^(redis|rediss|unix)://.+$", max_length=1024)
    """Without it, and without `secretRef`, the job gets a Valkey of its own."""
    secret_ref: SecretRef | None = None
    """Where the URL is kept, instead of `url` (cluster only)."""
    port: int | None = Field(default=None, ge=1024, le=65_535)
    """A fixed port of the job's own Valkey; without it the local driver takes a free one."""
    max_memory_mib: int = Field(default=512, ge=16, le=1_048_576, json_schema_extra=HANGS)
    """`maxmemory` of the job's own Valkey."""


class Store(ApiModel):
    """Where the ledger and the artifacts live."""

    redis: Redis = Redis()
    artifacts: str | None = Field(
        default=None,
        pattern=r"^(file://.+|pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/.*)?)$",
        max_length=1024,
    )
    """Weights, checkpoints, batches: `file://PATH` or, in a cluster only, `pvc://CLAIM` or `pvc://CLAIM/PATH`. Without
    it, the run's own folder, in a cluster a volume of the job's own. Immutable."""


class Scheduling(ApiModel):
    """Hints for the cluster's scheduler."""

    queue_name: Namespace | None = None
    """Queue that admits the job (cluster only)."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods (cluster only)."""


class Lifecycle(ApiModel):
    """When to give up, and what to leave."""

    active_deadline_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """The job fails when it has run for so long."""
    progress_deadline_seconds: int = Field(default=900, ge=5, le=604_800, json_schema_extra=HANGS)
    """No progress for so long is a condition that names what is waited for."""
    backoff_limit: int = Field(default=3, ge=0, le=1000)
    """Consecutive failures of a component without a new committed step; in a cluster, without a new checkpoint."""
    ready_deadline_seconds: int = Field(default=1800, ge=5, le=604_800)
    """Roles that are not all up after so long: the job is suspended, and says which are missing (cluster only)."""
    on_failure: Literal["deletePods", "keepPods"] = "deletePods"
    """Whether the trainer and rollout pods of a failed job stay, to be looked at (cluster only)."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=31_536_000)
    """The RLJob is deleted, volumes too, when it has been finished for so long (cluster only); without it, never."""


class RLJobSpec(ApiModel):
    """What a person wants."""

    mode: Literal["train", "eval", "rollout"] = "train"
    """`train` learns from what the rollouts do; `eval` scores the validation rows; `rollout` collects trajectories of
    the training rows. The last two have no trainer. Immutable."""
    suspend: bool = False
    """True: checkpoint, scale to zero and keep the stream; false: go on (cluster only)."""
    model: Model
    data: Data
    tasks: list[Task] = Field(min_length=1, max_length=64)
    rollout: Rollout = Rollout()
    trainer: Trainer = Field(default=Trainer(steps=1, groups_per_step=1), json_schema_extra=HANGS)
    """Required in mode `train`, without effect in the others."""
    sandbox_pools: list[SandboxPool] = Field(min_length=1, max_length=16)
    store: Store = Store()
    scheduling: Scheduling = Scheduling()
    lifecycle: Lifecycle = Lifecycle()


class ObjectMeta(ApiModel):
    """The part of Kubernetes metadata that a person writes."""

    name: JobName
    namespace: Namespace | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class RLJob(ApiModel):
    """A whole manifest."""

    api_version: Literal["rljob.dev/v1alpha1"]
    kind: Literal["RLJob"]
    metadata: ObjectMeta
    spec: RLJobSpec

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return self.metadata.name

    @property
    def ledger_name(self) -> str:
        """Names the job's keys in a Redis: two namespaces may share one."""
        namespace = self.metadata.namespace
        return f"{namespace}.{self.name}" if namespace else self.name

    def task(self, name: str) -> Task | None:
        """The Task Config of that name."""
        return next((task for task in self.spec.tasks if task.name == name), None)
