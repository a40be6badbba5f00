"""A ledger on the session's real store, and short words for what workers and trainers do with it."""

from collections.abc import AsyncIterator, Sequence

import pytest

from rljob.ids import EpisodeId, GroupId, PolicyVersion
from rljob.ledger import CompletionInfo, Lease, LeaseReply, Ledger, LedgerConfig


class Bench:
    """A ledger with one worker `w` of boot `b` and one trainer."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.incarnation = 0
        self.size = 2
        self.per_step = 2

    def rules(self, **changes: object) -> LedgerConfig:
        """Two groups of two a step; retries at once."""
        values: dict[str, object] = {
            "job": self.ledger.job,
            "group_size": 2,
            "groups_per_step": 2,
            "steps": 10,
            "max_staleness": 1,
            "max_concurrent_episodes": 100,
            "retry_backoff_seconds": 0.0,
            "num_rows": 50,
            "data_hash": "abc",
        }
        return LedgerConfig(**{**values, **changes})  # type: ignore[arg-type]

    @staticmethod
    def attempts(leases: Sequence[Lease]) -> list[tuple[EpisodeId, int]]:
        return [(lease.episode, lease.attempt) for lease in leases]

    async def start(self, **changes: object) -> int:
        """Initialise, open the trainer, commit version 0."""
        config = self.rules(**changes)
        self.size, self.per_step = config.group_size, config.groups_per_step
        await self.ledger.initialise(config)
        self.incarnation = await self.ledger.open_trainer("trainer")
        await self.ledger.commit(
            self.incarnation, 0, PolicyVersion(self.incarnation, 0), "digest-0"
        )
        return self.incarnation

    async def reply(self, slots: int, n: int = 0, worker: str = "w", boot: str = "b") -> LeaseReply:
        return await self.ledger.lease(worker, boot, PolicyVersion(self.incarnation, n), slots)

    async def lease(
        self, slots: int, n: int = 0, worker: str = "w", boot: str = "b"
    ) -> list[Lease]:
        return (await self.reply(slots, n, worker, boot)).leases

    async def complete(
        self,
        lease: Lease,
        n: int = 0,
        *,
        reward: float = 0.5,
        payload: bytes = b"",
        worker: str = "w",
        boot: str = "b",
        newest: int | None = None,
    ) -> str:
        info = CompletionInfo(
            reward=reward,
            outcome="completed",
            min_version=n,
            max_version=n if newest is None else newest,
            turns=3,
        )
        data = payload or f"{lease.episode}/{lease.attempt}".encode()
        return await self.ledger.complete(worker, boot, lease.episode, lease.attempt, data, info)

    async def fill(self, groups: int, n: int = 0) -> list[GroupId]:
        """Lease and complete whole groups at version n."""
        leases = await self.lease(groups * self.size, n)
        assert len(leases) == groups * self.size
        for lease in leases:
            assert await self.complete(lease, n) == "accepted"
        return list(dict.fromkeys(lease.episode.group for lease in leases))

    async def take(self, step: int) -> list[GroupId]:
        reply = await self.ledger.take(self.incarnation, step, self.per_step)
        assert reply.groups is not None, reply
        return [group.group for group in reply.groups]

    async def train(self, step: int) -> list[GroupId]:
        """Take, archive and commit a step."""
        groups = await self.take(step)
        await self.ledger.archived(self.incarnation, step)
        await self.commit(step)
        return groups

    async def commit(self, step: int) -> None:
        await self.ledger.commit(
            self.incarnation, step, PolicyVersion(self.incarnation, step), f"digest-{step}"
        )

    async def payload_keys(self) -> int:
        """Payloads in the store, whether or not any record names them."""
        store = self.ledger._store
        return len(await store.keys("b:"))

    async def counts(self) -> dict[str, int]:
        return (await self.ledger.snapshot()).counts

    async def fail(
        self, lease: Lease, reason: str = "sandbox", worker: str = "w", boot: str = "b"
    ) -> str:
        return (
            await self.ledger.fail(worker, boot, lease.episode, lease.attempt, reason, "why")
        ).outcome


@pytest.fixture
async def ledger(valkey_url: str, job_name: str) -> AsyncIterator[Ledger]:
    async with await Ledger.connect(valkey_url, job_name, deadline_seconds=60) as ledger:
        yield ledger


@pytest.fixture
def bench(ledger: Ledger) -> Bench:
    return Bench(ledger)
