"""Groups in: ask the ledger for a step's batch until it is there, then archive it before it is acknowledged.

    ledger.take ─(not yet: reason, pause)─► again
                ├─(a record does not decode)─► ledger.reject: dead-lettered, another takes its place ─► again
                └─ groups ─► batches/step-N/ stands ─► ledger.archived: the stream may forget them

Waits for the rollouts without a deadline of its own: the job's `progressDeadlineSeconds` watches the whole, and
`waiting_for` names what is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from rljob import telemetry
from rljob.clock import Clock
from rljob.errors import StateError
from rljob_trainer.batch import Group, decode, write_archive
from rljob_trainer.drought import Drought
from rljob_trainer.progress import Progress

if TYPE_CHECKING:
    from rljob.ledger import Ledger, TakeReply

_LONGEST_PAUSE_SECONDS = 1.0
log = structlog.get_logger()


class Intake:
    """Takes the batches of one incarnation."""

    def __init__(
        self,
        ledger: Ledger,
        incarnation: int,
        artifacts: Path,
        groups_per_step: int,
        progress: Progress,
        clock: Clock,
    ) -> None:
        self._ledger, self._incarnation, self._artifacts = ledger, incarnation, artifacts
        self._groups_per_step, self._progress, self._clock = groups_per_step, progress, clock

    async def next_batch(self, step: int) -> list[Group]:
        """The batch of `step`, archived and acknowledged.

        Raises:
            StateError: the ledger gives no batch of that step any more.
        """
        if (groups := await self.next_batch_if_any(step)) is None:
            raise StateError(f"no batch is left for step {step}")
        return groups

    async def next_batch_if_any(self, step: int) -> list[Group] | None:
        """The same; None where everything is collected (mode `rollout`)."""
        began = self._clock.monotonic()
        groups = await self._take(step)
        self._progress.spend("waiting", self._clock.monotonic() - began)
        self._progress.waiting_for = ""
        if groups is None:
            return None
        write_archive(self._artifacts, step, self._incarnation, groups)
        await self._ledger.archived(self._incarnation, step)
        telemetry.GROUPS.inc(len(groups), fate="trained")
        return groups

    async def _take(self, step: int) -> list[Group] | None:
        drought = Drought(self._ledger, self._groups_per_step, self._clock)
        while True:
            began = self._clock.monotonic()
            reply = await self._ledger.take(self._incarnation, step, self._groups_per_step)
            if reply.reason == "all_collected":
                return None
            if reply.groups is None:
                why = waiting_for(reply, self._groups_per_step)
                self._progress.waiting_for = why + await drought.look()
                await self._clock.sleep(
                    min(_LONGEST_PAUSE_SECONDS, max(0.01, reply.retry_after_seconds))
                )
                waited = self._clock.monotonic() - began
                telemetry.TRAINER_WAITING_SECONDS.inc(waited, reason=reply.reason or "groups")
                continue
            groups, corrupt = decode(reply.groups)
            if not corrupt:
                return groups
            for group, reason in corrupt.items():
                log.warning("group does not decode", group=str(group), error=reason)
                await self._ledger.reject(self._incarnation, step, [group], "undecodable", reason)


def waiting_for(reply: TakeReply, groups_per_step: int) -> str:
    """Why there is no batch yet, for people."""
    ready, running = int(reply.facts.get("ready", 0)), int(reply.facts.get("running_groups", 0))
    if reply.reason == "stale_groups":
        return f"groups: {running} running ones that must be in this batch"
    need = int(reply.facts.get("need", groups_per_step))  # of the last batch to collect, fewer
    return f"groups: {ready} of {need} ready"
