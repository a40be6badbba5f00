"""What the trainer is doing, for people: a background task tells the ledger every second.

A report is a courtesy: when the store cannot be reached it is skipped, because the loop's own calls will say so.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from rljob import telemetry
from rljob.clock import Clock
from rljob.errors import StoreError
from rljob.ledger.types import Report

if TYPE_CHECKING:
    from rljob.ledger import Ledger

REPORT_SECONDS = 1.0
REPORTS_PER_LOOK = 5
log = structlog.get_logger()


@dataclass
class Progress:
    """The present state, written by whoever knows it, read by `report_loop`."""

    waiting_for: str = "starting"
    component: str = "trainer"
    """Who reports: `trainer` or `collector`."""
    facts: dict[str, float | str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent since the start: waiting, training, publishing, checkpoint."""

    def tell(self, record: dict[str, Any]) -> None:
        """Take over the numbers of a step."""
        told = ("step", "reward_mean", "loss", "grad_norm", "staleness_mean", "staleness_max")
        self.facts.update({name: float(record[name]) for name in told if name in record})
        self.facts["tokens_trained"] = (
            float(self.facts.get("tokens_trained", 0.0)) + record["trained_tokens"]
        )

    def spend(self, what: str, seconds: float) -> None:
        """Add to a sum of seconds."""
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds
        self.facts[f"seconds_{what}"] = round(self.seconds[what], 3)


async def report_loop(ledger: Ledger, progress: Progress, clock: Clock) -> None:
    """Report until cancelled."""
    for number in itertools.count():
        await report(ledger, progress)
        if number % REPORTS_PER_LOOK == 0:
            await look(ledger)
        await clock.sleep(REPORT_SECONDS)


async def look(ledger: Ledger) -> None:
    """Show on /metrics how full stream and store are."""
    with suppress(StoreError):
        telemetry.show_ledger(await ledger.snapshot())


async def report(ledger: Ledger, progress: Progress) -> None:
    """Report once."""
    told = Report(waiting_for=progress.waiting_for, facts=dict(progress.facts))
    try:
        await ledger.report(progress.component, told)
    except StoreError as error:
        log.warning("report skipped", error=str(error))
