"""Random histories against a small model: whatever workers, trainer and crashes do, the promises of the ledger hold.

After every call the groups that came and went are compared with what the rules allow; at the end of every history the job must
still reach its last step, with every row trained once.
"""

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from rljob.errors import FencedError
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


class LedgerMachine(RuleBasedStateMachine):
    """One job; `url` is set by the test."""

    url = ""

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
        self.held += held
        if refused in ("staleness_bound", "all_steps_admitted"):
            assert self.admitted() >= self.bound(n)

    def open(self) -> int:
        return sum(self.size - len(group.done) for group in self.live.values())

    @invariant()
    def the_books_agree(self) -> None:
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

    # ── what happens ──

    @initialize(
        size=st.integers(1, 3),
        per_step=st.integers(1, 2),
        eta=st.integers(0, 2),
        room=st.integers(1, 4),
        on_stale=st.sampled_from(["evict", "wait", "mask"]),
        evictions=st.integers(0, 2),
        attempts=st.integers(1, 3),
        drop=st.booleans(),
    )
    def begin(self, size, per_step, eta, room, on_stale, evictions, attempts, drop) -> None:
        self.config = LedgerConfig(
            job=self.ledger.job,
            group_size=size,
            groups_per_step=per_step,
            steps=8,
            max_staleness=eta,
            max_concurrent_episodes=size * room,
            max_attempts=attempts,
            max_evictions=evictions,
            retry_backoff_seconds=0.0,
            wait_seconds=0.0,
            lease_seconds=1e6,
            heartbeat_seconds=1e6,
            on_stale=on_stale,
            zero_variance="drop" if drop else "keep",
            num_rows=7,
            data_hash="x",
        )
        self.run(self.ledger.initialise(self.config))
        self.incarnation = self.run(self.ledger.open_trainer("t0"))
        self.policy = PolicyVersion(self.incarnation, 0)
        self.run(self.ledger.commit(self.incarnation, 0, self.policy, "0"))
        self.engines = dict.fromkeys(WORKERS, self.policy)

    def boot(self, worker: str) -> str:
        return f"{worker}-{self.boots[worker]}"

    @rule(worker=st.sampled_from(WORKERS), slots=st.integers(0, 7), twice=st.booleans())
    def lease(self, worker, slots, twice) -> None:
        engine = self.engines[worker]
        request = f"{worker}-{next(self.counter)}"
        for _ in range(1 + twice):
            reply = self.run(
                self.ledger.lease(worker, self.boot(worker), engine, slots, request_id=request)
            )
        assert len(reply.leases) <= slots
        assert (reply.reason is None) == (len(reply.leases) == slots)
        named = {lease.episode.group for lease in reply.leases}
        new = named - self.live.keys()
        facts = self.run(self.ledger.facts())
        # Groups that a lease call evicted are settled before its new ones are known.
        for name in self.live.keys() - {GroupId.parse(text) for text in facts.live_groups}:
            assert self.past(self.live.pop(name), self.next_version())
        self.admit(
            [Held(lease, worker, self.boot(worker), engine) for lease in reply.leases],
            engine.n,
            reply.reason,
        )
        assert all(
            name.is_validation or name.minor == facts.evictions.get(name.major, 0) for name in new
        )
        self.settle()

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        reward=st.sampled_from([0.0, 1.0]),
        empty=st.integers(0, 9),
        twice=st.booleans(),
    )
    def complete(self, data, reward, empty, twice) -> None:
        item = data.draw(st.sampled_from(self.held))
        episode = item.lease.episode
        newest = max(item.version.n, self.engines[item.worker].n)
        lo = -1 if not empty else data.draw(st.integers(item.version.n, newest))
        hi = -1 if not empty else data.draw(st.integers(lo, newest))
        payload = f"{episode}/{item.lease.attempt}".encode()
        self.run(self.hand_over(item, payload, reward, lo, hi, twice))

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

    def work(self, slots, reward, left) -> None:
        """The usual: a worker on the newest weights leases and completes most of what there is."""
        self.engines["w0"] = self.policy
        self.lease("w0", slots, twice=False)
        for item in [item for item in self.held if item.worker == "w0"][left:]:
            n = max(item.version.n, self.policy.n)
            payload = f"{item.lease.episode}/{item.lease.attempt}".encode()
            self.run(
                self.hand_over(item, payload, reward if item.lease.episode.member else 0.5, n, n)
            )

    # Twice, so that half of a history is ordinary work and steps go by.
    usual = {
        "slots": st.integers(1, 8),
        "reward": st.sampled_from([0.0, 1.0]),
        "left": st.integers(0, 2),
    }
    first_work, second_work = rule(**usual)(work), rule(**usual)(work)

    @rule(
        slots=st.integers(1, 8), left=st.integers(0, 2), publish=st.booleans(), save=st.booleans()
    )
    def work_and_train(self, slots, left, publish, save) -> None:
        """An ordinary step."""
        self.work(slots, 1.0, left)
        if self.archived < self.config.steps:
            self.take(twice=False)
        if self.whole_batch():
            self.archive_batch(twice=False)
        if self.trained < self.archived:
            self.commit(publish, save)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fail(self, data) -> None:
        item = data.draw(st.sampled_from(self.held))
        self.held.remove(item)
        episode, attempt = item.lease.episode, item.lease.attempt
        reply = self.run(self.ledger.fail(item.worker, item.boot, episode, attempt, "r"))
        group = self.live.get(episode.group)
        if reply.outcome == "already_done" or episode.group.is_validation:
            return
        assert group is not None
        assert episode.member not in group.done
        group.leased.pop(episode.member, None)
        if reply.outcome == "dead":
            del self.live[episode.group]
        self.settle()

    @rule(worker=st.sampled_from(WORKERS))
    def heartbeat(self, worker) -> None:
        mine = [
            item for item in self.held if (item.worker, item.boot) == (worker, self.boot(worker))
        ]
        attempts = [(item.lease.episode, item.lease.attempt) for item in mine]
        verdicts = self.run(self.ledger.heartbeat(worker, self.boot(worker), attempts))
        self.settle()
        for item, verdict in zip(mine, verdicts.values(), strict=True):
            episode = item.lease.episode
            group = self.live.get(episode.group)
            if verdict != "ok":
                self.held.remove(item)
                assert (
                    episode.group.is_validation
                    or group is None
                    or episode.member in group.done
                    or (episode.member not in group.leased)
                )
            elif not episode.group.is_validation:
                assert group is not None
                group.leased.setdefault(episode.member, item.version.n)

    def release(self, worker) -> None:
        mine = [
            item for item in self.held if (item.worker, item.boot) == (worker, self.boot(worker))
        ]
        attempts = [(item.lease.episode, item.lease.attempt) for item in mine]
        before = {(item.lease.episode, item.lease.attempt) for item in mine}
        live = {
            (o.episode, o.attempt)
            for o in self.run(self.ledger.open_worker(worker, self.boot(worker)))
        }
        self.run(self.ledger.release(worker, self.boot(worker), attempts))
        for episode, _ in before & live:
            if not episode.group.is_validation:
                del self.live[episode.group].leased[episode.member]
        self.held = [item for item in self.held if item not in mine]

    def die_and_come_back(self, worker) -> None:
        """What it worked on may still be delivered by the process that is dying (`held` keeps it)."""
        owned = {
            (o.episode, o.attempt)
            for o in self.run(self.ledger.open_worker(worker, self.boot(worker)))
        }
        self.boots[worker] += 1
        assert self.run(self.ledger.open_worker(worker, self.boot(worker))) == []
        self.lost({episode for episode, _ in owned})

    def every_lease_ends(self, worker) -> None:
        self.run(self.end_leases())
        self.lost(
            {
                EpisodeId(name, member)
                for name, group in self.live.items()
                for member in group.leased
            }
        )

    async def end_leases(self) -> None:
        store = self.ledger._store
        for queue in ("leases", "vleases"):
            for episode in await store.command("ZRANGE", store.prefix + queue, 0, -1):
                await store.command("ZADD", store.prefix + queue, 0, episode)
        await store.command("HSET", store.prefix + "state", "swept", 0)
        await self.ledger.heartbeat("w0", self.boot("w0"), [])

    def lost(self, episodes: set[EpisodeId]) -> None:
        """Leases ended without a word: missing again, or the group died of it."""
        facts = self.run(self.ledger.facts())
        for episode in episodes:
            group = self.live.get(episode.group)
            if group is None:
                continue
            group.leased.pop(episode.member, None)
            if str(episode.group) not in facts.live_groups:
                assert episode.group.major in facts.dead_rows
                del self.live[episode.group]

    def engine_switches(self, worker) -> None:
        self.engines[worker] = self.policy

    def scripts_are_forgotten(self, worker) -> None:
        self.run(self.ledger._store.command("SCRIPT", "FLUSH"))

    disturbances = (
        "release",
        "die_and_come_back",
        "every_lease_ends",
        "engine_switches",
        "scripts_are_forgotten",
    )

    @rule(worker=st.sampled_from(WORKERS), what=st.sampled_from(disturbances))
    def disturb(self, worker, what) -> None:
        getattr(self, what)(worker)

    # ── trainer ──

    @precondition(lambda self: hasattr(self, "config") and self.archived < self.config.steps)
    @rule(twice=st.booleans())
    def take(self, twice) -> None:
        step = self.archived + 1
        reply = self.run(self.ledger.take(self.incarnation, step, self.per_step))
        if twice and reply.groups is not None:
            assert self.run(self.ledger.take(self.incarnation, step, self.per_step)) == reply
        if len(self.taken) == self.per_step:
            assert [group.group for group in reply.groups] == self.taken
            return
        self.settle(version=step - 1, late=self.config.on_stale == "wait")
        expected = self.taken + self.ready()[: self.per_step - len(self.taken)]
        if reply.groups is None:
            assert len(expected) < self.per_step
            return
        self.taken, self.recorded = expected, True
        assert [group.group for group in reply.groups] == self.taken
        for name, group in zip(self.taken, reply.groups, strict=True):
            done = self.live[name].done
            assert group.payloads == [done[member][3] for member in range(self.size)]
            assert group.evictions == name.minor
            assert not self.past(self.live[name], step - 1)

    def whole_batch(self) -> bool:
        return hasattr(self, "config") and len(self.taken) == self.per_step

    @precondition(whole_batch)
    @rule(twice=st.booleans())
    def archive_batch(self, twice) -> None:
        step = self.archived + 1
        self.archive[step] = self.taken
        for _ in range(1 + twice):
            self.run(self.ledger.archived(self.incarnation, step))
        self.acknowledge(step)

    def acknowledge(self, step: int) -> None:
        gone, self.taken, self.recorded = set(self.taken), [], False
        self.archived = step
        self.settle(gone=gone)

    @precondition(lambda self: self.trained < self.archived)
    @rule(publish=st.booleans(), save=st.booleans())
    def commit(self, publish, save) -> None:
        self.trained += 1
        if (
            publish
            or self.config.max_staleness == 0
            or self.trained - self.policy.n > self.config.max_staleness
        ):
            self.policy = PolicyVersion(self.incarnation, self.trained)
        if save:
            self.checkpoint = self.trained
        self.run(self.ledger.commit(self.incarnation, self.trained, self.policy, "d"))

    @precondition(lambda self: self.taken)
    @rule()
    def reject(self) -> None:
        name = self.taken.pop()
        self.run(self.ledger.reject(self.incarnation, self.archived + 1, [name], "corrupt"))
        self.settle(gone={name})

    @precondition(lambda self: hasattr(self, "config"))
    @rule(archive_is_lost=st.booleans(), manifest_stood=st.booleans())
    def trainer_dies_and_resumes(self, archive_is_lost, manifest_stood) -> None:
        old, step = self.incarnation, self.archived + 1
        if self.whole_batch() and manifest_stood:
            self.archive[step] = self.taken
        self.incarnation = self.run(self.ledger.open_trainer(f"t{next(self.counter)}"))
        assert self.incarnation == old + 1
        with pytest.raises(FencedError):
            self.run(self.ledger.take(old, step, self.per_step))
        self.trained = self.checkpoint
        self.run(self.ledger.resume(self.incarnation, self.trained))
        assert self.run(self.ledger.snapshot()).counts["admitted"] == self.admitted()
        if archive_is_lost and self.archived > self.trained:
            self.lose_archive()
        else:
            self.replay()
        self.policy = PolicyVersion(self.incarnation, self.trained)
        self.run(self.ledger.commit(self.incarnation, self.trained, self.policy, "r"))

    def replay(self) -> None:
        while self.trained + 1 in self.archive:
            self.trained += 1
            self.run(self.ledger.archived(self.incarnation, self.trained))
            if self.trained > self.archived:
                self.acknowledge(self.trained)

    def lose_archive(self) -> None:
        for step in [step for step in self.archive if step > self.trained]:
            del self.archive[step]
        self.overhang = self.config.steps * self.per_step + len(self.live)
        self.taken, self.recorded = [], False
        self.archived = self.trained
        reply = self.run(self.ledger.take(self.incarnation, self.trained + 1, self.per_step))
        self.settle(version=self.trained, late=self.config.on_stale == "wait")
        if reply.groups is not None:
            self.taken, self.recorded = [group.group for group in reply.groups], True

    # ── validation ──

    @precondition(lambda self: hasattr(self, "config") and not self.drained)
    @rule(rows=st.integers(1, 2), settled=st.booleans())
    def open_validation(self, rows, settled) -> None:
        self.run(
            self.ledger.open_validation(
                self.incarnation, self.trained, self.policy, rows, 2, settled
            )
        )
        self.drained[self.trained] = set()

    @precondition(lambda self: self.drained)
    @rule()
    def close_validation(self) -> None:
        ((step, payloads),) = self.drained.items()
        status = self.run(self.ledger.validation(step))
        if status.open:
            got = [
                payload
                for _, payload in self.run(self.ledger.drain_validation(self.incarnation, step))
            ]
            assert sorted(got) == sorted(payloads)
            assert status.done == len(got)
            assert status.done + status.dead <= status.total
        self.run(self.ledger.close_validation(self.incarnation, step))
        self.drained = {}
        self.held = [item for item in self.held if not item.lease.validation]

    # ── nothing can wedge ──

    async def reach_the_end(self) -> None:
        """Workers lease and complete, the trainer takes and commits: the job must reach its last step."""
        ledger = self.ledger
        await end_all(self)
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


async def end_all(machine: LedgerMachine) -> None:
    """Forget what is held: its leases end."""
    machine.held = []
    await machine.end_leases()


@pytest.mark.timeout(600)
def test_every_history_keeps_the_promises(own_valkey):
    own_valkey.kill()
    own_valkey.start("--appendonly", "no")  # what survives a crash is another test's matter
    LedgerMachine.url = own_valkey.url
    run_machine(
        LedgerMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a history is read as it is; shrinking takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
