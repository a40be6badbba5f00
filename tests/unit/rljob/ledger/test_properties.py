"""Random histories against a small model: whatever workers, trainer and crashes do, the promises of the ledger hold.

After every call the groups that came and went are compared with what the rules allow; at the end of every history the
job must still reach its last step, with every row trained once.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from rljob.errors import FencedError
from rljob.ids import EpisodeId, GroupId, PolicyVersion
from rljob.ledger import LedgerConfig
from tests.unit.rljob.ledger.model import WORKERS, Held, Model

DISTURBANCES = (
    "release",
    "die_and_come_back",
    "every_lease_ends",
    "engine_switches",
    "scripts_are_forgotten",
)

USUAL = rule(slots=st.integers(1, 8), reward=st.sampled_from([0.0, 1.0]), left=st.integers(0, 2))


class LedgerMachine(Model, RuleBasedStateMachine):
    """What workers, trainer and misfortune do; each rule tells the model what it should have changed."""

    @invariant()
    def the_books_agree(self) -> None:
        self.check_the_books()

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
    first_work, second_work = USUAL(work), USUAL(work)

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
                if item.lease.attempt == group.newest[episode.member]:
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

    @rule(worker=st.sampled_from(WORKERS), what=st.sampled_from(DISTURBANCES))
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
