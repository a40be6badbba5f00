"""What a worker says while it works: heartbeats for its leases, and reports for people.

    heartbeat_loop   every 10 s   leases live on; what is `already_done` or `hopeless` is dropped
    report_loop      every 2 s    waiting_for and facts for the live view

Both go on while the store is away: episodes run on without it. One that is away for longer than
`Delivery.outage_seconds` ends the worker. `FencedError` ends it at once: another process runs under
its name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog

from rljob import telemetry
from rljob.clock import Clock
from rljob.errors import StoreError
from rljob.ledger.types import Report
from rljob_rollout_worker.delivery import WorkerLedger
from rljob_rollout_worker.pipeline import STAGES, Pipeline

HEARTBEAT_SECONDS = 10.0
REPORT_SECONDS = 1.5
RATE_WINDOW_SECONDS = 30.0

_log = structlog.get_logger("rljob.presence")


class TokenRate:
    """Sampled tokens per second over the last half minute, counted when an episode ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began = clock, clock.monotonic()
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, tokens: int) -> None:
        """Count the tokens of an episode."""
        self._recent.append((self._clock.monotonic(), tokens))

    def per_second(self) -> float:
        """The rate now."""
        now = self._clock.monotonic()
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_SECONDS:
            self._recent.popleft()
        window = max(min(RATE_WINDOW_SECONDS, now - self._began), 1.0)
        return sum(tokens for _, tokens in self._recent) / window


class Presence:
    """The two loops.

    Args:
        pipeline: Whose attempts these are.
        ledger: The ledger.
        identity: (worker, boot id).
        clock: Time.
        outage_seconds: How long the store may be away.
        engine_problem: What stands between the engine and a version.
        reward_errors: How many episodes had a broken reward.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        ledger: WorkerLedger,
        identity: tuple[str, str],
        clock: Clock,
        outage_seconds: float,
        engine_problem: Callable[[], str],
        reward_errors: Callable[[], int] = lambda: 0,
    ) -> None:
        self._pipeline, self._ledger, self._identity, self._clock = (
            pipeline,
            ledger,
            identity,
            clock,
        )
        self._outage_seconds, self._engine_problem = outage_seconds, engine_problem
        self._reward_errors, self.rate = reward_errors, TokenRate(clock)

    async def heartbeat_loop(self) -> None:
        """Keep the leases alive. Never ends by itself. Raises StoreError, FencedError."""
        answered = self._clock.monotonic()
        while True:
            await self._clock.sleep(HEARTBEAT_SECONDS)
            try:
                await self.heartbeat()
                answered = self._clock.monotonic()
            except StoreError as error:
                if self._clock.monotonic() - answered > self._outage_seconds:
                    raise
                _log.warning("heartbeat_unanswered", reason=str(error))

    async def heartbeat(self) -> None:
        """One heartbeat; drops what nobody waits for any more."""
        attempts = {attempt.key: attempt for attempt in self._pipeline.attempts}
        verdicts = await self._ledger.heartbeat(*self._identity, list(attempts))
        gone = [attempts[key] for key, verdict in verdicts.items() if verdict != "ok"]
        # what is being delivered hears it from that call's own answer, which belongs into the log
        dropped = [attempt for attempt in gone if attempt.stage != "deliver"]
        for attempt in dropped:
            verdict = verdicts[attempt.key]
            _log.info("episode_dropped", episode=str(attempt.lease.episode), verdict=verdict)
            telemetry.ATTEMPTS.inc(answer=verdict)
        self._pipeline.cancel(dropped)  # not awaited: the other leases want their heartbeat in time

    async def report_loop(self) -> None:
        """Tell the ledger how it goes. Never ends by itself. Raises FencedError."""
        while True:
            try:
                await self._ledger.report(self._identity[0], self.report())
            except StoreError as error:  # a report is never worth a retry: the next one says more
                _log.debug("report_lost", reason=str(error))
            await self._clock.sleep(REPORT_SECONDS)

    def report(self) -> Report:
        """What there is to say now."""
        stages: dict[str, int] = dict.fromkeys(STAGES, 0)
        for attempt in self._pipeline.attempts:
            stages[attempt.stage] += 1
        for stage, number in stages.items():
            telemetry.EPISODES_RUNNING.set(number, stage=stage)
        running = sum(stages.values())
        facts: dict[str, float | str] = {"running": running, **stages}
        facts["tokens_per_second"] = round(self.rate.per_second(), 1)
        facts |= {"completed": self._pipeline.completed, "failed": self._pipeline.failed}
        if errors := self._reward_errors():
            facts["reward_errors"] = errors
        return Report(waiting_for=self._waiting_for(running, stages), facts=facts)

    def _waiting_for(self, running: int, stages: dict[str, int]) -> str:
        why = self._pipeline.waiting_for
        if why == "engine":
            problem = self._engine_problem()
            return f"engine: {problem}" if problem else why
        if not running or why == "store":
            return why
        if stages["acquire"] == running:
            return "sandboxes"
        return "store" if stages["deliver"] == running else ""
