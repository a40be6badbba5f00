"""The worker's side of the ledger in memory: hands out a fixed number of groups, counts what comes back.

It knows leases, retries, first completion wins, and outages on request. Admission, staleness and
fencing belong to the real one (a real Valkey is a fixture of the tests).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

from rljob.errors import StoreError
from rljob.ids import EpisodeId, GroupId, PolicyVersion
from rljob.ledger.types import CompletionInfo, FailReply, Lease, LeaseReply, Report, Verdict

Key = tuple[EpisodeId, int]


class FakeLedger:
    """The ledger of one worker.

    Args:
        groups: Groups to hand out.
        group_size: Episodes of each.
        max_attempts: Failures before an episode is dead.
        validation: Whether the groups are those of a validation run.
    """

    def __init__(
        self, groups: int, group_size: int = 1, max_attempts: int = 3, *, validation: bool = False
    ) -> None:
        self._todo = deque(
            (EpisodeId(GroupId("v", 0, index) if validation else GroupId("t", index, 0), member), 1)
            for index in range(groups)
            for member in range(group_size)
        )
        self._max_attempts = max_attempts
        self.total = groups * group_size
        self.leased: dict[Key, bool] = {}
        """Open leases."""
        self.completed: dict[EpisodeId, tuple[bytes, CompletionInfo]] = {}
        self.failures: list[tuple[EpisodeId, int, str]] = []
        self.evidence: dict[Key, str] = {}
        self.dead: set[EpisodeId] = set()
        self.released: list[Key] = []
        self.reports: list[Report] = []
        self.verdicts: dict[Key, Verdict] = {}
        """What the next heartbeat says of a lease; `ok` otherwise."""
        self.versions: list[PolicyVersion | None] = []
        self.most_leased = 0
        self.calls: Counter[str] = Counter()
        self.is_away = False
        """Every call raises StoreError."""

    @property
    def is_over(self) -> bool:
        """Whether every episode has ended."""
        return len(self.completed) + len(self.dead) == self.total

    async def lease(
        self, worker: str, boot_id: str, engine: PolicyVersion | None, free_slots: int
    ) -> LeaseReply:
        """See `rljob.ledger.Ledger.lease`."""
        self._called("lease")
        self.versions.append(engine)
        if self.is_over:
            return LeaseReply(leases=[], reason="finished")
        leases: list[Lease] = []
        while self._todo and len(leases) < free_slots:
            episode, attempt = self._todo.popleft()
            self.leased[episode, attempt] = True
            group = episode.group
            leases.append(
                Lease(
                    episode=episode,
                    attempt=attempt,
                    row_index=group.row_index,
                    deadline_seconds=30.0,
                    validation=group.is_validation,
                )
            )
        self.most_leased = max(self.most_leased, len(self.leased))
        reason = None if len(leases) == free_slots else "staleness_bound"
        return LeaseReply(leases=leases, reason=reason, retry_after_seconds=0.5)

    async def heartbeat(
        self, worker: str, boot_id: str, attempts: Sequence[Key]
    ) -> dict[Key, Verdict]:
        """See `rljob.ledger.Ledger.heartbeat`."""
        self._called("heartbeat")
        return {key: self.verdicts.get(key, "ok") for key in attempts}

    async def complete(
        self,
        worker: str,
        boot_id: str,
        episode: EpisodeId,
        attempt: int,
        payload: bytes,
        info: CompletionInfo,
    ) -> Literal["accepted", "already_done"]:
        """See `rljob.ledger.Ledger.complete`."""
        self._called("complete")
        self.leased.pop((episode, attempt), None)
        if episode in self.completed or episode in self.dead:
            return "already_done"
        self.completed[episode] = (payload, info)
        return "accepted"

    async def fail(
        self,
        worker: str,
        boot_id: str,
        episode: EpisodeId,
        attempt: int,
        reason: str,
        evidence: str = "",
    ) -> FailReply:
        """See `rljob.ledger.Ledger.fail`."""
        self._called("fail")
        self.leased.pop((episode, attempt), None)
        self.failures.append((episode, attempt, reason))
        self.evidence[episode, attempt] = evidence
        if episode in self.completed:
            return FailReply(outcome="already_done")
        if attempt >= self._max_attempts:
            self.dead.add(episode)
            return FailReply(outcome="dead")
        self._todo.append((episode, attempt + 1))
        return FailReply(outcome="retry")

    async def release(self, worker: str, boot_id: str, attempts: Sequence[Key]) -> None:
        """See `rljob.ledger.Ledger.release`."""
        self._called("release")
        for key in attempts:
            if self.leased.pop(key, None):
                self.released.append(key)
                self._todo.appendleft((key[0], key[1] + 1))

    async def report(self, component: str, report: Report) -> None:
        """See `rljob.ledger.Ledger.report`."""
        self._called("report")
        self.reports.append(report)

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if self.is_away:
            raise StoreError(f"{name}: no answer from the store")
