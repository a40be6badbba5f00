"""The calls of a rollout worker and of its engine agent."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal, cast

import msgspec

from rljob.ids import EpisodeId, PolicyVersion
from rljob.ledger.calls import Calls
from rljob.ledger.types import (
    CompletionInfo,
    FailReply,
    Lease,
    LeaseReply,
    OpenAttempt,
    Policy,
    Verdict,
)

EVIDENCE_BYTES = 8192
"""Of a failure's evidence, the last so many: the end of a traceback says most."""

Attempt = tuple[EpisodeId, int]


class WorkerCalls(Calls):
    """See `Ledger`."""

    async def open_worker(self, worker: str, boot_id: str) -> list[OpenAttempt]:
        """Say who runs under this name now.

        The leases of the name's other boot ids are forfeited at once. Answers the open attempts of this boot: what a
        worker that lost its connection reconciles with.
        """
        rows = await self._store.call("open_worker", worker, boot_id)
        return [
            OpenAttempt(
                episode=EpisodeId.parse(episode),
                attempt=attempt,
                deadline_seconds=milliseconds / 1000,
            )
            for episode, attempt, milliseconds in rows
        ]

    async def lease(
        self,
        worker: str,
        boot_id: str,
        engine: PolicyVersion | None,
        free_slots: int,
        *,
        request_id: str | None = None,
    ) -> LeaseReply:
        """Ask for up to `free_slots` episodes.

        In this order: validation, retries that are due, missing members of started groups, new groups.

        Args:
            worker: Name of the worker.
            boot_id: Its boot id.
            engine: The version that its engine names; None while it names none.
            free_slots: Episodes it could start now.
            request_id: Names the request, so that a repetition gets the same answer; without it a random one.

        Raises:
            FencedError: another boot runs under this name.
        """
        incarnation, n = engine if engine is not None else (-1, -1)
        request = request_id or secrets.token_hex(8)
        async with self._lease_lock:  # the ledger keeps the answer to one request per worker
            leases, reason, milliseconds = await self._store.call(
                "lease", worker, boot_id, request, incarnation, n, max(0, free_slots)
            )
        return LeaseReply(
            leases=[_lease(row) for row in leases],
            reason=reason or None,
            retry_after_seconds=milliseconds / 1000,
        )

    async def heartbeat(
        self, worker: str, boot_id: str, attempts: Sequence[Attempt]
    ) -> dict[Attempt, Verdict]:
        """Extend these leases; the worker drops whatever is not answered `ok`.

        Raises:
            FencedError: another boot runs under this name.
        """
        flat = [part for episode, attempt in attempts for part in (str(episode), attempt)]
        verdicts = await self._store.call("heartbeat", worker, boot_id, *flat)
        return dict(
            zip([(episode, attempt) for episode, attempt in attempts], verdicts, strict=True)
        )

    async def complete(
        self,
        worker: str,
        boot_id: str,
        episode: EpisodeId,
        attempt: int,
        payload: bytes,
        info: CompletionInfo,
    ) -> Literal["accepted", "already_done"]:
        """Hand over a finished episode; keep the payload until this answers. The first completion wins.

        `already_done` also when the group was evicted, died or was trained. Repeating an accepted call gives `accepted`
        while the group is outstanding.
        """
        answer = await self._store.call_with_payload(
            "complete",
            payload,
            worker,
            boot_id,
            str(episode),
            attempt,
            info.reward,
            info.min_version,
            info.max_version,
            info.turns,
            msgspec.json.encode(info),
        )
        return cast('Literal["accepted", "already_done"]', answer)

    async def fail(
        self,
        worker: str,
        boot_id: str,
        episode: EpisodeId,
        attempt: int,
        reason: str,
        evidence: str = "",
    ) -> FailReply:
        """Report an infrastructure failure of an attempt: retried with back-off, or the group is dead-lettered."""
        tail = evidence.encode()[-EVIDENCE_BYTES:].decode(errors="ignore")
        outcome, milliseconds = await self._store.call(
            "fail", worker, boot_id, str(episode), attempt, reason[:256], tail
        )
        return FailReply(outcome=outcome, retry_after_seconds=milliseconds / 1000)

    async def release(self, worker: str, boot_id: str, attempts: Sequence[Attempt]) -> None:
        """Hand attempts back unfinished, without counting them as failures (drain)."""
        flat = [part for episode, attempt in attempts for part in (str(episode), attempt)]
        await self._store.call("release", worker, boot_id, *flat)

    async def hold_version(self, worker: str, boot_id: str, version: PolicyVersion | None) -> None:
        """Say which version this worker's engine holds, so that its weights are kept.

        Raises:
            FencedError: another boot runs under this name.
        """
        await self._store.call(
            "hold_version", worker, boot_id, "" if version is None else str(version)
        )

    async def held_versions(self) -> set[PolicyVersion]:
        """Versions that an engine holds, a lease or a validation run names, or that are the newest."""
        return {PolicyVersion.parse(text) for text in await self._store.call("held_versions")}

    async def policy(self) -> Policy:
        """The newest committed version."""
        return parse_policy(await self._store.call("policy"))


def parse_policy(row: list[str | int]) -> Policy:
    """Read `[version or "", digest, step]`."""
    version, digest, step = row
    return Policy(
        version=PolicyVersion.parse(str(version)) if version else None,
        digest=str(digest),
        step=int(step),
    )


def _lease(row: list[str | int]) -> Lease:
    episode = EpisodeId.parse(str(row[0]))
    return Lease(
        episode=episode,
        attempt=int(row[1]),
        row_index=episode.group.row_index,
        deadline_seconds=int(row[2]) / 1000,
        validation=episode.group.is_validation,
    )
