"""The small model that random histories are compared with: which groups live, what is leased, done, taken, archived."""

import asyncio
import itertools
from dataclasses import dataclass, field

from rljob.ids import EpisodeId, GroupId, PolicyVersion
from rljob.ledger import CompletionInfo, Lease, Ledger, LedgerConfig

WORKERS = ("w0", "w1")
_jobs = itertools.count()


@dataclass
class Group:
    """A live training group as the model knows it."""

    start: int
    order: int
    leased: dict[int, int] = field(default_factory=dict)
    """Member → n of its lease."""
    newest: dict[int, int] = field(default_factory=dict)
    """Member → its newest attempt; an older one may go on, but holds no lease."""
    done: dict[int, tuple[int, int, float, bytes]] = field(default_factory=dict)
    """Member → (oldest n, newest n, reward, payload)."""

    def oldest(self) -> int | None:
        ns = [n for n in (*self.leased.values(), *(lo for lo, *_ in self.done.values())) if n >= 0]
        return min(ns) if ns else None


@dataclass
class Held:
    """A lease that some process still works on, whether or not the ledger believes it."""

    lease: Lease
    worker: str
    boot: str
    version: PolicyVersion


class Model:
    """One job: what the ledger should hold. `url` is set by the test."""

    url = ""

    config: LedgerConfig

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.ledger = self.run(Ledger.connect(self.url, f"property-{next(_jobs)}"))
        self.live: dict[GroupId, Group] = {}
        self.archive: dict[int, list[GroupId]] = {}
        self.held: list[Held] = []
        self.taken: list[GroupId] = []
        self.recorded = False
        self.accepted: set[EpisodeId] = set()
        self.trained = self.archived = self.checkpoint = self.overhang = 0
        self.boots = dict.fromkeys(WORKERS, 0)
        self.counter = itertools.count(1)
        self.drained: dict[int, set[bytes]] = {}

    def run(self, call):
        return self.runner.run(call)

    def teardown(self) -> None:
        try:
            if hasattr(self, "config"):
                self.run(self.reach_the_end())
        finally:
            self.run(self.ledger.destroy())
            self.run(self.ledger.aclose())
            self.runner.close()

    # ── what the rules say ──

    @property
    def size(self) -> int:
        return self.config.group_size

    @property
    def per_step(self) -> int:
        return self.config.groups_per_step

    def admitted(self) -> int:
        return self.archived * self.per_step + len(self.live)

    def bound(self, n: int) -> int:
        eta = self.config.max_staleness
        return min(
            (eta + min(n, self.trained) + 1) * self.per_step, self.config.steps * self.per_step
        )

    def next_version(self) -> int:
        return self.archived + self.recorded

    def past(self, group: Group, version: int) -> bool:
        bound, oldest = version - self.config.max_staleness, group.oldest()
        if oldest is None:
            return False
        if self.config.on_stale == "mask":
            newest = max((hi for _, hi, *_ in group.done.values()), default=-1)
            return len(group.done) == self.size and 0 <= newest < bound
        return oldest < bound

    def ready(self) -> list[GroupId]:
        whole = [
            name
            for name, group in self.live.items()
            if len(group.done) == self.size and name not in self.taken
        ]
        return sorted(whole, key=lambda name: (self._age(self.live[name]), self.live[name].order))

    @staticmethod
    def _age(group: Group) -> int:
        oldest = group.oldest()
        return group.start if oldest is None else oldest

    # ── what the ledger did ──

    def settle(
        self, *, gone: set[GroupId] = frozenset(), version: int | None = None, late: bool = False
    ) -> None:
        """Compare the live groups with the model; whatever vanished beside `gone` must have been past its bound."""
        facts = self.run(self.ledger.facts())
        now = {GroupId.parse(name) for name in facts.live_groups}
        assert now <= self.live.keys(), "a group came from nowhere"
        for name in self.live.keys() - now:
            assert name not in self.taken
            group = self.live.pop(name)
            if name in gone:
                continue
            assert late or self.past(group, self.next_version() if version is None else version), (
                f"{name} vanished"
            )
            limit = self.config.max_evictions
            assert facts.evictions.get(name.major) == name.minor + 1 or (
                name.minor >= limit and name.major in facts.dead_rows
            )
        assert gone.isdisjoint(now)

    def admit(self, held: list[Held], n: int, refused: str | None) -> None:
        """New leases: of live groups without a lease, or of new groups that admission allows."""
        for item in held:
            episode = item.lease.episode
            if episode.group.is_validation:
                continue
            if episode.group not in self.live:
                assert self.admitted() < self.bound(n)
                assert self.open() + self.size <= self.config.max_concurrent_episodes
                self.live[episode.group] = Group(n, next(self.counter))
            group = self.live[episode.group]
            assert episode.member not in group.leased
            assert episode.member not in group.done
            assert n >= min(group.start, self.archived)
            group.leased[episode.member] = n
            assert item.lease.attempt == group.newest.get(episode.member, 0) + 1
            group.newest[episode.member] = item.lease.attempt
        self.held += held
        if refused in ("staleness_bound", "all_steps_admitted"):
            assert self.admitted() >= self.bound(n)

    def open(self) -> int:
        return sum(self.size - len(group.done) for group in self.live.values())

    def check_the_books(self) -> None:
        if not hasattr(self, "config"):
            return
        snapshot = self.run(self.ledger.snapshot())
        counts = snapshot.counts
        assert counts["admitted"] == self.admitted()
        assert counts["open"] == self.open() <= self.config.max_concurrent_episodes
        assert counts["running"] == sum(len(group.leased) for group in self.live.values())
        assert counts["missing"] + counts["retry_waiting"] == counts["open"] - counts["running"]
        assert counts["ready_groups"] == len(self.ready())
        assert snapshot.stream_entries == sum(len(group.done) for group in self.live.values())
        assert snapshot.stream_pending == len(self.taken) * self.size
        assert self.admitted() <= max(self.config.steps * self.per_step, self.overhang)

    # ── nothing can wedge ──

    async def reach_the_end(self) -> None:
        """Workers lease and complete, the trainer takes and commits: the job must reach its last step."""
        ledger = self.ledger
        self.held = []
        await self.end_leases()
        for _ in range(400):
            if self.trained == self.config.steps:
                break
            reply = await ledger.lease("w0", self.boot("w0"), self.policy, 6)
            for lease in reply.leases:
                info = CompletionInfo(
                    reward=float(lease.episode.member),
                    outcome="completed",
                    min_version=self.policy.n,
                    max_version=self.policy.n,
                )
                await ledger.complete(
                    "w0", self.boot("w0"), lease.episode, lease.attempt, b"end", info
                )
            await self.train_one()
        assert self.trained == self.config.steps, f"wedged at step {self.trained}: {reply.reason}"
        rows = [
            name.row_index for step in range(1, self.trained + 1) for name in self.archive[step]
        ]
        assert len(rows) == len(set(rows)) == self.config.steps * self.per_step

    async def train_one(self) -> None:
        if self.trained == self.archived:
            reply = await self.ledger.take(self.incarnation, self.trained + 1, self.per_step)
            if reply.groups is None:
                return
            self.archived += 1
            self.archive[self.archived] = [group.group for group in reply.groups]
            await self.ledger.archived(self.incarnation, self.archived)
        self.trained += 1
        self.policy = PolicyVersion(self.incarnation, self.trained)
        await self.ledger.commit(self.incarnation, self.trained, self.policy, "e")

    def boot(self, worker: str) -> str:
        return f"{worker}-{self.boots[worker]}"

    async def end_leases(self) -> None:
        store = self.ledger._store
        for queue in ("leases", "vleases"):
            for episode in await store.command("ZRANGE", store.prefix + queue, 0, -1):
                await store.command("ZADD", store.prefix + queue, 0, episode)
        await store.command("HSET", store.prefix + "state", "swept", 0)
        await self.ledger.heartbeat("w0", self.boot("w0"), [])

    async def hand_over(
        self, item: Held, payload: bytes, reward: float, lo: int, hi: int, twice: bool = False
    ) -> None:
        self.held.remove(item)
        episode = item.lease.episode
        info = CompletionInfo(reward=reward, outcome="completed", min_version=lo, max_version=hi)
        arguments = (item.worker, item.boot, episode, item.lease.attempt, payload, info)
        answer = await self.ledger.complete(*arguments)
        if twice and episode.group.is_validation:
            assert await self.ledger.complete(*arguments) == answer
        if episode.group.is_validation:
            if answer == "accepted":
                self.drained[episode.group.major].add(payload)
            return
        group = self.live.get(episode.group)
        expected = group is not None and episode.member not in group.done
        assert answer == ("accepted" if expected else "already_done")
        if not expected:
            return
        assert episode not in self.accepted, "accepted twice"
        self.accepted.add(episode)
        group.leased.pop(episode.member, None)
        group.done[episode.member] = (lo, hi, reward, payload)
        rewards = {reward for _, _, reward, _ in group.done.values()}
        if (
            self.config.zero_variance == "drop"
            and len(group.done) == self.size > 1
            and len(rewards) == 1
        ):
            del self.live[episode.group]
        elif twice:
            assert await self.ledger.complete(*arguments) == "accepted"
