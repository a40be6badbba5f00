"""The calls of whoever watches: live view, watchdog, metrics, audit, clean-up."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from rljob.ledger.calls import Calls
from rljob.ledger.types import DeadLetter, LedgerFacts, LedgerSnapshot, Phase, Report, ReportView
from rljob.ledger.worker_calls import parse_policy

REPORT_BYTES = 16_384


class ObserverCalls(Calls):
    """See `Ledger`."""

    async def finished(self) -> Phase | None:
        """How the job ended; None while it has not."""
        return cast("Phase | None", await self._store.call("finished") or None)

    async def drain(self, on: bool = True) -> None:
        """Stop (or allow again) all leases, for a job that is being suspended; a new trainer allows them again."""
        await self._store.call("drain", int(on))

    async def report(self, component: str, report: Report) -> None:
        """Say what a component is doing and waiting for; the newest report per component is kept."""
        data = msgspec.json.encode(report)
        if len(data) > REPORT_BYTES:
            data = msgspec.json.encode(Report(waiting_for=report.waiting_for[:1024]))
        await self._store.call("report", component, data)

    async def snapshot(self) -> LedgerSnapshot:
        """The whole state at one moment, small enough to be asked for every second."""
        fields = dict(await self._store.call("snapshot"))
        fields["policy"] = msgspec.to_builtins(parse_policy(fields["policy"]))
        fields["reports"] = {name: _report(age, data) for name, age, data in fields["reports"]}
        for name in ("counts", "staleness"):
            fields[name] = dict(fields[name])
        fields["validation"] = {int(step): float(score) for step, score in fields["validation"]}
        for name in ("reward_mean", "reward_recent", "turns_recent"):
            fields[name] = float(fields[name]) if fields[name] != "" else None
        fields["phase"] = fields["phase"] or None
        return msgspec.convert(fields, LedgerSnapshot, strict=False)

    async def dead_letters(self, limit: int = 10_000) -> list[DeadLetter]:
        """Groups that were given up, oldest first, with their evidence."""
        return [
            _dead_letter(entry, fields)
            for entry, fields in await self._store.read_stream("dead", "", limit)
        ]

    async def facts(self) -> LedgerFacts:
        """What the audit compares with the workers' logs and the archive."""
        fields: dict[str, Any] = dict(await self._store.call("facts"))
        fields["counts"] = dict(fields["counts"])
        fields["evictions"] = {int(row): int(count) for row, count in fields["evictions"]}
        for name in ("dead_rows", "dropped_rows"):
            fields[name] = _set_bits(fields[name])
        fields["dead_letters"] = await self.dead_letters()
        return msgspec.convert({"job": self.job, **fields}, LedgerFacts, strict=False)

    async def destroy(self) -> None:
        """Remove every key of the job. May be repeated."""
        await self._store.delete_all()


def _report(age_milliseconds: int, data: str) -> ReportView:
    report = msgspec.json.decode(data, type=ReportView)
    report.age_seconds = age_milliseconds / 1000
    return report


def _dead_letter(entry: str, fields: dict[bytes, bytes]) -> DeadLetter:
    group, episode, reason, evidence = (
        fields.get(key, b"").decode(errors="replace") for key in (b"g", b"e", b"r", b"t")
    )
    seconds = int(entry.partition("-")[0]) / 1000
    return DeadLetter(
        id=entry, group=group, episode=episode, reason=reason, evidence=evidence, time=seconds
    )


def _set_bits(bitmap: str) -> list[int]:
    data = bytes.fromhex(bitmap)
    return [
        8 * i + bit
        for i, byte in enumerate(data)
        if byte
        for bit in range(8)
        if byte & (0x80 >> bit)
    ]
