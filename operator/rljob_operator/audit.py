"""The audit of a run, from its folder: workers' logs, archived batches and the ledger must agree."""

from __future__ import annotations

from pathlib import Path

from rljob.errors import CorruptError, StoreError
from rljob_operator.drivers.observer import LedgerObserver
from rljob_operator.summary import AuditNumbers


async def audit_run(artifacts: Path, observer: LedgerObserver) -> AuditNumbers | None:
    """Audit with the living ledger; None where it cannot be reached or the artifacts cannot be read."""
    from rljob.ledger.audit import audit

    try:
        report = await audit(artifacts, await observer.ledger())
    except (StoreError, CorruptError, OSError):
        return None
    return AuditNumbers(
        lost=len(report.lost),
        trained_twice=len(report.trained_twice),
        rerun=report.rerun,
        ok=report.ok,
    )
