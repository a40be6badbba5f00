"""The trainer of an RLJob: backend, algorithm, optimizer, checkpoints, weights. Part of `rljob_types`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob.api.base import ApiModel, Image, PodTemplate, Quantities


class Correction(ApiModel):
    """Correction of the mismatch between rollout and trainer log probabilities (verl rollout correction)."""

    type: Literal["token_is", "sequence_is"]
    """Truncated importance sampling per token or per sequence."""
    threshold: float = Field(default=2.0, gt=0, le=1000)
    """Upper bound of the weight."""


class Algorithm(ApiModel):
    """What is optimised. Names are verl's."""

    advantage: Literal["grpo", "rloo"] = "grpo"
    """Advantage estimator."""
    normalize_by_std: bool | None = None
    """GRPO only: divide by the group's standard deviation (true); false is Dr. GRPO."""
    loss: Literal["vanilla", "gspo", "cispo"] = "vanilla"
    """Policy loss."""
    clip_ratio_low: float = Field(default=0.2, ge=0, le=10)
    """The ratio is clipped below 1 - this."""
    clip_ratio_high: float = Field(default=0.2, ge=0, le=10)
    """The ratio is clipped above 1 + this."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = (
        "token_mean"
    )
    """How token losses become one number."""
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Denominator of the ratio: the rollout's own log probabilities, or the trainer's at the start of the step."""
    correction: Correction | None = None
    """Only with `oldLogprobs: recompute`, where the two differ."""
    zero_variance_groups: Literal["keep", "drop"] = "keep"
    """`drop` is DAPO's dynamic sampling: groups whose rewards agree are replaced before they reach a batch."""


class Optimizer(ApiModel):
    """AdamW."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Step size after warm-up."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """Decay rates of the two moments."""
    gradient_clip: float = Field(default=1.0, gt=0, le=1e6)
    """Largest global norm of the gradient."""
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    """Linear warm-up, then constant."""


class Checkpoint(ApiModel):
    """When a resumable state is written."""

    every_steps: int = Field(default=10, ge=1, le=1_000_000)
    """The last step always writes one."""
    keep: int = Field(default=3, ge=1, le=1000)
    """Checkpoints kept, newest first."""


class Weights(ApiModel):
    """How weights reach the engines."""

    transport: Literal["file"] = "file"
    """Through files in the artifact store."""
    publish_every_steps: int = Field(default=1, ge=1, le=1000)
    """Publish after every so many steps."""
    keep: int = Field(default=3, ge=1, le=1000)
    """Published versions kept, beside any that an engine holds or a lease names."""


class Trainer(ApiModel):
    """The optimizer side."""

    backend: Literal["verl", "simulated"] = "verl"
    """`simulated` does no arithmetic: for tests of scheduling and failures."""
    replicas: Literal[1] = 1
    """Trainer pods."""
    image: Image | None = None
    """Trainer image (cluster only)."""
    resources: Quantities = Field(default_factory=dict)
    """Kubernetes resource requirements (cluster only)."""
    template: PodTemplate = Field(default_factory=dict)
    """Strategic override of the rendered pod (cluster only)."""
    steps: int = Field(ge=1, le=1_000_000)
    """Optimizer steps of the whole job."""
    groups_per_step: int = Field(ge=1, le=65_536)
    """B, prompts per batch. Immutable."""
    micro_batch_tokens: int = Field(default=8192, ge=64, le=16_777_216)
    """Tokens per forward-backward; a memory knob without effect on the result."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Seed of everything random in the trainer."""
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    weights: Weights = Weights()
