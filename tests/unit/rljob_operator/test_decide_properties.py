"""Whatever happens, in whatever order, and however often the operator is killed.

Never: two trainer attempts at once, an attempt number that goes down, an end that is taken back, a status that the API
server would refuse (`FakeCluster.step` checks each). Always: once nothing happens any more, the operator falls silent.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rljob_operator.observed import LedgerView
from tests.unit.rljob_operator.fake_cluster import (
    FakeCluster,
    restart_container,
    running,
    snapshot,
    unschedulable,
)

SPECS: list[dict[str, Any]] = [
    {},
    {"suspend": True},
    {"lifecycle": {"backoffLimit": 0, "onFailure": "keepPods"}},
    {"lifecycle": {"activeDeadlineSeconds": 3000, "readyDeadlineSeconds": 60}},
    {"rollout": {"minReplicas": 1, "maxReplicas": 3}},
    {"store": {"redis": {"url": "redis://r:6379/0"}}},
]
ENDED = {"Succeeded", "Failed"}


class Job(RuleBasedStateMachine):
    """A job to which anything may happen."""

    cluster: FakeCluster
    attempt = 0
    ended = ""
    step_number = 0

    @initialize(spec=st.sampled_from(SPECS), started=st.sampled_from([False, True, True]))
    def apply(self, spec: dict[str, Any], started: bool) -> None:
        """Most of what can go wrong does so in a job that is up."""
        started = started and not spec.get("suspend")
        self.cluster = running(**spec) if started else FakeCluster(**spec)

    # ── the operator ──

    @rule()
    def one_pass(self) -> None:
        self.cluster.step()

    @rule()
    def killed_before_the_status_is_written(self) -> None:
        self.cluster.step(keep_status=False)

    @rule(passes=st.integers(1, 6), seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def a_while(self, passes: int, seconds: float) -> None:
        self.cluster.run(passes, seconds)

    # ── the cluster ──

    @rule()
    def controllers_act(self) -> None:
        self.cluster.kubelet()

    @rule(seconds=st.sampled_from([1.0, 30.0, 70.0, 1000.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.cluster.now += seconds

    @rule(ready=st.booleans())
    def nodes_fill_or_empty(self, ready: bool) -> None:
        self.cluster.may_be_ready = lambda _pod: ready

    @rule(
        code=st.sampled_from([0, 1, 1, 2, 3, 137]),
        component=st.sampled_from(["prepare", "trainer", "trainer"]),
        passes=st.integers(0, 5),
    )
    def a_job_ends(self, code: int, component: str, passes: int) -> None:
        jobs = self.cluster.jobs(component)
        newest = max(jobs, default=0)
        live = newest and "deletionTimestamp" not in jobs[newest]["metadata"]
        if live and not jobs[newest]["status"] and not self.cluster.lost:
            self.cluster.end_job(component, code, "last line")
        if passes:
            self.cluster.run(passes, 2.0)

    @rule(code=st.sampled_from([1, 2]), restarts=st.integers(1, 5))
    def an_engine_crashes(self, code: int, restarts: int) -> None:
        for pod in self.cluster.of("rollout"):
            restart_container(pod, "engine", code if restarts > 4 else 1, "boom", restarts)

    @rule(data=st.data())
    def a_pod_is_lost_or_deleted(self, data: st.DataObject) -> None:
        if not self.cluster.pods:
            return
        name = data.draw(st.sampled_from(sorted(self.cluster.pods)))
        pod = self.cluster.pods[name]
        what = data.draw(st.sampled_from(["delete", "unready", "unschedulable", "lose"]))
        if what == "delete" and name not in self.cluster.lost:
            del self.cluster.pods[name]
        elif what == "unready":
            pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
        elif what == "unschedulable" and pod["status"]["phase"] == "Pending":
            unschedulable(pod, "no node")
        elif what == "lose" and pod["status"]["phase"] == "Running":
            self.cluster.lost.add(name)

    @rule()
    def the_trainers_node_is_lost(self) -> None:
        for pod in self.cluster.of("trainer"):
            if pod["status"]["phase"] == "Running":
                self.cluster.lost.add(pod["metadata"]["name"])

    @rule()
    def lost_nodes_come_back(self) -> None:
        self.cluster.lost.clear()

    @precondition(lambda self: self.cluster.jobs("trainer"))
    @rule()
    def somebody_deletes_the_trainer_job(self) -> None:
        newest = max(self.cluster.jobs("trainer"))
        self.cluster.jobs("trainer")[newest]["metadata"]["deletionTimestamp"] = (
            "2026-01-01T00:00:00Z"
        )

    # ── the ledger and people ──

    @rule(more=st.integers(0, 2))
    def steps_are_committed(self, more: int) -> None:
        self.step_number = min(15, self.step_number + more)
        self.cluster.ledger = LedgerView(snapshot=snapshot(self.step_number))

    @rule()
    def the_ledger_is_silent(self) -> None:
        self.cluster.ledger = LedgerView(
            snapshot=self.cluster.ledger.snapshot, age_seconds=50, error="away"
        )

    @rule(phase=st.sampled_from(["Succeeded", "Failed"]), exits=st.booleans())
    def the_trainer_says_it_is_over(self, phase: str, exits: bool) -> None:
        if self.cluster.of("trainer"):
            self.cluster.ledger = LedgerView(snapshot=snapshot(self.step_number, phase=phase))
            if exits:
                self.a_job_ends(code=0, component="trainer", passes=1)

    @rule(suspend=st.booleans())
    def somebody_suspends_or_resumes(self, suspend: bool) -> None:
        self.cluster.resource["spec"]["suspend"] = suspend

    @rule(size=st.sampled_from([0, 4]))
    def somebody_breaks_or_mends_the_manifest(self, size: int) -> None:
        self.cluster.resource["spec"]["rollout"]["groupSize"] = size
        self.cluster.resource["metadata"]["generation"] += 1

    # ── never ──

    @invariant()
    def never_two_attempts_at_once(self) -> None:
        assert self.cluster.most_attempts <= 1

    @invariant()
    def attempt_numbers_only_go_up(self) -> None:
        trainer = self.cluster.status.get("trainer", {})
        attempt = trainer.get("attempt", 0)
        assert attempt >= self.attempt
        assert trainer.get("ended", 0) <= attempt
        self.attempt = attempt

    @invariant()
    def an_end_is_never_taken_back(self) -> None:
        assert not self.ended or self.cluster.phase == self.ended
        self.ended = self.cluster.phase if self.cluster.phase in ENDED else ""

    # ── always ──

    def teardown(self) -> None:
        """Nothing happens any more: the operator says the same again and again, and nothing new."""
        if not hasattr(self, "cluster"):
            return
        self.cluster.run(30, 601.0)  # past every deadline
        self.never_two_attempts_at_once()
        self.attempt_numbers_only_go_up()
        self.an_end_is_never_taken_back()
        status = self.cluster.status
        events = len(self.cluster.events)
        first = self.cluster.step()
        self.cluster.now += 2
        second = self.cluster.step()
        assert self.cluster.status == status
        assert len(self.cluster.events) == events
        assert (first.shape, first.status) == (second.shape, second.status)
        if self.cluster.phase == "Suspended":
            assert not set(self.cluster.pods) - self.cluster.lost


Job.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnythingMayHappen = Job.TestCase
