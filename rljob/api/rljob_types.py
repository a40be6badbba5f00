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
    PodTemplate,
    Quantities,
)
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

Seconds = Annotated[float, Field(gt=0, le=604_800)]
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


class Sampling(ApiModel):
    """How a turn is sampled."""

    temperature: float = Field(default=1.0, gt=0, le=5)
    """Softmax temperature; log probabilities are those of the tempered distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass. Below 1 in training the behaviour policy is not the one that is scored, so validation only."""
    max_tokens_per_turn: int = Field(default=1024, ge=1, le=1_048_576)
    """Sampled tokens per assistant turn."""


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


class Deadlines(ApiModel):
    """Seconds that each stage may take. None of them is ever unbounded."""

    acquire_seconds: Seconds = 600
    """Waiting for a sandbox."""
    setup_seconds: Seconds = 600
    """The task's setup."""
    turn_seconds: Seconds = 300
    """One assistant turn, engine pauses not counted."""
    run_seconds: Seconds = 3600
    """All turns; past it the episode ends as `timeout` and trains."""
    reward_seconds: Seconds = 900
    """The task's reward."""
    drain_seconds: Seconds = 120
    """What a worker that is told to stop may use to finish what fits."""


class Engine(ApiModel):
    """The inference engine of each rollout pod."""

    image: Image | None = None
    """Any vLLM image (cluster only)."""
    args: list[Annotated[str, Field(max_length=1024)]] = Field(default_factory=list, max_length=128)
    """Further arguments of `vllm serve`; those that rljob sets itself are refused."""
    env: EnvVars = Field(default_factory=dict)
    """Further environment of the engine."""
    port: int | None = Field(default=None, ge=1024, le=65_535)
    """A fixed port; without it the local driver takes a free one."""
    resources: Quantities = Field(default_factory=dict)
    """Kubernetes resource requirements (cluster only)."""
    template: PodTemplate = Field(default_factory=dict)
    """Strategic override of the rendered pod (cluster only)."""
    kind: Literal["vllm", "simulated"] = "vllm"
    """`simulated` answers with made-up tokens: for tests of scheduling and failures."""


class Worker(ApiModel):
    """The rollout worker of each rollout pod."""

    image: Image | None = None
    """Rollout worker image (cluster only)."""
    resources: Quantities = Field(default_factory=dict)
    """Kubernetes resource requirements (cluster only)."""
    template: PodTemplate = Field(default_factory=dict)
    """Strategic override of the rendered pod (cluster only)."""


class Rollout(ApiModel):
    """How episodes are made."""

    schedule: Literal["sync", "one_step", "async"] = Field(default="async", json_schema_extra=HANGS)
    """sync: η = 0. one_step: η = 1, weights change only between batches. async: η = maxStaleness, episodes go on across
    updates. Only mode `train` has one."""
    groups: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Only in mode `rollout`: prompts to collect; without it one pass over the rows."""
    group_size: int = Field(default=8, ge=1, le=1024, json_schema_extra=HANGS)
    """Episodes per prompt; mode `eval` has `samplesPerPrompt` instead. Immutable."""
    max_staleness: int | None = Field(default=None, ge=0, le=1000)
    """η, in policy versions, a hard bound; only `async` has it (2 where it is not given)."""
    on_stale: Literal["evict", "wait", "mask"] | None = None
    """What happens to a group past the bound; only `async` has it (`evict` where it is not given)."""
    max_evictions: int | None = Field(default=None, ge=0, le=1000)
    """With `evict`: how often before the group is dead-lettered as too_slow (3)."""
    wait_seconds: Seconds | None = None
    """With `wait`: how long the trainer holds back before it evicts (600)."""
    partial_rollout: bool | None = None
    """Generation goes on across a weight update; only `async` has it (true)."""
    max_concurrent_episodes: int = Field(default=64, ge=1, le=100_000)
    """Episodes running at once, over all workers; at least `groupSize`."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Tries per episode before its group is dead-lettered."""
    retry_backoff_seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Pause before the second attempt; doubled for each further one."""
    sampling: Sampling = Sampling()
    deadlines: Deadlines = Deadlines()
    replicas: int = Field(default=1, ge=1, le=10_000)
    """Rollout pods; the local driver runs one. With `minReplicas` and `maxReplicas`: how many to start with."""
    min_replicas: int | None = Field(default=None, ge=1, le=10_000)
    """Rollout pods at least, when rljob scales them (cluster only); only with `maxReplicas`."""
    max_replicas: int | None = Field(default=None, ge=1, le=10_000)
    """Rollout pods at most, when rljob scales them (cluster only); only with `minReplicas`."""
    worker: Worker = Worker()
    engine: Engine = Engine()

    @property
    def staleness_bound(self) -> int:
        """η of the admission rule, in policy versions."""
        return {"sync": 0, "one_step": 1}.get(
            self.schedule, 2 if self.max_staleness is None else self.max_staleness
        )

    @property
    def stale_policy(self) -> Literal["evict", "wait", "mask"]:
        """`onStale` as it holds for this schedule."""
        return self.on_stale or "evict"

    @property
    def updates_in_flight(self) -> bool:
        """Whether weights may change under a running episode."""
        return self.schedule == "async" and self.partial_rollout is not False


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
