"""Attempts of prepare and trainer: what counts, what does not, and when the job gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rljob_operator.observed import ChildKey, LedgerView
from rljob_operator.policies.attempts import Attempts, End, over, suspended
from rljob_operator.policies.restart import Action
from tests.unit.rljob_operator.fake_cluster import FakeCluster, make_ready, running, snapshot


def end(code: int = 1, **fields: Any) -> End:
    return End(**({"component": "the trainer", "code": code} | fields))


@pytest.mark.parametrize(
    ("before", "how", "action", "failures"),
    [
        (Attempts(attempt=1), end(), Action.RESTART, 1),
        (Attempts(attempt=4, failures=3, failed_step=0), end(), Action.FAIL, 4),
        (Attempts(attempt=4, failures=3, failed_step=0), end(step=1), Action.RESTART, 1),
        (Attempts(attempt=4, failures=3, failed_step=5), end(step=4), Action.FAIL, 4),
        (Attempts(attempt=1), end(2, lines=("bad",)), Action.FAIL, 1),
        (Attempts(attempt=1, failures=2, failed_step=0), end(3), Action.RESTART, 2),
        (Attempts(attempt=2, fenced=1, failed_step=0), end(3), Action.RESTART, 1),
        (Attempts(attempt=9, failures=3, failed_step=0), end(disrupted=True), Action.RESTART, 3),
        (Attempts(attempt=1), end(2, disrupted=True), Action.FAIL, 1),
        (Attempts(attempt=1), end(0), Action.RESTART, 1),
    ],
)
def test_what_follows_an_attempt(before: Attempts, how: End, action: Action, failures: int) -> None:
    after, decision = over(before, how, backoff_limit=3)
    assert decision.action is action
    assert after.failures == failures
    assert after.ended == after.attempt == before.attempt


def test_a_suspended_attempt_is_over_and_no_failure() -> None:
    after = suspended(Attempts(attempt=3, ended=2, failures=1, failed_step=7))
    assert after == Attempts(attempt=3, ended=3, failures=1, failed_step=7)


def test_a_trainer_that_crashes_is_replaced_after_a_pause_and_says_why() -> None:
    cluster = running()
    cluster.end_job("trainer", 1, "RuntimeError: boom")
    made = cluster.step()
    assert made.shape.trainer_attempt == 1  # its logs stay readable during the pause
    text = "trainer attempt 1 ended: exit code 1: RuntimeError: boom"
    assert cluster.condition("TrainerReady")["message"] == f"{text}; attempt 2 follows"
    assert ("Warning", text) in [(event.type, event.message) for event in cluster.events]
    assert cluster.phase == "Running"
    cluster.now += 2
    assert cluster.step().shape.trainer_attempt == 2
    cluster.run(2)
    assert cluster.status["trainer"] | {"lastCheckpoint": 0} == {
        "attempt": 2, "ended": 1, "failures": 1, "fenced": 0, "failedStep": 1, "lastCheckpoint": 0,
    }  # fmt: skip
    assert cluster.condition("TrainerReady")["status"] == "True"


def test_past_the_limit_the_job_fails_with_the_last_line() -> None:
    cluster = running(lifecycle={"backoffLimit": 1})
    for _ in range(2):
        cluster.end_job("trainer", 1, "one\nRuntimeError: boom")
        cluster.run(5)
    assert cluster.phase == "Failed"
    found = cluster.condition("Failed")
    assert found["reason"] == "BackoffLimitExceeded"
    assert "RuntimeError: boom" in found["message"]
    assert cluster.status["message"] == found["message"]
    assert not cluster.pods


def test_a_new_step_between_failures_starts_the_count_anew() -> None:
    cluster = running(lifecycle={"backoffLimit": 1})
    for step in range(2, 6):
        cluster.ledger = LedgerView(snapshot=snapshot(step))
        cluster.end_job("trainer", 1)
        cluster.run(5)
    assert cluster.phase == "Running"
    assert cluster.status["trainer"]["attempt"] == 5


def test_bad_input_fails_the_job_at_once_with_the_components_own_line() -> None:
    cluster = running()
    cluster.end_job("trainer", 2, "spec.trainer.steps: nonsense; correct it")
    cluster.step()
    assert cluster.phase == "Failed"
    assert cluster.condition("Failed")["reason"] == "BadInput"
    assert cluster.status["message"] == "spec.trainer.steps: nonsense; correct it"


def test_a_killed_sibling_does_not_hide_the_pod_that_refused() -> None:
    cluster = running()
    cluster.end_job("trainer", 2, "spec: bad")
    killed = {"exitCode": 143, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    pod = {**cluster.pods["j-trainer-1-0"], "status": {"phase": "Failed"}}
    pod["metadata"] = {**pod["metadata"], "name": "j-trainer-1-1"}
    pod["status"]["containerStatuses"] = [{"name": "trainer", "state": {"terminated": killed}}]
    cluster.pods = {"a": pod, **cluster.pods}
    cluster.step()
    assert cluster.condition("Failed")["message"] == "spec: bad"


def test_a_preparation_that_fails_is_tried_again_and_bad_input_is_not() -> None:
    cluster = FakeCluster()
    cluster.run(3)
    cluster.end_job("prepare", 1, "timeout")
    cluster.run(4)
    assert cluster.phase == "Preparing"
    assert cluster.status["prepare"]["attempt"] == 2
    cluster.end_job("prepare", 2, "spec.data.train.source: no such file; correct it")
    cluster.step()
    assert cluster.status["message"] == "spec.data.train.source: no such file; correct it"


def test_a_drained_node_is_nobodys_fault() -> None:
    cluster = running(lifecycle={"backoffLimit": 0})
    cluster.end_job("trainer", 143)
    cluster.pods["j-trainer-1-0"]["status"]["conditions"].append(
        {"type": "DisruptionTarget", "status": "True", "message": "Eviction API: evicting"}
    )
    cluster.run(5)
    assert cluster.phase == "Running"
    assert (cluster.status["trainer"]["attempt"], cluster.status["trainer"]["failures"]) == (2, 0)


def test_an_evicted_trainer_that_ends_well_and_is_gone_at_once_is_nobodys_fault_either() -> None:
    cluster = running(lifecycle={"backoffLimit": 0})
    pod = cluster.pods["j-trainer-1-0"]
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pod["status"]["conditions"].append(
        {"type": "DisruptionTarget", "status": "True", "message": "Eviction API: evicting"}
    )
    cluster.step()
    assert cluster.condition("TrainerReady")["reason"] == "Disrupted"
    del cluster.pods["j-trainer-1-0"]
    cluster.step()
    cluster.end_job("trainer", 0)
    del cluster.pods["j-trainer-1-0"]
    cluster.step()  # the ledger was not asked since
    cluster.now += 3
    cluster.run(5)
    assert cluster.phase == "Running"
    assert (cluster.status["trainer"]["attempt"], cluster.status["trainer"]["failures"]) == (2, 0)


def test_a_trainer_without_memory_is_named_so() -> None:
    cluster = running(lifecycle={"backoffLimit": 0})
    cluster.end_job("trainer", 137, reason="OOMKilled")
    cluster.step()
    assert "OOMKilled, it used more memory than its limit" in cluster.status["message"]


def test_a_pod_that_nobody_saw_end_is_a_failure_with_the_jobs_words() -> None:
    cluster = running(lifecycle={"backoffLimit": 0})
    cluster.end_job("trainer", 1)
    del cluster.pods["j-trainer-1-0"]
    cluster.step()
    assert "its pod is gone: BackoffLimitExceeded" in cluster.status["message"]


def test_a_deleted_trainer_job_is_followed_by_the_next_attempt_once_its_pods_are_gone() -> None:
    cluster = running()
    del cluster.children[ChildKey("Job", "j-trainer-1")]
    made = cluster.step()
    assert made.shape.trainer_attempt is None
    assert "waits for j-trainer-1-0 to end" in cluster.condition("TrainerReady")["message"]
    del cluster.pods["j-trainer-1-0"]
    assert cluster.step().shape.trainer_attempt == 2
    assert cluster.status["trainer"]["failures"] == 0


def test_no_attempt_starts_while_a_pod_of_an_older_one_lives() -> None:
    cluster = running()
    lost = cluster.pods["j-trainer-1-0"]
    cluster.end_job("trainer", 1)
    lost["status"]["phase"] = "Running"  # its node does not answer
    for _ in range(5):
        cluster.now += 60
        assert cluster.step().shape.trainer_attempt in {1, None}


def test_no_attempt_starts_while_the_store_is_away() -> None:
    cluster = running()
    cluster.pods["j-store-0"]["status"]["conditions"] = []
    cluster.end_job("trainer", 1)
    cluster.step()
    cluster.now += 60
    assert cluster.step().shape.trainer_attempt == 1
    assert cluster.last.shape.rollouts == 1  # what runs goes on


def test_a_failure_is_counted_once_even_if_the_operator_dies_before_it_is_written() -> None:
    cluster = running()
    cluster.end_job("trainer", 1)
    for _ in range(3):
        cluster.step(keep_status=False)
        cluster.now += 5
    assert cluster.jobs("trainer").keys() == {1}
    cluster.run(5)
    assert cluster.status["trainer"]["failures"] == 1
    assert cluster.status["trainer"]["attempt"] == 2


# ── the end ──


def test_a_trainer_that_was_told_to_stop_is_not_taken_for_done() -> None:
    cluster = running()
    cluster.end_job("trainer", 0)
    cluster.step()
    assert (
        cluster.condition("TrainerReady")["message"]
        == "attempt 1 has ended; waits for the ledger's word"
    )
    cluster.now += 3
    cluster.run(4)
    assert cluster.phase == "Running"
    assert cluster.status["trainer"]["attempt"] == 2


@pytest.mark.parametrize(
    "view", [LedgerView(error="gone"), LedgerView(snapshot=snapshot(16), age_seconds=500.0)]
)
def test_without_a_word_of_the_ledger_exit_code_0_is_believed_after_a_while(
    view: LedgerView,
) -> None:
    cluster = running()
    cluster.end_job("trainer", 0)
    cluster.ledger = view
    cluster.step()
    assert cluster.phase == "Running"
    cluster.now += 61
    cluster.step()
    assert cluster.phase == "Succeeded"
    assert "the ledger could not be asked" in cluster.condition("Complete")["message"]


def test_a_trainer_and_a_store_that_were_drained_together_are_no_success() -> None:
    cluster = running()
    cluster.end_job("trainer", 0)
    cluster.pods["j-store-0"]["status"]["conditions"] = []
    cluster.may_be_ready = lambda _pod: False
    cluster.ledger = LedgerView(snapshot=snapshot(1), age_seconds=500.0, error="away")
    cluster.step()
    cluster.now += 800
    cluster.step()
    assert cluster.phase == "Running"
    make_ready(cluster.pods["j-store-0"])
    cluster.ledger = LedgerView(snapshot=snapshot(1))
    cluster.run(4)
    assert cluster.status["trainer"]["attempt"] == 2


def test_a_job_that_the_ledger_calls_failed_fails_with_its_message() -> None:
    cluster = running()
    cluster.finish("Failed", 3, "no prompt is left that is not in quarantine")
    cluster.step()
    assert cluster.condition("Failed")["reason"] == "TrainerFailed"
    assert cluster.status["message"] == "no prompt is left that is not in quarantine"


def test_a_trainer_that_crashes_after_the_job_was_done_has_succeeded() -> None:
    cluster = running()
    cluster.ledger = LedgerView(snapshot=snapshot(16, phase="Succeeded"))
    cluster.end_job("trainer", 139)
    cluster.step()
    assert cluster.phase == "Succeeded"


def test_a_trainer_that_does_not_exit_is_not_waited_for_for_ever() -> None:
    cluster = running()
    cluster.ledger = LedgerView(snapshot=snapshot(16, phase="Succeeded"))
    cluster.step()
    assert cluster.phase == "Running"
    cluster.now += 200
    cluster.step()
    assert cluster.phase == "Succeeded"


def test_the_numbers_of_the_end_stay() -> None:
    cluster = running()
    cluster.finish(step=16)
    cluster.run(5)
    cluster.ledger = LedgerView()
    cluster.step()
    assert (cluster.status["step"], cluster.status["steps"]) == (16, 3)
    assert cluster.status["rollouts"]["running"] == 0
    assert cluster.status["gpus"] == 0
    assert cluster.condition("TrainerReady")["reason"] == "Ended"


@pytest.mark.parametrize(
    ("mode", "data", "words"),
    [
        ("eval", {"validation": {"source": "recipe://quickstart"}}, "all rows are scored"),
        ("rollout", {"train": {"source": "recipe://quickstart"}}, "all prompts are collected"),
    ],
)
def test_a_collector_takes_the_trainers_place(mode: str, data: Any, words: str) -> None:
    cluster = FakeCluster(mode=mode, data=data)
    del cluster.resource["spec"]["trainer"]
    if mode == "eval":
        del cluster.resource["spec"]["rollout"]["groupSize"]
    cluster.run(3)
    cluster.end_job("prepare")
    cluster.run(3)
    assert cluster.last.shape.trainer_attempt == 1
    cluster.end_job("trainer", 1, "boom")
    cluster.run(4)
    assert any(event.message.startswith("collector attempt 1 ended") for event in cluster.events)
    assert cluster.status["trainer"]["attempt"] == 2
    cluster.finish()
    cluster.step()
    assert cluster.condition("Complete")["message"] == words


def keeps(cluster: FakeCluster) -> set[str]:
    return {name.rsplit("-", 1)[0] for name in cluster.pods}


@pytest.mark.parametrize(
    ("life", "kept"),
    [({}, set[str]()), ({"onFailure": "keepPods"}, {"j-trainer-1", "j-rollout", "j-store"})],
)
def test_pods_of_a_failed_job_stay_where_that_is_asked_for(
    life: dict[str, Any], kept: set[str]
) -> None:
    cluster = running(lifecycle=life)
    cluster.end_job("trainer", 2, "bad")
    cluster.run(6)
    assert cluster.phase == "Failed"
    assert keeps(cluster) == kept
    assert ChildKey("SandboxPool", "j-shells") not in cluster.children
    assert len(cluster.jobs("trainer")) == bool(kept)


def finished_by_trainer(cluster: FakeCluster) -> None:
    cluster.finish()


def failed_by_deadline(cluster: FakeCluster) -> None:
    cluster.now += 10_000


@pytest.mark.parametrize("end_it", [finished_by_trainer, failed_by_deadline])
def test_a_finished_job_is_deleted_when_its_time_is_over(
    end_it: Callable[[FakeCluster], None],
) -> None:
    cluster = running(lifecycle={"ttlSecondsAfterFinished": 100, "activeDeadlineSeconds": 5000})
    end_it(cluster)
    cluster.run(5)
    assert not cluster.last.delete_job
    assert 0 < cluster.last.requeue_seconds <= 100
    cluster.now += 100
    assert cluster.step().delete_job
    assert cluster.reasons()[-1] == "Expired"


def test_the_end_of_an_earlier_job_in_a_redis_of_ones_own_is_not_this_ones() -> None:
    cluster = FakeCluster(store={"redis": {"url": "redis://h/0"}})
    cluster.ledger = LedgerView(snapshot=snapshot(16, phase="Succeeded"))
    cluster.run(3)
    cluster.end_job("prepare")
    cluster.run(3)
    assert cluster.phase == "Running"
    assert cluster.of("trainer"), "its own trainer has the word"
