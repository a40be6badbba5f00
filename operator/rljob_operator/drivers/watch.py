"""Looks at the job every second: facts for the view and status.json, conditions, and the progress deadline.

component states ─┐
ledger snapshot  ─┼─► facts ─► view, status.json
metrics/*.jsonl  ─┘     └────► conditions, events, progress deadline
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from rljob.api import conditions
from rljob.api.rljob_types import RLJob
from rljob.clock import Clock
from rljob.ledger import LedgerSnapshot
from rljob_operator.drivers.folder import EventLog, RunFolder
from rljob_operator.drivers.observer import Observer
from rljob_operator.drivers.supervisor import State, Supervisor
from rljob_operator.policies.progress import Progress, Told, blame
from rljob_operator.policies.verdict import Verdict
from rljob_operator.view.facts import Facts, StepPace, apply_snapshot
from rljob_operator.view.metrics import read_scores

_EVERY_SECONDS = 1.0
_UP = {State.READY, State.DONE}
_CONDITION_ROLES = {
    conditions.STORE_READY: ("store",),
    conditions.SANDBOXES_READY: ("sandbox-pool",),
    conditions.ROLLOUTS_READY: ("engine", "gateway", "worker"),
    conditions.TRAINER_READY: ("trainer",),
}


class View(Protocol):
    """Where facts and events are shown."""

    def update(self, facts: Facts) -> None:
        """Show the newest facts."""
        ...

    def note(self, text: str) -> None:
        """Show one event."""
        ...


class Watch:
    """See the module."""

    def __init__(
        self,
        job: RLJob,
        folder: RunFolder,
        events: EventLog,
        artifacts: Path,
        *,
        observer: Observer,
        view: View,
        clock: Clock,
        started_at: float,
    ) -> None:
        self._job, self._folder, self._events, self._artifacts = job, folder, events, artifacts
        self._observer, self._view, self._clock = observer, view, clock
        self._pace, self._began = StepPace(), clock.monotonic()
        self._progress = Progress(since_seconds=self._began)
        self._step = -1
        self._restarts: dict[str, int] = {}
        self.facts = Facts(
            name=job.name,
            phase=conditions.PHASE_PENDING,
            started_at=started_at,
            mode=job.spec.mode,
            steps=job.spec.trainer.steps if job.spec.mode == "train" else 0,
        )
        self.snapshot: LedgerSnapshot | None = None
        self.first_weights_seconds: float | None = None
        """From the start of the run to the first committed weights."""

    async def run(self, supervisors: Mapping[str, Supervisor]) -> None:
        """Look every second, for ever."""
        while True:
            await self.look(supervisors)
            await self._clock.sleep(_EVERY_SECONDS)

    async def look(self, supervisors: Mapping[str, Supervisor]) -> None:
        """Look once."""
        up = all(s.state in _UP for s in supervisors.values() if s.component.role == "store")
        snapshot = await self._observer.snapshot() if up else None
        now = self._clock.monotonic()
        facts = self.facts
        facts.components = {name: str(s.state) for name, s in supervisors.items()}
        facts.restarts = {name: s.restarts for name, s in supervisors.items() if s.restarts}
        facts.phase, facts.elapsed_seconds = _phase(supervisors), now - self._began
        if snapshot is not None:
            self._take_in(snapshot, supervisors, now)
        self._note_restarts(supervisors)
        self._conditions(supervisors)
        self._progress_deadline(now)
        facts.conditions = list(self._events.conditions.values())
        self._folder.write("status.json", msgspec.to_builtins(facts))
        self._view.update(facts)

    def last(self, snapshot: LedgerSnapshot | None) -> None:
        """The job has ended: one more look at the ledger."""
        if snapshot is not None:
            self.snapshot = snapshot
            apply_snapshot(self.facts, snapshot)
            self.facts.validation = read_scores(self._artifacts, snapshot.validation)

    def end(self, verdict: Verdict) -> None:
        """Everything is stopped: the last word to status.json, conditions and view."""
        succeeded = verdict.phase == conditions.PHASE_SUCCEEDED
        kind = conditions.COMPLETE if succeeded else conditions.FAILED
        if verdict.phase != conditions.PHASE_STOPPED:
            self._events.condition(kind, True, verdict.reason, verdict.message)
        facts = self.facts
        facts.phase, facts.message = verdict.phase, "" if succeeded else verdict.message
        facts.components = dict.fromkeys(facts.components, "stopped")
        facts.elapsed_seconds = self._clock.monotonic() - self._began
        facts.waiting, facts.eta_seconds, facts.validation_running = {}, None, ""
        facts.conditions = list(self._events.conditions.values())
        self._folder.write("status.json", msgspec.to_builtins(facts))
        self._view.update(facts)

    def _take_in(
        self, snapshot: LedgerSnapshot, supervisors: Mapping[str, Supervisor], now: float
    ) -> None:
        self.snapshot = snapshot
        apply_snapshot(self.facts, snapshot)
        self.facts.validation = read_scores(self._artifacts, snapshot.validation)
        self.facts.validation_running = _validation_running(snapshot)
        if snapshot.policy.version is not None:  # before the first weights nothing can be trained
            self.facts.eta_seconds = self._pace.eta_seconds(now, self.facts.step, self.facts.steps)
        self._progress = self._progress.seen(snapshot.progress, now)
        if self.first_weights_seconds is None and snapshot.policy.version is not None:
            self.first_weights_seconds = now - self._began
        if self.facts.step > self._step:
            self._step = self.facts.step
            for supervisor in supervisors.values():
                supervisor.committed()

    def _note_restarts(self, supervisors: Mapping[str, Supervisor]) -> None:
        for name, supervisor in supervisors.items():
            if supervisor.restarts > self._restarts.get(name, 0):
                self._restarts[name] = supervisor.restarts
                self._view.note(
                    f"{name} ended unexpectedly ({supervisor.last_end}); it is started again"
                )

    def _conditions(self, supervisors: Mapping[str, Supervisor]) -> None:
        for kind, roles in _CONDITION_ROLES.items():
            mine = [s for s in supervisors.values() if s.component.role in roles]
            down = [f"{s.name} is {s.state}" for s in mine if s.state not in _UP]
            crashed = any(s.state is State.BACKING_OFF for s in mine)
            reason = (
                conditions.REASON_READY
                if not down
                else conditions.REASON_CRASHED
                if crashed
                else conditions.REASON_STARTING
            )
            self._events.condition(kind, not down, reason, ", ".join(down))

    def _progress_deadline(self, now: float) -> None:
        seconds = self._job.spec.lifecycle.progress_deadline_seconds
        if not self._progress.stalled(now, seconds):
            self._events.condition(conditions.PROGRESSING, True, "Progress")
            self.facts.message = ""
            return
        reports = self.snapshot.reports if self.snapshot else {}
        told = {
            name: Told(report.waiting_for, report.age_seconds) for name, report in reports.items()
        }
        idle = now - self._progress.since_seconds
        self.facts.message = f"no progress for {idle:.0f} s: {blame(self.facts.components, told)}"
        if self._events.condition(
            conditions.PROGRESSING, False, conditions.REASON_PROGRESS_DEADLINE, self.facts.message
        ):
            self._view.note(self.facts.message)


def _phase(supervisors: Mapping[str, Supervisor]) -> str:
    preparing = any(
        s.state is not State.DONE for s in supervisors.values() if s.component.role == "prepare"
    )
    return conditions.PHASE_PREPARING if preparing else conditions.PHASE_RUNNING


def _validation_running(snapshot: LedgerSnapshot) -> str:
    facts = snapshot.reports["trainer"].facts if "trainer" in snapshot.reports else {}
    done, total = facts.get("validation_done"), facts.get("validation_total")
    return (
        f"{done:.0f}/{total:.0f}"
        if isinstance(done, (int, float)) and isinstance(total, (int, float)) and total
        else ""
    )
