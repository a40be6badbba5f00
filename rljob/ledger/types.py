"""What the calls of the ledger take and answer. Every struct crosses a process boundary.

Evolution rule: new fields are appended with a default; fields are never renamed or given another meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from rljob.ids import EpisodeId, GroupId, PolicyVersion

if TYPE_CHECKING:
    from rljob.api.rljob_types import RLJob

LeaseReason = Literal[
    "no_policy",
    "at_capacity",
    "staleness_bound",
    "all_steps_admitted",
    "memory",
    "engine_behind",
    "finished",
    "draining",
]
"""Why a worker got fewer leases than it has free slots."""

Verdict = Literal["ok", "already_done", "hopeless"]
Phase = Literal["Succeeded", "Failed"]


class LedgerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one job. prepare or trainer → ledger. Fields marked (fixed) may not differ from what is stored."""

    job: str
    group_size: int
    """Episodes per group (fixed)."""
    groups_per_step: int
    """B (fixed)."""
    steps: int
    max_staleness: int
    """η, in policy versions."""
    max_concurrent_episodes: int
    max_attempts: int = 3
    retry_backoff_seconds: float = 1.0
    on_stale: Literal["evict", "wait", "mask"] = "evict"
    max_evictions: int = 3
    wait_seconds: float = 600.0
    zero_variance: Literal["keep", "drop"] = "keep"
    lease_seconds: float = 30.0
    heartbeat_seconds: float = 10.0
    max_running_validation: int | None = None
    """Validation episodes running at once; None: as many as `max_concurrent_episodes`, on top of training's."""
    num_rows: int
    """Rows of the data that the job works on (fixed): of mode `eval` the validation rows, else the training rows."""
    data_hash: str
    """Hash of that data (fixed)."""
    num_groups: int | None = None
    """Groups in all, where nothing is trained; None: steps × groups_per_step."""
    one_pass: bool = False
    """With `num_groups`: no other row takes the place of a dead one."""

    @property
    def max_outstanding_episodes(self) -> int:
        """Training payloads that the store may have to hold at once: what admission lets start before a step ends."""
        groups = min((self.max_staleness + 1), self.steps) * self.groups_per_step
        return groups * self.group_size

    @classmethod
    def from_job(cls, job: RLJob, num_rows: int, data_hash: str) -> LedgerConfig:
        """The rules that a manifest asks for."""
        rollout = job.spec.rollout
        by_mode = {"train": _training, "eval": _scoring, "rollout": _collecting}[job.spec.mode]
        return cls(
            job=job.ledger_name,
            max_concurrent_episodes=rollout.max_concurrent_episodes,
            max_attempts=rollout.max_attempts,
            retry_backoff_seconds=rollout.retry_backoff_seconds,
            num_rows=num_rows,
            data_hash=data_hash,
            **by_mode(job, num_rows),
        )


def _training(job: RLJob, num_rows: int) -> dict[str, Any]:
    rollout, trainer = job.spec.rollout, job.spec.trainer
    return {
        "group_size": rollout.group_size,
        "groups_per_step": trainer.groups_per_step,
        "steps": trainer.steps,
        "max_staleness": rollout.staleness_bound,
        "on_stale": rollout.stale_policy,
        "max_evictions": 3 if rollout.max_evictions is None else rollout.max_evictions,
        "wait_seconds": 600.0 if rollout.wait_seconds is None else rollout.wait_seconds,
        "zero_variance": trainer.algorithm.zero_variance_groups,
    }


def _scoring(job: RLJob, num_rows: int) -> dict[str, Any]:
    """One validation run, and not one group."""
    return {"group_size": 1, "groups_per_step": 1, "steps": 0, "max_staleness": 0}


def _collecting(job: RLJob, num_rows: int) -> dict[str, Any]:
    """Batches are only what is archived at once. Version 0 for ever: nothing gets stale."""
    from rljob.api.modes import COLLECTED_EPISODES

    rollout = job.spec.rollout
    groups = rollout.groups or num_rows
    batch = max(1, min(groups, COLLECTED_EPISODES // rollout.group_size))
    steps = -(-groups // batch)
    return {
        "group_size": rollout.group_size,
        "groups_per_step": batch,
        "steps": steps,
        "max_staleness": steps,
        "num_groups": groups,
        "one_pass": rollout.groups is None,
    }


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to run one attempt of one episode. ledger → worker."""

    episode: EpisodeId
    attempt: int
    """1 for the first; every further lease of the episode counts up, whether or not the last one failed."""
    row_index: int
    """Training: place in the endless order of rows (may exceed `num_rows`). Validation: index of the row."""
    deadline_seconds: float
    """Seconds until the lease ends unless a heartbeat extends it."""
    validation: bool = False


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """ledger → worker."""

    leases: list[Lease]
    reason: LeaseReason | None = None
    """Why there are fewer leases than free slots; None when every slot was filled."""
    retry_after_seconds: float = 0.0
    """When asking again may help."""


class OpenAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that the worker's present boot holds. ledger → worker, after a reconnect."""

    episode: EpisodeId
    attempt: int
    deadline_seconds: float


class CompletionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger must know of a payload that it does not read. worker → ledger."""

    reward: float
    outcome: str
    min_version: int
    """n of the oldest sampled token; -1 where nothing was sampled."""
    max_version: int
    tokens: int = 0
    action_tokens: int = 0
    turns: int = 0
    tool_calls: int = 0
    seconds: float = 0.0


class FailReply(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a failed attempt. ledger → worker."""

    outcome: Literal["retry", "dead", "already_done"]
    retry_after_seconds: float = 0.0


class TakenGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A complete group. ledger → trainer."""

    group: GroupId
    payloads: list[bytes]
    """Packed trajectories in member order."""
    evictions: int
    """How often its row was evicted before."""


class TakeReply(msgspec.Struct, frozen=True, kw_only=True):
    """ledger → trainer."""

    groups: list[TakenGroup] | None
    """None: not yet; `reason` says why."""
    reason: str | None = None
    """`groups` (too few complete), `stale_groups` (policy `wait`: groups that must be in this batch still run),
    `all_collected` (mode `rollout`: nothing is left to take)."""
    retry_after_seconds: float = 0.0
    facts: dict[str, float] = {}
    """need, ready, running_groups, running_episodes, waited_seconds."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The newest committed weights. ledger → everyone."""

    version: PolicyVersion | None
    """None before the first commit."""
    digest: str = ""
    step: int = 0
    """Steps trained."""


class ValidationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a validation run is. ledger → trainer."""

    step: int
    open: bool
    total: int = 0
    """Episodes: rows × samples per prompt."""
    done: int = 0
    """Scored episodes, dead ones not included. The run is over when done + dead == total."""
    dead: int = 0
    """Episodes out of attempts; each counts as reward 0."""
    running: int = 0
    sum_reward: float = 0.0
    settled: bool = False
    versions: tuple[int, int] | None = None
    """(oldest, newest) n of any token so far; None while nothing was sampled."""

    @property
    def complete(self) -> bool:
        """Whether every episode has a score."""
        return self.total > 0 and self.done + self.dead >= self.total

    @property
    def score(self) -> float:
        """Mean reward over all scored and dead episodes; 0 before the first."""
        count = self.done + self.dead
        return self.sum_reward / count if count else 0.0


class Report(msgspec.Struct, kw_only=True):
    """What a component says of itself, for people. component → ledger → live view."""

    waiting_for: str = ""
    facts: dict[str, float | str] = {}


class ReportView(Report, kw_only=True):
    """A report as it is read back."""

    age_seconds: float = 0.0


class LedgerSnapshot(msgspec.Struct, kw_only=True):
    """The state of a job at one moment. ledger → live view, watchdog, metrics."""

    step: int
    """Steps trained."""
    steps: int
    incarnation: int
    policy: Policy
    phase: str | None
    message: str
    counts: dict[str, int]
    """Totals: leased, completed, failed, retried, expired, rerun, trained, validated (episodes), evicted, dead,
    dropped (groups). Now: running (leased episodes), open (unfinished episodes of started groups), retry_waiting,
    missing, running_groups, ready_groups, taken_groups, admitted, validation_running."""
    reports: dict[str, ReportView]
    reward_mean: float | None
    """Mean reward of the last batch taken; before the first, of recent completions."""
    reward_recent: float | None
    """Moving mean over about the last 50 completions."""
    turns_recent: float | None
    validation: dict[int, float]
    """Score per closed validation step."""
    staleness: dict[str, float]
    """mean and max over the groups of the last batch taken; empty before."""
    progress: int
    """Goes up with every completion, take, archive, commit."""
    stream_entries: int
    stream_pending: int
    """Entries taken but not archived yet."""
    memory_bytes: int
    max_memory_bytes: int


class DeadLetter(msgspec.Struct, kw_only=True):
    """A group that was given up, with its evidence. ledger → people, audit."""

    id: str
    group: str
    episode: str
    reason: str
    evidence: str
    time: float
    """Seconds since the epoch, store's clock."""


class LedgerFacts(msgspec.Struct, kw_only=True):
    """What the audit needs to know of the ledger; it is saved beside the artifacts so that it outlives the store."""

    job: str
    step: int
    archived_step: int
    counts: dict[str, int]
    outstanding: set[str]
    """Episodes whose completion is in the stream."""
    live_groups: list[str]
    evictions: dict[int, int]
    """Row index → evictions so far, of rows that are not trained yet."""
    dead_rows: set[int]
    dropped_rows: set[int]
    dead_letters: list[DeadLetter]
    finished: bool = False
