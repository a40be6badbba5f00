"""The calls of the trainer. Each carries the incarnation; an older one than the ledger knows raises `FencedError`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import msgspec

from rljob.errors import ManifestError
from rljob.ids import GroupId, PolicyVersion
from rljob.ledger.calls import Calls
from rljob.ledger.types import LedgerConfig, Phase, TakenGroup, TakeReply

READ_BATCH = 32
"""Payloads per round trip: about 5 MB at 165 KB each, so that workers' calls are served in between."""
_Recorded = tuple[str, int, list[str]]
"""A group of a recorded batch: name, evictions, keys of its payloads in member order."""
FIXED = ("job", "group_size", "groups_per_step", "num_rows", "data_hash")


class TrainerCalls(Calls):
    """See `Ledger`."""

    async def initialise(self, config: LedgerConfig) -> None:
        """Store the rules. May be repeated; rules that are not fixed (steps, bounds, quotas) take their new values.

        Raises:
            ManifestError: a fixed rule differs from what the ledger holds.
        """
        values = msgspec.to_builtins(config)
        flat = chain.from_iterable((name, _text(value)) for name, value in values.items())
        fixed = ",".join(FIXED)
        if difference := await self._store.call("initialise", fixed, *flat):
            name, stored, given = difference
            problem = f"{given!r}, but this job's ledger was started with {stored!r}"
            raise ManifestError(_path(name), problem, "give the job another name or remove its run")

    async def open_trainer(self, boot_id: str, *, at_least: int = 0) -> int:
        """Take over as the trainer; answers the incarnation, which fences every earlier one.

        Args:
            boot_id: Asking again under the same one gives the same incarnation.
            at_least: The newest incarnation that the checkpoint knows; the answer is above it even after a lost store.
        """
        return int(await self._store.call("open_trainer", boot_id, at_least))

    async def resume(
        self,
        incarnation: int,
        step: int,
        *,
        archived_step: int | None = None,
        archived_groups: Sequence[GroupId] = (),
    ) -> None:
        """Re-assert that exactly `step` steps are trained; the checkpoint is the authority.

        Admission becomes step·B + ready + running, plus the groups of archived batches past `step`, which the trainer
        replays next. Nothing outstanding is dropped.

        Args:
            incarnation: From `open_trainer`.
            step: Of the checkpoint; 0 for a fresh start.
            archived_step: The last step whose batch stands in the artifact store, where the trainer knows it better
                than the ledger (a store that lost writes).
            archived_groups: Groups of all archived batches; those that the ledger believes outstanding are
                acknowledged, so that none is trained twice.
        """
        groups = [str(group) for group in archived_groups]
        await self._store.call(
            "resume", incarnation, step, -1 if archived_step is None else archived_step, *groups
        )

    async def take(self, incarnation: int, step: int, groups: int) -> TakeReply:
        """The batch of a step: complete groups, oldest policy first, after `onStale`.

        The batch is recorded: the same step gets the same groups until it is committed. `step` is one past the last
        archived one; a smaller one says that the archive since then is lost, and its places are filled anew.
        """
        while True:
            answer = await self._store.call("take", incarnation, step, groups)
            if isinstance(answer, dict):
                return _not_yet(answer)
            taken, lost = await self._fetch(answer)
            if not lost:
                return TakeReply(groups=taken)
            # Only a store that lost writes gets here. Each pass removes at least one group, so it ends.
            await self.reject(incarnation, step, lost, "payload_missing")

    async def reject(
        self,
        incarnation: int,
        step: int,
        groups: Sequence[GroupId],
        reason: str,
        evidence: str = "",
    ) -> None:
        """Dead-letter groups of the recorded batch (records that do not decode); `take` again fills their places."""
        await self._store.call(
            "reject", incarnation, step, reason, evidence[-8192:], *map(str, groups)
        )

    async def archived(self, incarnation: int, step: int) -> None:
        """The batch of `step` stands in the artifact store with its manifest: its entries leave the stream."""
        await self._store.call("archived", incarnation, step)

    async def commit(
        self, incarnation: int, step: int, version: PolicyVersion, digest: str
    ) -> None:
        """`step` is trained and the weights of `version` are published, both in one write.

        Step 0 publishes the initial weights; after a resume its step is committed again with the new incarnation.
        A batch of `step` that is still recorded is acknowledged as archived: its trainer died before it could say so.
        """
        await self._store.call("commit", incarnation, step, version.incarnation, version.n, digest)

    async def finish(self, incarnation: int | None, phase: Phase, message: str = "") -> None:
        """End the job: workers get no more leases. A later `open_trainer` of a job with steps to go opens it again.

        Args:
            incarnation: From `open_trainer`; None for the operator, which no trainer fences.
            phase: How it ended.
            message: For people.
        """
        await self._store.call("finish", incarnation or 0, phase, message[:2048])

    async def _fetch(self, batch: list[_Recorded]) -> tuple[list[TakenGroup], list[GroupId]]:
        """Read the payloads of a recorded batch; also the groups of which one is gone."""
        keys = [key for _, _, keys in batch for key in keys]
        payloads: list[bytes | None] = []
        for start in range(0, len(keys), READ_BATCH):
            payloads += await self._store.read_bodies(keys[start : start + READ_BATCH])
        taken: list[TakenGroup] = []
        lost: list[GroupId] = []
        rest = iter(payloads)
        for name, evictions, members in batch:
            group = GroupId.parse(name)
            whole = [payload for payload in islice(rest, len(members)) if payload is not None]
            if len(whole) < len(members):
                lost.append(group)
            else:
                taken.append(TakenGroup(group=group, payloads=whole, evictions=evictions))
        return taken, lost


def _not_yet(answer: dict[str, object]) -> TakeReply:
    return msgspec.convert({"groups": None, **answer}, TakeReply)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _path(name: str) -> str:
    return {
        "group_size": "spec.rollout.groupSize",
        "groups_per_step": "spec.trainer.groupsPerStep",
        "num_rows": "spec.data.train.source",
        "data_hash": "spec.data.train.source",
    }.get(name, "metadata.name")
