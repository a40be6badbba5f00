"""Why a role is not up, in the words of whoever refuses it; and that a quiet cluster is left in peace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rljob_operator.observed import ChildKey, LedgerView, Object
from tests.unit.rljob_operator.fake_cluster import (
    FakeCluster,
    make_ready,
    restart_container,
    running,
    snapshot,
    unschedulable,
    wait_container,
)

GPUS = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def starting() -> FakeCluster:
    """Prepared; its rollout pod and trainer pod are Pending."""
    cluster = FakeCluster()
    cluster.run(3)
    cluster.end_job("prepare")
    cluster.may_be_ready = lambda _pod: False
    cluster.run(2)
    assert {"j-rollout-0", "j-trainer-1-0"} <= set(cluster.pods)
    return cluster


def pull(reason: str, message: str) -> Callable[[Object], None]:
    return lambda pod: wait_container(pod, "engine", reason, message)


@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        (pull("ErrImagePull", "rpc error: not found"), "ErrImagePull", "image i: rpc error: not found"),
        (
            pull("ImagePullBackOff", 'Back-off pulling image "i": ErrImagePull: rpc error: not found'),
            "ErrImagePull",
            "image i: rpc error: not found",
        ),
        (pull("InvalidImageName", "bad name"), "ErrImagePull", "image i: InvalidImageName: bad name"),
        (
            pull("CreateContainerConfigError", 'secret "x" not found'),
            "CreateContainerConfigError",
            'container engine: secret "x" not found',
        ),
        (
            lambda pod: unschedulable(pod, f"{GPUS} preemption: 0/3 nodes are available: no victims"),
            "Unschedulable",
            GPUS,
        ),
        (
            lambda pod: unschedulable(pod, "Scheduling is blocked", "SchedulingGated"),
            "Queued",
            "queued by Kueue",
        ),
        (
            lambda pod: restart_container(pod, "worker", 1, "line one\nValueError: boom\n"),
            "Crashed",
            "worker ended: exit code 1: ValueError: boom",
        ),
        (
            lambda pod: restart_container(pod, "engine", 137, "", reason="OOMKilled"),
            "OOMKilled",
            "used more memory than its limit",
        ),
        (lambda pod: restart_container(pod, "worker", 139), "Crashed", "killed by signal 11"),
    ],
)  # fmt: skip
def test_a_pod_that_is_not_ready_says_why(
    spoil: Callable[[Object], None], reason: str, words: str
) -> None:
    cluster = starting()
    spoil(cluster.pods["j-rollout-0"])
    cluster.step()
    found = cluster.condition("RolloutsReady")
    assert (found["status"], found["reason"]) == ("False", reason)
    assert words in found["message"]
    assert words in cluster.status["message"]
    events = len(cluster.events)
    cluster.step()
    assert len(cluster.events) == events


def test_trouble_is_one_warning_event_with_the_words() -> None:
    cluster = starting()
    unschedulable(cluster.pods["j-rollout-0"], GPUS)
    cluster.step()
    event = cluster.events[-1]
    assert (event.type, event.reason) == ("Warning", "Unschedulable")
    assert GPUS in event.message


def test_a_quota_is_named_without_the_random_names_of_each_try() -> None:
    cluster = starting()
    del cluster.pods["j-trainer-1-0"]
    quota = "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 4, limited: 4"
    cluster.warn(
        "Job",
        "j-trainer-1",
        "FailedCreate",
        f'Error creating: pods "j-trainer-1-0-x7" is forbidden: {quota}',
    )
    cluster.step()
    found = cluster.condition("TrainerReady")
    assert found["reason"] == "QuotaExceeded"
    assert found["message"] == f"j-trainer-1: {quota}"
    cluster.warn(
        "Job",
        "j-trainer-1",
        "FailedCreate",
        f'Error creating: pods "j-trainer-1-0-b9" is forbidden: {quota}',
    )
    assert cluster.decide().status == cluster.status


def test_a_missing_priority_class_is_named() -> None:
    cluster = starting()
    del cluster.pods["j-rollout-0"]
    words = "no PriorityClass with name high was found"
    cluster.warn(
        "StatefulSet", "j-rollout", "FailedCreate",
        f'create Pod j-rollout-0 in StatefulSet j-rollout failed error: pods "j-rollout-0" is forbidden: {words}',
    )  # fmt: skip
    cluster.step()
    found = cluster.condition("RolloutsReady")
    assert (found["reason"], found["message"]) == ("FailedCreate", f"j-rollout: {words}")


def test_a_warning_from_before_the_last_resume_says_nothing() -> None:
    cluster = starting()
    del cluster.pods["j-trainer-1-0"]
    cluster.now -= 5000
    cluster.warn("Job", "j-trainer-1", "FailedCreate", "exceeded quota: old")
    cluster.now += 5000
    cluster.step()
    assert cluster.condition("TrainerReady")["reason"] == "Starting"


def test_a_volume_that_never_binds_is_named_with_the_provisioners_words() -> None:
    cluster = FakeCluster()
    cluster.may_be_ready = lambda _pod: False
    cluster.run(1)
    claim = cluster.children[ChildKey("PersistentVolumeClaim", "j-store")]
    claim["status"]["phase"] = "Pending"
    claim["spec"]["storageClassName"] = "slow"
    unschedulable(cluster.pods["j-store-0"], "pod has unbound immediate PersistentVolumeClaims")
    cluster.step()
    found = cluster.condition("StoreReady")
    assert found["reason"] == "VolumePending"
    assert found["message"] == "volume j-store: is not bound (StorageClass slow)"
    cluster.warn("PersistentVolumeClaim", "j-store", "ProvisioningFailed", "no disk is left")
    cluster.step()
    assert cluster.condition("StoreReady")["message"] == "volume j-store: no disk is left"


def test_a_volume_of_ones_own_that_never_binds_is_named() -> None:
    cluster = starting()
    pod = cluster.pods["j-trainer-1-0"]
    pod["spec"]["volumes"] = [{"name": "a", "persistentVolumeClaim": {"claimName": "never"}}]
    unschedulable(pod, "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    cluster.step()
    found = cluster.condition("TrainerReady")
    assert found["reason"] == "VolumePending"
    assert (
        found["message"] == "j-trainer-1-0 waits for its volumes (never): not all of them are bound"
    )


def test_a_claim_that_waits_for_its_pod_does_not_hide_the_scheduler() -> None:
    cluster = starting()
    claim = cluster.children[ChildKey("PersistentVolumeClaim", "j-artifacts")]
    claim["status"]["phase"] = "Pending"
    unschedulable(cluster.pods["j-rollout-0"], GPUS)
    cluster.step()
    assert cluster.condition("RolloutsReady")["reason"] == "Unschedulable"


def test_a_volume_that_cannot_be_mounted_is_named() -> None:
    cluster = starting()
    cluster.warn("Pod", "j-trainer-1-0", "FailedMount", 'secret "j-secrets" not found')
    cluster.step()
    found = cluster.condition("TrainerReady")
    assert (found["reason"], found["message"]) == (
        "VolumePending",
        'j-trainer-1-0: secret "j-secrets" not found',
    )


def refusal(kind: str, name: str, reason: str) -> Object:
    """As `apply` reports it: no time, no metadata."""
    return {"involvedObject": {"kind": kind, "name": name}, "reason": reason, "message": "words"}


@pytest.mark.parametrize(
    ("kind", "name", "condition"),
    [
        ("StatefulSet", "j-rollout", "RolloutsReady"),
        ("Job", "j-trainer-1", "TrainerReady"),
        ("NetworkPolicy", "j-pods", "Progressing"),
        ("RLJob", "j", "Progressing"),
    ],
)
def test_a_child_that_the_api_server_refuses_is_a_condition(
    kind: str, name: str, condition: str
) -> None:
    cluster = starting()
    cluster.pods = {key: pod for key, pod in cluster.pods.items() if key.startswith("j-store")}
    cluster.warnings = [refusal(kind, name, "PermissionDenied")]
    cluster.step()
    found = cluster.condition(condition)
    assert (found["status"], found["reason"]) == ("False", "PermissionDenied")
    assert found["message"] == f"{kind} {name}: words"
    assert "PermissionDenied" in cluster.reasons()


def test_a_pool_says_what_its_manager_says() -> None:
    cluster = starting()
    pool = cluster.children[ChildKey("SandboxPool", "j-shells")]
    pool["status"] = {
        "ready": 0,
        "conditions": [
            {
                "type": "Degraded",
                "status": "True",
                "reason": "ErrImagePull",
                "message": "no such image",
            },
        ],
    }
    cluster.step()
    found = cluster.condition("SandboxesReady")
    assert (found["reason"], found["message"]) == ("ErrImagePull", "pool shells: no such image")


def test_a_job_that_kueue_holds_back_is_queued_and_has_not_failed() -> None:
    cluster = FakeCluster()
    cluster.run(2)
    cluster.jobs("prepare")[1]["spec"]["suspend"] = True
    cluster.pods.pop("j-prepare-1-0", None)
    cluster.now += 100_000
    made = cluster.step()
    assert cluster.condition("Prepared")["reason"] == "Queued"
    assert cluster.phase == "Preparing"
    assert not made.suspend_because  # it holds nothing while it queues
    assert not [
        event
        for event in cluster.events
        if event.type == "Warning" and event.reason != "ProgressDeadlineExceeded"
    ]


def test_two_of_three_rollout_pods_are_enough_to_work_but_not_all() -> None:
    cluster = running(rollout={"replicas": 3})
    restart_container(cluster.pods["j-rollout-2"], "engine", 1, "CUDA error")
    cluster.may_be_ready = lambda _pod: False
    cluster.now += 100_000
    made = cluster.step()
    found = cluster.condition("RolloutsReady")
    assert (found["status"], found["reason"]) == ("False", "PartlyReady")
    assert found["message"].startswith("2 of 3 pods are ready; j-rollout-2: engine ended")
    assert not made.suspend_because


def test_an_engine_that_never_was_ready_ends_the_job_after_its_restarts() -> None:
    cluster = starting()
    pod = cluster.pods["j-rollout-0"]
    restart_container(pod, "engine", 1, "ValueError: no such architecture", restarts=3)
    cluster.step()
    assert cluster.phase == "Running"
    assert "no such architecture" in cluster.condition("RolloutsReady")["message"]
    restart_container(pod, "engine", 1, "ValueError: no such architecture", restarts=4)
    cluster.step()
    assert cluster.phase == "Failed"
    assert cluster.condition("Failed")["reason"] == "StartFailed"
    assert "ValueError: no such architecture" in cluster.status["message"]


def test_an_engine_that_was_ready_once_may_crash_as_often_as_it_likes() -> None:
    cluster = running()
    restart_container(cluster.pods["j-rollout-0"], "engine", 1, "CUDA error", restarts=40)
    cluster.may_be_ready = lambda _pod: False
    cluster.step()
    assert cluster.phase == "Running"


@pytest.mark.parametrize(
    ("name", "words"),
    [("worker", "spec.tasks[0]: nonsense"), ("engine", "spec.rollout.engine: ")],
)
def test_a_rollout_container_that_refuses_its_input_ends_the_job_at_once(
    name: str, words: str
) -> None:
    cluster = starting()
    restart_container(
        cluster.pods["j-rollout-0"],
        name,
        2,
        "usage\nspec.tasks[0]: nonsense" if name == "worker" else "unknown flag",
    )
    cluster.step()
    assert cluster.phase == "Failed"
    assert cluster.condition("Failed")["reason"] == "BadInput"
    assert words in cluster.status["message"]


def test_a_redis_of_ones_own_that_cannot_be_reached_is_waited_for() -> None:
    cluster = FakeCluster(store={"redis": {"url": "redis://r:6379/0"}})
    cluster.ledger = LedgerView(error="connection refused")
    made = cluster.step()
    assert cluster.phase == "Pending"
    assert made.shape is not None
    assert made.shape.prepare_attempt is None
    assert not made.shape.store
    found = cluster.condition("StoreReady")
    assert (found["reason"], found["message"]) == (
        "Unreachable",
        "spec.store.redis: connection refused",
    )
    cluster.ledger = LedgerView()
    assert cluster.step().shape.prepare_attempt == 1


# ── manifests ──


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        ({"model": {"source": "file://model"}}, ["spec.model.source"]),
        (
            {"model": {"source": "file://model"}, "store": {"artifacts": "file:///a"}},
            ["spec.model.source", "spec.store.artifacts"],
        ),
        ({"rollout": {"groupSize": 0}}, ["spec.rollout.groupSize"]),
        (
            {"tasks": [{"name": "a", "type": "shell_files", "sandbox": {"pool": "none"}}]},
            ["spec.tasks", "spec.sandboxPools"],
        ),
        (
            {"trainer": {"steps": 1, "groupsPerStep": 1, "resources": {"limits": {"cpu": "x"}}}},
            ["spec.trainer.resources"],
        ),
    ],
)  # fmt: skip
def test_a_manifest_without_sense_is_rejected_with_every_path(
    spec: dict[str, Any], paths: list[str]
) -> None:
    cluster = FakeCluster(**spec)
    made = cluster.step()
    assert cluster.phase == "Rejected"
    assert made.shape is None
    lines = cluster.condition("Accepted")["message"].splitlines()
    assert len(lines) == len(paths)
    for path in paths:
        assert any(line.startswith(path) for line in lines), lines
    assert cluster.status["message"].startswith(lines[0])
    assert cluster.reasons() == ["InvalidSpec"]


def test_a_corrected_manifest_is_taken_up() -> None:
    cluster = FakeCluster(model={"source": "file://model"})
    cluster.step()
    cluster.resource["spec"]["model"]["source"] = "recipe://quickstart"
    cluster.resource["metadata"]["generation"] = 2
    cluster.run(2)
    assert cluster.phase == "Preparing"
    assert cluster.status["observedGeneration"] == 2
    assert {c["observedGeneration"] for c in cluster.status["conditions"]} == {2}


def test_a_running_job_whose_manifest_breaks_is_left_alone() -> None:
    cluster = running()
    cluster.resource["spec"]["rollout"]["groupSize"] = 0
    cluster.resource["metadata"]["generation"] = 2
    made = cluster.step()
    assert cluster.phase == "Rejected"
    assert made.shape is None
    cluster.resource["spec"]["rollout"]["groupSize"] = 2
    cluster.step()
    assert cluster.phase == "Running"
    assert cluster.status["trainer"]["attempt"] == 1


def test_numbers_are_summed_and_rounded() -> None:
    cluster = running()
    cluster.pods["j-rollout-0"]["spec"]["containers"][0]["resources"] = {
        "limits": {"nvidia.com/gpu": "2"}
    }
    cluster.ledger = LedgerView(
        snapshot=snapshot(
            5,
            counts={"completed": 2, "failed": 1, "running": 7},
            reward_mean=1 / 3,
            staleness={"mean": 0.123456, "max": 2.0},
            validation={0: 0.1, 4: 0.5},
            stream_entries=9,
        )
    )
    cluster.step()
    status = cluster.status
    assert status["gpus"] == 2
    assert status["rewardMean"] == 0.3333
    assert status["staleness"] == {"mean": 0.1235, "max": 2}
    assert status["validation"] == {"step": 4, "score": 0.5}
    assert status["backlog"] == 9
    assert status["sandboxes"] == {"warm": 4, "claimed": 0}
    assert status["rollouts"]["completionRate"] == 0.6667
    assert status["rollouts"]["running"] == 7
    assert status["policyVersion"] == 5
    assert (status["rollouts"]["replicas"], status["rollouts"]["readyReplicas"]) == (1, 1)


def test_a_pod_that_becomes_ready_is_an_event_and_clears_the_words() -> None:
    cluster = starting()
    unschedulable(cluster.pods["j-rollout-0"], GPUS)
    cluster.step()
    make_ready(cluster.pods["j-rollout-0"])
    cluster.step()
    found = cluster.condition("RolloutsReady")
    assert (found["status"], found["message"]) == ("True", "")
    assert cluster.reasons()[-1] == "RolloutsReady"
