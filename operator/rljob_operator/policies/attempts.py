"""What to do when an attempt (a prepare, trainer or collector Job) is over.

| it ended | then |
| --- | --- |
| with 2 | the job fails at once: its input is wrong |
| with 3 (fenced), for the first time in a row | again, not counted |
| with its node (drained, preempted, evicted) | again, not counted: nobody's fault |
| because the job was suspended | again on resume, not counted |
| else, failures in a row ≤ backoffLimit | again, after a pause that doubles |
| else | the job fails, with the last line |

A failure after new steps were committed is the first in a row. The numbers live in the RLJob's status; attempts only
count up.
"""

from __future__ import annotations

import msgspec

from rljob_operator.policies.restart import EXIT_FENCED, Action, Decision, Ended, decide


class Attempts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is remembered of the attempts of one component."""

    attempt: int = 0
    """The newest that was started; 0: none."""
    ended: int = 0
    """The newest that is over; the next start is `ended` + 1."""
    failures: int = 0
    """Failures in a row without a newly committed step."""
    fenced: int = 0
    """Fenced in a row."""
    failed_step: int = -1
    """Highest step that was committed when one failed."""

    @property
    def running(self) -> bool:
        """An attempt was started and is not over."""
        return self.attempt > self.ended


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended."""

    component: str
    """For people: the trainer, the collector, preparing."""
    code: int
    how: str = ""
    """In words, where the exit code says less (OOMKilled, its pod was deleted)."""
    lines: tuple[str, ...] = ()
    disrupted: bool = False
    """Its node was drained, it was preempted or evicted."""
    step: int = 0
    """Newest committed step."""


def suspended(attempts: Attempts) -> Attempts:
    """The running attempt, if any, is taken down on purpose."""
    return msgspec.structs.replace(attempts, ended=attempts.attempt)


def over(attempts: Attempts, end: End, backoff_limit: int) -> tuple[Attempts, Decision]:
    """The table above: what is remembered, and whether to fail or to start again after `delay_seconds`."""
    fresh = end.step > attempts.failed_step
    failures, fenced = (0, 0) if fresh else (attempts.failures, attempts.fenced)
    what = Ended(
        name=end.component,
        role="trainer",
        code=end.code,
        may_end=False,
        ever_ready=True,
        killed_for=end.how,
        failures_in_row=failures,
        fenced_in_row=fenced,
        last_lines=end.lines,
    )
    decision = decide(what, backoff_limit)
    if end.disrupted and end.code != 2:
        decision = Decision(Action.RESTART, 1.0, counted=False, reason=end.how)
    if decision.action is Action.RESTART and end.lines:
        said = f"{decision.reason}: {end.lines[-1]}"
        decision = msgspec.structs.replace(decision, message=said)
    after = Attempts(
        attempt=attempts.attempt,
        ended=attempts.attempt,
        failures=failures + decision.counted,
        fenced=fenced + (end.code == EXIT_FENCED and not decision.counted),
        failed_step=max(end.step, attempts.failed_step),
    )
    return after, decision
