"""Validation: a class of work of its own, with its own quota, stream and end. It never counts for admission."""

from __future__ import annotations

from rljob.ids import PolicyVersion
from rljob.ledger.calls import Calls
from rljob.ledger.types import ValidationStatus

DRAIN_BATCH = 32


class ValidationCalls(Calls):
    """See `Ledger`."""

    async def open_validation(
        self,
        incarnation: int,
        step: int,
        version: PolicyVersion,
        rows: int,
        samples_per_prompt: int,
        settled: bool,
    ) -> None:
        """Start scoring `rows` × `samples_per_prompt` episodes, ahead of training.

        May be repeated: what is scored is kept, unless the run is settled and the version another one (after a resume).
        Ends the runs of earlier incarnations that were not opened again.

        Args:
            incarnation: From `open_trainer`.
            step: Steps trained so far; names the run.
            version: What is scored.
            rows: Rows of the validation data.
            samples_per_prompt: Episodes per row.
            settled: Lease only to engines on exactly `version`; otherwise to any engine, and the span is recorded.
        """
        await self._store.call(
            "open_validation",
            incarnation,
            step,
            version.incarnation,
            version.n,
            rows,
            samples_per_prompt,
            int(settled),
        )

    async def validation(self, step: int) -> ValidationStatus:
        """How far the run of `step` is; `open` is False where there is none."""
        answer = await self._store.call("validation", step)
        if answer is None:
            return ValidationStatus(step=step, open=False)
        total, done, dead, running, sum_reward, settled, oldest, newest = answer
        return ValidationStatus(
            step=step,
            open=True,
            total=total,
            done=done,
            dead=dead,
            running=running,
            sum_reward=float(sum_reward),
            settled=bool(settled),
            versions=(oldest, newest) if oldest >= 0 else None,
        )

    async def drain_validation(
        self, incarnation: int, step: int, *, after: str = ""
    ) -> list[tuple[str, bytes]]:
        """All scored episodes past the entry id `after`. They stay until `close_validation`: this may be repeated."""
        await self._store.call("check_trainer", incarnation)
        drained: list[tuple[str, bytes]] = []
        while entries := await self._store.read_stream(f"v:{step}:stream", after, DRAIN_BATCH):
            payloads = await self._store.read_bodies(
                [fields[b"k"].decode() for _, fields in entries]
            )
            drained += [
                (entry, payload)
                for (entry, _), payload in zip(entries, payloads, strict=True)
                if payload is not None  # the run was closed meanwhile
            ]
            after = entries[-1][0]
        return drained

    async def forget_validation(self, incarnation: int, step: int, upto: str) -> None:
        """Episodes up to the entry id `upto` stand in the artifact store: drop their payloads, keep their scores.

        For runs that are too large to stay in the store until they are closed.
        """
        while await self._store.call("forget_validation", incarnation, step, upto):
            pass

    async def close_validation(self, incarnation: int, step: int) -> None:
        """End the run: its score is kept for the snapshot, all else is removed; late completions get `already_done`."""
        await self._store.call("close_validation", incarnation, step)
