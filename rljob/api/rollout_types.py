"""How episodes are made: schedule, sampling, deadlines, and the pods that do it. Part of `rljob_types`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob.api.base import HANGS, ApiModel, EnvVars, Image, PodTemplate, Quantities

Seconds = Annotated[float, Field(gt=0, le=604_800)]


class Sampling(ApiModel):
    """How a turn is sampled."""

    temperature: float = Field(default=1.0, gt=0, le=5)
    """Softmax temperature; log probabilities are those of the tempered distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass. Below 1 in training the behaviour policy is not the one that is scored, so validation only."""
    max_tokens_per_turn: int = Field(default=1024, ge=1, le=1_048_576)
    """Sampled tokens per assistant turn."""


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
