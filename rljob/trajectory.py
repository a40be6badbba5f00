"""The record of one finished episode, as it crosses the stream.

rollout_worker (packs) ──► Redis stream ──► trainer (archives, trains); CLI `trajectories` (shows).

Evolution rule: `SCHEMA_VERSION` goes up when a reader of the old version could misread a record.
New fields are appended
with a default; fields are never removed, renamed or given another meaning. `codec` reads every
version back to 1.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA_VERSION = 1

Outcome = Literal["completed", "max_turns", "context_full", "timeout", "agent_error"]
"""Why an episode ended. All of these train; an infrastructure error is never a trajectory."""

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Action tokens `[start, start+length)` of `Chain.tokens` were sampled by `(incarnation, n)`.

    Spans are sorted, do not overlap, and together cover exactly the action tokens.
    """

    start: int
    length: int
    incarnation: int
    n: int


class Chain(msgspec.Struct, kw_only=True):
    """One linear token sequence of an episode. T tokens, of which A are action tokens (sampled by the policy)."""

    tokens: list[int]
    """[T] token ids exactly as the engine saw and sampled them."""
    prompt_length: int
    """Tokens before the first action token."""
    action_mask: list[bool]
    """[T] True where the token was sampled by the policy."""
    logprobs: list[float]
    """[A] float32 log probability of each action token under the policy that sampled it, in order."""
    version_spans: list[VersionSpan]
    finish_reason: FinishReason
    agent_id: str = "main"
    """Which agent of the episode spoke; sub-agents open chains of their own."""
    routed_experts: str | None = None
    """Reference to router decisions in the artifact store; absent for dense models."""


class Trajectory(msgspec.Struct, kw_only=True):
    """One finished episode."""

    schema_version: int = SCHEMA_VERSION
    job: str
    episode: str
    """`str(EpisodeId)`."""
    attempt: int
    task: str
    reward: float
    reward_parts: dict[str, float] = {}
    outcome: Outcome
    chains: list[Chain]
    turns: int
    """Assistant turns."""
    tool_calls: int
    stage_seconds: dict[str, float] = {}
    """Seconds per stage: acquire, setup, run, reward."""
    started_at: float
    """Seconds since the epoch."""
    worker: str
    sandbox: str
    model: str
    sampling: dict[str, float] = {}
    row_index: int
    row_hash: str = ""
    """Hash of the row's canonical JSON; empty where the producer did not know it."""
    metadata: dict[str, Any] = {}
    """Small JSON values of the task (never tokens)."""

    @property
    def num_tokens(self) -> int:
        """All tokens of all chains."""
        return sum(len(chain.tokens) for chain in self.chains)

    @property
    def num_action_tokens(self) -> int:
        """Sampled tokens of all chains."""
        return sum(len(chain.logprobs) for chain in self.chains)

    @property
    def version_range(self) -> tuple[int, int]:
        """(oldest, newest) n of any action token; (-1, -1) when nothing was sampled."""
        ns = [span.n for chain in self.chains for span in chain.version_spans]
        return (min(ns), max(ns)) if ns else (-1, -1)
