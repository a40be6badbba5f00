"""One job at one moment, and how every answer is put together."""

from __future__ import annotations

from collections.abc import Iterable

from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob_operator.decision import numbers, words
from rljob_operator.decision.draft import Draft
from rljob_operator.decision.roles import Role
from rljob_operator.decision.seen import Seen, see
from rljob_operator.decision.times import to_text
from rljob_operator.observed import Decision, LedgerView, Observed, Shape
from rljob_operator.policies import deadlines

SOON_SECONDS = 0.3
"""Until a status that was just decided can be read back."""


class Case:
    """What one pass works on."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed
        self.now = observed.now_seconds
        self.seen: Seen = see(observed)
        self.ledger: LedgerView = observed.ledger
        self.draft = Draft(observed.resource, self.now)

    def count(self, job: RLJob | None = None) -> None:
        """Take the numbers into the status."""
        fields, snapshot = self.draft.fields, self.ledger.snapshot
        rollouts = {**(fields.get("rollouts") or {}), **numbers.rollout_pods(self.seen)}
        if job is not None:
            fields.setdefault("step", 0)
            fields["steps"] = job.spec.trainer.steps if job.spec.mode == "train" else None
        if snapshot is not None and job is not None:
            fields.update(numbers.from_ledger(snapshot))
            rollouts.update(numbers.episodes(snapshot))
            last = numbers.last_checkpoint(snapshot.step, job)
            if last is not None and fields.get("trainer"):
                fields["trainer"] = {**fields["trainer"], "lastCheckpoint": last}
        fields["rollouts"] = rollouts
        fields["sandboxes"] = numbers.sandboxes(self.seen)
        fields["gpus"] = self.seen.gpus()

    def state(self, role: Role) -> None:
        """State the condition of a role."""
        self.draft.set(role.kind, role.ready, role.reason, role.message)

    def answer(
        self,
        shape: Shape | None,
        phase: str,
        message: str = "",
        *,
        due: Iterable[float | None] = (),
        longest: float | None = None,
        suspend_because: str = "",
    ) -> Decision:
        """Status, events and when to look again."""
        words.announce(self.draft, phase)
        status = self.draft.finish(phase, message)
        wait = deadlines.nearest(due, self.now, longest=longest)
        return Decision(
            shape=shape,
            status=status,
            requeue_seconds=wait,
            events=tuple(self.draft.events),
            suspend_because=suspend_because,
        )

    def end(self, phase: str, reason: str, message: str) -> Decision:
        """The job has ended. Its children stay until this was written: they are the evidence."""
        succeeded = phase == conditions.PHASE_SUCCEEDED
        self.draft.set(
            conditions.COMPLETE if succeeded else conditions.FAILED, True, reason, message
        )
        self.draft.fields["completionTime"] = to_text(self.now)
        return self.answer(None, phase, "" if succeeded else message, longest=SOON_SECONDS)

    def fail(self, reason: str, message: str) -> Decision:
        """The job has failed."""
        return self.end(conditions.PHASE_FAILED, reason, message)
