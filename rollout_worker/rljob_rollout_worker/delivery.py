"""(4) → (5) Hands finished attempts over to the ledger and keeps them until it has answered.

    trajectory ──pack──► log `sent` ──► complete ──answer──► log the answer      (order and reasons: completions.py)

The store may be away for minutes (a restarted Valkey, a fail-over): every call here is repeated for
`OUTAGE_SECONDS`, with a pause that grows to `LONGEST_PAUSE_SECONDS`. Whoever still gets no answer
raises StoreError, and the worker ends with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec
import structlog

from rljob import telemetry
from rljob.clock import Clock
from rljob.codec import pack
from rljob.errors import StoreError
from rljob.ids import EpisodeId, PolicyVersion
from rljob.ledger.types import CompletionInfo, FailReply, LeaseReply, Report, Verdict
from rljob.trajectory import Trajectory
from rljob_rollout_worker.completions import Answer, CompletionLine, CompletionLog

OUTAGE_SECONDS = 300.0
"""How long a store may be away before the worker gives up; each call of the ledger waits some seconds by itself."""
RELEASE_SECONDS = 5.0
"""The same for leases that are handed back: they end by themselves if nobody hears of it."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0

T = TypeVar("T")
_log = structlog.get_logger("rljob.delivery")


class WorkerLedger(Protocol):
    """What of `rljob.ledger.Ledger` a worker calls."""

    async def lease(
        self, worker: str, boot_id: str, engine: PolicyVersion | None, free_slots: int
    ) -> LeaseReply:
        """Ask for episodes."""
        ...

    async def heartbeat(
        self, worker: str, boot_id: str, attempts: Sequence[tuple[EpisodeId, int]]
    ) -> dict[tuple[EpisodeId, int], Verdict]:
        """Extend leases."""
        ...

    async def complete(
        self,
        worker: str,
        boot_id: str,
        episode: EpisodeId,
        attempt: int,
        payload: bytes,
        info: CompletionInfo,
    ) -> Literal["accepted", "already_done"]:
        """Hand over a finished episode."""
        ...

    async def fail(
        self,
        worker: str,
        boot_id: str,
        episode: EpisodeId,
        attempt: int,
        reason: str,
        evidence: str = "",
    ) -> FailReply:
        """Report a failed attempt."""
        ...

    async def release(
        self, worker: str, boot_id: str, attempts: Sequence[tuple[EpisodeId, int]]
    ) -> None:
        """Hand attempts back."""
        ...

    async def report(self, component: str, report: Report) -> None:
        """Say how it goes."""
        ...


class Delivery:
    """The calls that must not be lost.

    Args:
        ledger: The ledger.
        log: The worker's completion log.
        worker: Name of the worker.
        boot_id: Its boot id.
        clock: Time.
        outage_seconds: How long a store that is away is asked again.
    """

    def __init__(
        self,
        ledger: WorkerLedger,
        log: CompletionLog,
        worker: str,
        boot_id: str,
        clock: Clock,
        outage_seconds: float = OUTAGE_SECONDS,
    ) -> None:
        self._ledger, self._log, self._clock = ledger, log, clock
        self._me = (worker, boot_id)
        self.outage_seconds = outage_seconds

    async def complete(self, episode: EpisodeId, attempt: int, trajectory: Trajectory) -> Answer:
        """Deliver a finished episode. Raises StoreError, FencedError."""
        payload = pack(trajectory)
        line = CompletionLine(
            time=self._clock.now(),
            episode=str(episode),
            attempt=attempt,
            answer="sent",
            reward=trajectory.reward,
            outcome=trajectory.outcome,
            sha256=hashlib.sha256(payload).hexdigest(),
        )
        await self._log.append(line)
        info = completion_info(trajectory, seconds=line.time - trajectory.started_at)
        answer = await self._insist(
            lambda: self._ledger.complete(*self._me, episode, attempt, payload, info)
        )
        await self._log.append(msgspec.structs.replace(line, time=self._clock.now(), answer=answer))
        count_completion(trajectory, answer)
        return answer

    async def fail(
        self, episode: EpisodeId, attempt: int, reason: str, evidence: str, task: str
    ) -> FailReply:
        """Report an infrastructure failure. Raises StoreError, FencedError."""
        reply = await self._insist(
            lambda: self._ledger.fail(*self._me, episode, attempt, reason, evidence)
        )
        _log.warning(
            "attempt_failed",
            episode=str(episode),
            attempt=attempt,
            reason=reason,
            then=reply.outcome,
        )
        telemetry.EPISODES.inc(outcome="infra_error", task=task)
        telemetry.ATTEMPTS.inc(answer=reply.outcome)
        return reply

    async def release(self, attempts: Sequence[tuple[EpisodeId, int]]) -> None:
        """Hand attempts back uncounted. Raises StoreError, FencedError."""
        if attempts:
            await self._insist(lambda: self._ledger.release(*self._me, attempts), RELEASE_SECONDS)
            telemetry.ATTEMPTS.inc(len(attempts), answer="released")

    async def _insist(self, call: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        began, pause = self._clock.monotonic(), FIRST_PAUSE_SECONDS
        limit = self.outage_seconds if seconds is None else seconds
        while True:
            try:
                return await call()
            except StoreError as error:
                if self._clock.monotonic() - began >= limit:
                    raise
                _log.warning("store_unreachable", reason=str(error), retry_after_seconds=pause)
            await self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def completion_info(trajectory: Trajectory, seconds: float) -> CompletionInfo:
    """What the ledger is told of a payload that it does not read."""
    oldest, newest = trajectory.version_range
    return CompletionInfo(
        reward=trajectory.reward,
        outcome=trajectory.outcome,
        min_version=oldest,
        max_version=newest,
        tokens=trajectory.num_tokens,
        action_tokens=trajectory.num_action_tokens,
        turns=trajectory.turns,
        tool_calls=trajectory.tool_calls,
        seconds=seconds,
    )


def count_completion(trajectory: Trajectory, answer: Answer) -> None:
    """Metrics of a delivered episode."""
    task = trajectory.task
    telemetry.ATTEMPTS.inc(answer=answer)
    telemetry.EPISODES.inc(outcome=trajectory.outcome, task=task)
    telemetry.EPISODE_TURNS.observe(trajectory.turns, task=task)
    telemetry.EPISODE_REWARD.observe(trajectory.reward, task=task)
    actions = trajectory.num_action_tokens
    telemetry.TOKENS.inc(actions, kind="action")
    telemetry.TOKENS.inc(trajectory.num_tokens - actions, kind="prompt")
