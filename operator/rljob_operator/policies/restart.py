"""What to do when a component has ended.

| it ended | and | then |
| --- | --- | --- |
| well | it was a preparation, or the job has finished | done |
| with 2 | | the job fails at once: its input is wrong, another try would say the same |
| by itself | an engine that never was ready | the job fails at once, with its last lines |
| with 3 (fenced) | for the first time in a row | again, not counted: the newer start may be a leftover of our own |
| else | failures in a row ≤ backoffLimit | again, after a pause that doubles |
| else | more | the job fails |

Failures in a row are counted per component and forgotten whenever a step is committed.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rljob.api import conditions

EXIT_USER_ERROR = 2
EXIT_FENCED = 3
_SIGNALLED = 128
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


class Action(StrEnum):
    """What happens next."""

    DONE = "done"
    """It has done its work."""
    RESTART = "restart"
    """Start it again after `delay_seconds`."""
    FAIL = "fail"
    """The whole job fails with `reason` and `message`."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a component ended, and what was before."""

    name: str
    role: str
    code: int
    may_end: bool
    """A good end is expected now: a preparation, or the job has finished."""
    ever_ready: bool
    """It was ready once since the job started, in this or an earlier start."""
    killed_for: str = ""
    """Why the driver itself killed it: it was not ready in time, or no longer answered."""
    failures_in_row: int
    """Without this one, since the last committed step."""
    fenced_in_row: int = 0
    last_lines: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """What to do about it."""

    action: Action
    delay_seconds: float = 0.0
    counted: bool = True
    reason: str = ""
    message: str = ""
    exit_code: int = 1


def decide(ended: Ended, backoff_limit: int) -> Decision:
    """The table above."""
    if ended.code == 0 and ended.may_end:
        return Decision(Action.DONE, counted=False)
    last = ended.last_lines[-1] if ended.last_lines else ""
    if ended.code == EXIT_USER_ERROR:
        return Decision(
            Action.FAIL,
            reason=conditions.REASON_BAD_INPUT,
            message=_refusal(ended, last),
            exit_code=2,
        )
    if (
        ended.role == "engine"
        and not ended.ever_ready
        and ended.code < _SIGNALLED
        and not ended.killed_for
    ):
        said = " | ".join(ended.last_lines) or "nothing"
        message = f"spec.rollout.engine: {ended.name} ended with code {ended.code} before it was ready; it said: {said}"
        return Decision(
            Action.FAIL, reason=conditions.REASON_START_FAILED, message=message, exit_code=2
        )
    if ended.code == EXIT_FENCED and ended.fenced_in_row == 0:
        return Decision(
            Action.RESTART, _FIRST_PAUSE_SECONDS, counted=False, reason="fenced by a newer start"
        )
    if ended.failures_in_row >= backoff_limit:
        message = f"{ended.name} failed {ended.failures_in_row + 1} times without a committed step ({_how(ended)})"
        return Decision(
            Action.FAIL,
            reason=conditions.REASON_BACKOFF_LIMIT,
            message=f"{message}: {last}" if last else message,
        )
    return Decision(Action.RESTART, pause_seconds(ended.failures_in_row), reason=_how(ended))


def pause_seconds(failures_in_row: int) -> float:
    """0.5 s, doubled for each failure before this one, 30 s at most."""
    return min(_FIRST_PAUSE_SECONDS * 2 ** min(failures_in_row, 16), _LONGEST_PAUSE_SECONDS)


def _refusal(ended: Ended, last: str) -> str:
    """The component's own line; vLLM's says nothing of a manifest."""
    if ended.role == "engine" and not last.startswith("spec."):
        return f"spec.rollout.engine: {ended.name} refused to start: {last}; correct it"
    return last or f"{ended.name} refused its input"


def _how(ended: Ended) -> str:
    if ended.killed_for:
        return ended.killed_for
    if ended.code >= _SIGNALLED:
        return f"killed by signal {ended.code - _SIGNALLED}"
    return f"exit code {ended.code}"
