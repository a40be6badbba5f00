"""What becomes of a job in a cluster: its phases, from nothing to the end."""

from __future__ import annotations

from rljob import labels
from rljob.ledger import LedgerSnapshot
from rljob_operator.decision.times import to_text
from rljob_operator.observed import LedgerView, Shape
from tests.unit.rljob_operator.fake_cluster import FakeCluster, running, snapshot

Snapshot = LedgerSnapshot


def test_a_job_goes_from_pending_to_succeeded_and_leaves_only_volumes() -> None:
    cluster = FakeCluster()
    first = cluster.step()
    assert cluster.phase == "Pending"
    assert first.shape == Shape(store=True)
    assert cluster.condition("StoreReady")["status"] == "False"
    cluster.run(2)
    assert cluster.phase == "Preparing"
    assert cluster.last.shape == Shape(store=True, prepare_attempt=1)
    cluster.end_job("prepare")
    made = cluster.step()
    assert cluster.phase == "Running"
    assert made.shape == Shape(
        store=True, prepare_attempt=1, pools=True, rollouts=1, trainer_attempt=1
    )
    cluster.run(3)
    assert cluster.last.shape.prepare_attempt is None  # its end has been written down
    for kind in ("StoreReady", "SandboxesReady", "RolloutsReady", "TrainerReady", "Prepared"):
        assert cluster.condition(kind)["status"] == "True", kind
    assert cluster.status["trainer"]["attempt"] == 1
    cluster.finish()
    made = cluster.step()
    assert cluster.phase == "Succeeded"
    assert made.shape is None  # the evidence stays until the verdict is written
    cluster.run(4)
    assert not cluster.pods
    kinds = {key.kind for key in cluster.children}
    assert kinds == {"PersistentVolumeClaim", "StatefulSet"}
    assert cluster.condition("Complete")["reason"] == "StepsDone"
    assert cluster.last.requeue_seconds is None
    assert {"Preparing", "Running", "StepsDone"} <= set(cluster.reasons())


def test_suspending_takes_down_the_trainer_then_rollouts_then_pools_then_the_store() -> None:
    cluster = running()
    cluster.resource["spec"]["suspend"] = True
    made = cluster.step()
    assert cluster.phase == "Suspending"
    assert made.shape == Shape(store=True, pools=True, rollouts=0)
    assert cluster.condition("Suspended")["status"] == "Unknown"
    cluster.kubelet()
    assert cluster.step().shape == Shape(store=False, pools=False, rollouts=0)
    cluster.run(2)
    assert cluster.phase == "Suspended"
    assert not cluster.pods
    assert cluster.condition("Suspended")["reason"] == "SuspendRequested"
    assert cluster.last.requeue_seconds is None


def test_a_resumed_job_goes_on_with_the_next_attempt_and_the_same_count_of_failures() -> None:
    cluster = running()
    cluster.end_job("trainer", 1, "boom")
    cluster.run(4)
    assert (cluster.status["trainer"]["attempt"], cluster.status["trainer"]["failures"]) == (2, 1)
    cluster.resource["spec"]["suspend"] = True
    cluster.run(4)
    assert cluster.phase == "Suspended"
    cluster.now += 1000
    cluster.resource["spec"]["suspend"] = False
    cluster.run(5)
    assert cluster.phase == "Running"
    assert (cluster.status["trainer"]["attempt"], cluster.status["trainer"]["failures"]) == (3, 1)
    assert cluster.condition("Suspended")["lastTransitionTime"] >= to_text(cluster.now - 10)
    assert cluster.most_attempts == 1


def test_the_store_is_up_again_before_a_resumed_job_gets_its_pods() -> None:
    cluster = running()
    cluster.resource["spec"]["suspend"] = True
    cluster.run(4)
    cluster.resource["spec"]["suspend"] = False
    assert cluster.step().shape == Shape(store=True, pools=True, rollouts=0)


def test_a_job_that_is_suspended_from_the_start_creates_nothing() -> None:
    cluster = FakeCluster(suspend=True)
    made = cluster.step()
    assert cluster.phase == "Suspended"
    assert made.shape is None
    assert "startTime" not in cluster.status


def test_a_finished_job_ignores_suspend() -> None:
    cluster = running()
    cluster.finish()
    cluster.run(4)
    cluster.resource["spec"]["suspend"] = True
    cluster.run(2)
    assert cluster.phase == "Succeeded"


def test_deletion_takes_everything_down_and_then_the_finalizer() -> None:
    cluster = running()
    cluster.resource["metadata"] |= {
        "deletionTimestamp": to_text(cluster.now), "finalizers": [labels.FINALIZER],
    }  # fmt: skip
    made = cluster.step()
    assert made.shape == Shape()
    assert not made.remove_finalizer
    for _ in range(3):
        cluster.kubelet()
        made = cluster.step()
    assert made.remove_finalizer
    assert not made.destroy_ledger  # the job's own Valkey just goes


def test_keys_in_a_redis_of_ones_own_are_removed_even_when_pods_linger() -> None:
    cluster = FakeCluster(store={"redis": {"url": "redis://r:6379/0"}})
    cluster.run(2)
    cluster.resource["metadata"] |= {
        "deletionTimestamp": to_text(cluster.now), "finalizers": [labels.FINALIZER],
    }  # fmt: skip
    assert not cluster.step().destroy_ledger
    cluster.now += 61
    made = cluster.step()
    assert made.destroy_ledger
    assert made.remove_finalizer


def test_an_operator_that_looks_twice_says_the_same_and_nothing_new() -> None:
    cluster = running()
    again = cluster.step()
    assert again.status == cluster.step().status
    assert again.events == ()


def test_a_ledger_that_says_nothing_leaves_the_numbers_as_they_were() -> None:
    cluster = running()
    cluster.ledger = LedgerView(snapshot=snapshot(3, validation={2: 0.25}))
    cluster.step()
    cluster.ledger = LedgerView(error="it does not answer")
    cluster.step()
    assert cluster.status["step"] == 3
    assert cluster.status["validation"] == {"step": 2, "score": 0.25}
