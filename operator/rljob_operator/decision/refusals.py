"""Rollout containers that refuse: what ends the job at once, or after `backoffLimit` restarts.

The kubelet restarts containers of a rollout pod for ever. Exit code 2 means that another start would say the same; an
engine that dies again and again without ever having been ready will not become ready either.
"""

from __future__ import annotations

from typing import Any

from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob_operator.decision import objects, trouble
from rljob_operator.decision.case import Case
from rljob_operator.policies.restart import EXIT_USER_ERROR, Ended, decide


def refusal(case: Case, job: RLJob) -> tuple[str, str] | None:
    """Reason and message with which the job fails."""
    ever_ready = bool((case.draft.fields.get("rollouts") or {}).get("firstReadyTime"))
    limit = job.spec.lifecycle.backoff_limit
    for pod in case.seen.of("rollout"):
        if objects.deleting(pod):
            continue
        for status in objects.container_statuses(pod):
            if found := _of_container(objects.name_of(pod), status, ever_ready, limit):
                return found
    return None


def _of_container(
    pod: str, status: dict[str, Any], ever_ready: bool, limit: int
) -> tuple[str, str] | None:
    end = trouble.last_end(status)
    if end is None or status.get("ready"):
        return None
    role, code = str(status["name"]), int(end.get("exitCode", 0))
    if code != EXIT_USER_ERROR:
        worn_out = role == "engine" and int(status.get("restartCount", 0)) > limit
        if ever_ready or not worn_out or code == 0:
            return None
        said = " | ".join(trouble.last_lines(end)) or "nothing"
        times = f"ended {limit + 1} times before it was ever ready ({trouble.how(end)})"
        text = f"spec.rollout.engine: the engine of {pod} {times}; it said: {said}"
        return conditions.REASON_START_FAILED, text
    decision = decide(
        Ended(
            name=f"{role} of {pod}",
            role=role,
            code=code,
            may_end=False,
            ever_ready=True,
            failures_in_row=0,
            last_lines=trouble.last_lines(end),
        ),
        limit,
    )
    return decision.reason, decision.message
