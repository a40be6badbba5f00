"""What the operator and the pool manager answer in `status`: one model each, from which the CRDs are made.

Everything is optional: a status grows as a job gets on, and the API server must never refuse one. Written by the
operator alone; `decide` fills in plain dicts with these names, and a test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob.api.base import ApiModel

Count = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Message = Annotated[str, Field(max_length=32_768)]


class Condition(ApiModel):
    """A fact about the object, as Kubernetes writes them."""

    type: str = Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=316)
    """A constant of `rljob.api.conditions`."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str = Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=1024)
    """Why, in one word: a constant of `rljob.api.conditions`."""
    message: Message = ""
    """Why, in a sentence."""
    last_transition_time: Time
    """Since when `status` is what it is."""
    observed_generation: Count | None = None
    """The generation of the spec that it speaks of."""


class ValidationStatus(ApiModel):
    """The newest validation."""

    score: float | None = None
    """Mean reward."""
    step: Count | None = None
    """After which step."""


class RolloutsStatus(ApiModel):
    """Episodes, and the pods that make them."""

    replicas: Count | None = None
    """Rollout pods there are."""
    ready_replicas: Count | None = None
    """Rollout pods whose engine, gateway and worker are up."""
    desired: Count | None = None
    """Rollout pods there should be, by the manifest or the autoscaler."""
    selector: str | None = Field(default=None, max_length=1024)
    """Label selector of the rollout pods, for the scale subresource."""
    completed: Count | None = None
    """Episodes done."""
    failed: Count | None = None
    """Episodes that were given up."""
    running: Count | None = None
    """Episodes under way."""
    completion_rate: float | None = None
    """Share of the ended episodes that completed, 0 to 1."""
    mean_turns: float | None = None
    """Assistant turns of a completed episode."""
    first_ready_time: Time | None = None
    """When a rollout pod was ready for the first time: an engine that crashes later may become ready again."""


class AttemptsStatus(ApiModel):
    """Attempts of one component, one Job each. What the operator must remember of them lies here and nowhere else."""

    attempt: Count | None = None
    """Number of the newest Job, from 1."""
    ended: Count | None = None
    """Number of the newest Job that is over."""
    failures: Count | None = None
    """Attempts in a row that ended without a newly committed step; limited by backoffLimit."""
    fenced: Count | None = None
    """Attempts in a row that a newer start fenced."""
    failed_step: Count | None = None
    """Highest step that was committed when an attempt ended: a later one is progress."""
    retry_time: Time | None = None
    """When the next attempt is due."""


class TrainerStatus(AttemptsStatus):
    """The trainer's attempts; in modes eval and rollout, the collector's."""

    last_checkpoint: Count | None = None
    """Newest step that is known to have a checkpoint."""


class ProgressStatus(ApiModel):
    """What progressDeadlineSeconds counts from."""

    counter: Count | None = None
    """The ledger's count of everything that completed."""
    since: Time | None = None
    """When it last changed."""


class AutoscaleStatus(ApiModel):
    """What the autoscaler of rollouts remembers between two looks."""

    sample_time: Time | None = None
    """When the sums below were read."""
    waiting_seconds: float | None = None
    """What the trainer had waited in all."""
    incarnation: Count | None = None
    """Of that trainer: another one counts from 0."""
    up: Count | None = None
    """Looks in a row that spoke for more."""
    down: Count | None = None
    """Looks in a row that spoke for fewer."""
    scale_time: Time | None = None
    """When it last changed the number."""


class StalenessStatus(ApiModel):
    """Policy versions between sampling and training, of the newest batch."""

    mean: float | None = None
    """Over its tokens."""
    max: Count | None = None
    """Of any token; never above the bound."""


class SandboxesStatus(ApiModel):
    """All pools of the job together."""

    warm: Count | None = None
    """Ready and not claimed."""
    claimed: Count | None = None
    """In use by an episode."""


Conditions = Annotated[list[Condition], Field(max_length=32)]


class RLJobStatus(ApiModel):
    """What has become of a job."""

    observed_generation: Count | None = None
    """The generation of the spec that this status speaks of."""
    phase: str | None = Field(default=None, max_length=64)
    """The story in one word: a constant of `rljob.api.conditions`."""
    message: Message | None = None
    """What is awaited, or why it ended, in a sentence."""
    conditions: Conditions | None = None
    """The facts, one per type."""
    step: Count | None = None
    """Steps committed."""
    steps: Count | None = None
    """Steps wanted."""
    policy_version: Count | None = None
    """Newest published weights."""
    reward_mean: float | None = None
    """Mean reward of the newest batch."""
    validation: ValidationStatus | None = None
    rollouts: RolloutsStatus | None = None
    prepare: AttemptsStatus | None = None
    trainer: TrainerStatus | None = None
    progress: ProgressStatus | None = None
    autoscale: AutoscaleStatus | None = None
    staleness: StalenessStatus | None = None
    backlog: Count | None = None
    """Completed episodes in the stream that are not archived yet."""
    sandboxes: SandboxesStatus | None = None
    gpus: Count | None = None
    """nvidia.com/gpu that the job's pods ask for."""
    start_time: Time | None = None
    """First accepted and not suspended."""
    ready_time: Time | None = None
    """When all roles were up, since the start or the last resume."""
    completion_time: Time | None = None
    """Succeeded or failed."""


class SandboxPoolStatus(ApiModel):
    """What has become of a pool."""

    observed_generation: Count | None = None
    """The generation of the spec that this status speaks of."""
    conditions: Conditions | None = None
    """Ready and Degraded."""
    ready: Count | None = None
    """Warm sandboxes that can be claimed."""
    claimed: Count | None = None
    """In use by an episode."""
    starting: Count | None = None
    """Pods that are not ready yet."""
    resetting: Count | None = None
    """Between two episodes."""
    quarantined: Count | None = None
    """Did not verify after a reset; kept for a look."""
    warm: Count | None = None
    """Wanted ready, by the spec."""
    max: Count | None = None
    """Allowed in all, by the spec."""
    selector: str | None = Field(default=None, max_length=1024)
    """Label selector of the pods, for the scale subresource."""
