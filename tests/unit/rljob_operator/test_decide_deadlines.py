"""Deadlines: what ends a job, what suspends it, what is only said; and when the operator looks again."""

from __future__ import annotations

from rljob.ledger.types import ReportView
from rljob_operator.observed import LedgerView
from tests.unit.rljob_operator.fake_cluster import (
    FakeCluster,
    make_ready,
    report,
    running,
    snapshot,
    unschedulable,
)

GPUS = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def unplaced(**spec: object) -> FakeCluster:
    """Prepared; no node takes the rollout pod, the trainer is up."""
    cluster = FakeCluster(**spec)
    cluster.run(3)
    cluster.end_job("prepare")
    cluster.may_be_ready = lambda pod: not pod["metadata"]["name"].startswith("j-rollout")
    cluster.run(1)
    unschedulable(cluster.pods["j-rollout-0"], GPUS)
    cluster.step()
    return cluster


def test_a_job_that_ran_for_too_long_fails() -> None:
    cluster = running(lifecycle={"activeDeadlineSeconds": 1000})
    cluster.now += 1000
    cluster.step()
    assert cluster.condition("Failed")["reason"] == "ActiveDeadlineExceeded"
    cluster.run(5)
    assert not cluster.pods


def test_a_job_that_ended_well_while_the_operator_was_away_has_not_run_for_too_long() -> None:
    cluster = running(lifecycle={"activeDeadlineSeconds": 1000})
    cluster.finish()
    cluster.now += 2000
    cluster.step()
    assert cluster.phase == "Succeeded"


def test_a_clock_that_is_set_back_holds_up_no_attempt() -> None:
    cluster = running()
    cluster.end_job("trainer", 1, "boom")
    cluster.step()
    cluster.now -= 86_400
    cluster.run(5)
    assert cluster.status["trainer"]["attempt"] == 2


def test_the_active_deadline_counts_from_the_last_resume() -> None:
    cluster = running(lifecycle={"activeDeadlineSeconds": 1000})
    cluster.now += 900
    cluster.resource["spec"]["suspend"] = True
    cluster.run(4)
    cluster.now += 5000
    cluster.resource["spec"]["suspend"] = False
    cluster.run(4)
    assert cluster.phase == "Running"
    cluster.now += 990
    cluster.step()
    assert cluster.phase == "Running"
    cluster.now += 10
    cluster.step()
    assert cluster.phase == "Failed"


def test_roles_that_cannot_be_placed_in_time_suspend_the_job_and_are_named() -> None:
    cluster = unplaced()
    pods = set(cluster.pods)
    cluster.now += 1700
    assert not cluster.step().suspend_because
    assert set(cluster.pods) == pods  # no churn while it waits
    cluster.now += 200
    made = cluster.step()
    assert made.suspend_because.startswith("not all roles were ready within 1800 s: rollouts (")
    assert GPUS in made.suspend_because
    assert "trainer" not in made.suspend_because
    assert cluster.reasons().count("ReadyDeadlineExceeded") == 1
    cluster.run(5)
    assert cluster.phase == "Suspended"
    found = cluster.condition("Suspended")
    assert (found["status"], found["reason"]) == ("True", "ReadyDeadlineExceeded")
    assert found["message"] == cluster.status["message"] == made.suspend_because
    assert not cluster.pods


def test_a_job_that_was_suspended_so_gets_the_whole_time_again() -> None:
    cluster = unplaced()
    cluster.now += 2000
    cluster.run(5)
    assert cluster.phase == "Suspended"
    cluster.now += 5000
    cluster.resource["spec"]["suspend"] = False
    cluster.run(3)
    cluster.now += 1700
    assert not cluster.step().suspend_because
    cluster.now += 100
    assert cluster.step().suspend_because


def test_a_suspension_that_is_not_seen_yet_is_asked_for_again_without_a_second_event() -> None:
    cluster = unplaced()
    cluster.now += 2000
    cluster.step()
    cluster.resource["spec"]["suspend"] = False
    assert cluster.step().suspend_because
    assert cluster.reasons().count("ReadyDeadlineExceeded") == 1


def test_a_preparation_that_finds_no_node_is_suspended_too_but_not_one_that_takes_its_time() -> (
    None
):
    cluster = FakeCluster()
    cluster.may_be_ready = lambda pod: not pod["metadata"]["name"].startswith("j-prepare")
    cluster.run(3)
    cluster.now += 2000
    assert "prepare" in cluster.decide().suspend_because
    make_ready(cluster.pods["j-prepare-1-0"])
    assert not cluster.step().suspend_because
    assert cluster.phase == "Preparing"


def test_roles_that_were_ready_once_may_come_and_go() -> None:
    cluster = running()
    cluster.pods["j-rollout-0"]["status"]["conditions"] = []
    cluster.now += 10_000
    assert not cluster.step().suspend_because


def stalled(reports: dict[str, ReportView] | None = None) -> FakeCluster:
    cluster = running()
    cluster.ledger = LedgerView(snapshot=snapshot(1, reports=reports or {}))
    cluster.step()
    cluster.now += 1000
    return cluster


def test_a_job_that_stands_still_says_whom_it_waits_for() -> None:
    cluster = stalled({"trainer": report("groups: 0 of 2 ready"), "worker-0": report("sandboxes")})
    cluster.step()
    found = cluster.condition("Progressing")
    assert (found["status"], found["reason"]) == ("False", "ProgressDeadlineExceeded")
    assert "worker-0 waits for sandboxes" in found["message"]
    assert cluster.status["message"] == found["message"]
    assert cluster.phase == "Running"
    assert cluster.reasons()[-1] == "ProgressDeadlineExceeded"


def test_that_a_silent_component_grows_more_silent_is_no_news() -> None:
    cluster = stalled({"worker-0": report(age=100)})
    cluster.step()
    assert "worker-0 has said nothing" in cluster.condition("Progressing")["message"]
    cluster.ledger = LedgerView(snapshot=snapshot(1, reports={"worker-0": report(age=1600)}))
    cluster.now += 1500
    assert cluster.decide().status == cluster.status


def test_the_last_words_of_a_worker_that_was_scaled_away_blame_nobody() -> None:
    cluster = stalled({"worker-7": report(age=900), "worker-0": report("store")})
    cluster.step()
    assert "worker-7" not in cluster.condition("Progressing")["message"]


def test_progress_is_seen_again() -> None:
    cluster = stalled()
    cluster.step()
    cluster.ledger = LedgerView(snapshot=snapshot(2))
    cluster.step()
    assert cluster.condition("Progressing")["status"] == "True"
    assert cluster.events[-1].reason == "Progress"
    assert not cluster.status.get("message")


def test_what_is_down_is_to_blame_first() -> None:
    cluster = stalled({"trainer": report("groups: 0 of 2 ready")})
    cluster.may_be_ready = lambda _pod: False
    cluster.pods["j-rollout-0"]["status"]["conditions"] = []
    unschedulable(cluster.pods["j-rollout-0"], GPUS)
    cluster.step()
    assert (
        f"rollouts is not ready (j-rollout-0: {GPUS})"
        in cluster.condition("Progressing")["message"]
    )


def test_the_operator_looks_again_when_something_is_due() -> None:
    cluster = running(lifecycle={"activeDeadlineSeconds": 1000})
    assert cluster.last.requeue_seconds == 5.0
    began = cluster.now
    cluster.now = began + 990
    due = cluster.decide().requeue_seconds
    assert due is not None
    assert due <= 5.0
    cluster.end_job("trainer", 1)
    assert cluster.step().requeue_seconds <= 1.0  # the pause before the next attempt
