"""Jobs of simulated parts in pods: what a person does with kubectl, and what stays behind."""

from collections.abc import Callable

import pytest

from tests.harness.cluster import Cluster
from tests.harness.cluster_job import ClusterJob

KINDS = (
    "Pod", "Job", "StatefulSet", "Service", "ConfigMap", "Secret", "ServiceAccount", "PersistentVolumeClaim",
    "NetworkPolicy", "PodDisruptionBudget", "SandboxPool",
)  # fmt: skip

Make = Callable[..., ClusterJob]


def left_of(cluster: Cluster, job: ClusterJob) -> list[str]:
    """Objects that carry the job's label."""
    selector = f"rljob.dev/job={job.name}"
    return [
        f"{kind}/{item['metadata']['name']}"
        for kind in KINDS
        for item in cluster.list(kind, job.namespace, selector)
    ]


def test_a_job_trains_to_its_end_and_leaves_nothing_when_it_is_deleted(
    cluster: Cluster, make_job: Make
) -> None:
    job = make_job("whole").apply()
    job.until_phase("Succeeded")
    assert job.step == 8
    status = job.status
    assert {c["type"] for c in status["conditions"] if c["status"] == "True"} >= {
        "Accepted",
        "Complete",
    }
    assert status["validation"]["score"] >= 0
    job.assert_nothing_lost()
    table = cluster.kubectl("get", "rlj", "-n", job.namespace)
    assert all(word in table for word in ("PHASE", "STEP", "REWARD", "Succeeded"))
    volumes = {v["metadata"]["name"] for v in cluster.list("PersistentVolume")}
    mine = cluster.get("PersistentVolumeClaim", f"{job.name}-artifacts", job.namespace)
    assert mine
    assert mine["spec"]["volumeName"] in volumes
    cluster.delete("RLJob", job.name, job.namespace)
    job.until("nothing left", lambda: not left_of(cluster, job) and not job.resource, 90)
    job.until(
        "its volume is gone",
        lambda: (
            mine["spec"]["volumeName"]
            not in {v["metadata"]["name"] for v in cluster.list("PersistentVolume")}
        ),
        60,
    )


def test_what_ended_keeps_only_its_volumes(cluster: Cluster, make_job: Make) -> None:
    job = make_job("ended", trainer__steps=2, data__validation=None).apply()
    job.until_phase("Succeeded")
    job.until("no pod is left", lambda: not job.pods(), 90)
    assert cluster.get("PersistentVolumeClaim", "ended-artifacts", job.namespace)


def test_a_suspended_job_gives_everything_back_and_goes_on_where_it_was(
    cluster: Cluster, make_job: Make
) -> None:
    job = make_job("pause", turn_seconds=0.2, trainer__steps=12).apply()
    job.until("it trains", lambda: job.step >= 3)
    job.patch(suspend=True)
    job.until_phase("Suspended", 120)
    before = job.step
    assert not job.pods()
    assert cluster.get("PersistentVolumeClaim", "pause-store", job.namespace)
    job.patch(suspend=False)
    job.until_phase("Succeeded")
    assert job.step == 12 > before >= 3
    job.assert_nothing_lost()


def test_more_rollout_pods_come_and_go_while_it_trains(cluster: Cluster, make_job: Make) -> None:
    job = make_job("scale", turn_seconds=1.0, trainer__steps=30).apply()
    job.until("it trains", lambda: job.step >= 1)
    cluster.kubectl("scale", "rlj/scale", "--replicas=2", "-n", job.namespace)
    job.until(
        "two rollout pods are ready",
        lambda: job.status.get("rollouts", {}).get("readyReplicas") == 2,
    )
    cluster.kubectl("scale", "rlj/scale", "--replicas=1", "-n", job.namespace)
    job.until_phase("Succeeded")
    job.assert_nothing_lost()


def test_a_job_that_runs_too_long_fails_and_says_so(make_job: Make) -> None:
    job = make_job(
        "slow", turn_seconds=2, lifecycle={"activeDeadlineSeconds": 20}, data__validation=None
    ).apply()
    job.until_condition("Failed", "True", "activeDeadlineSeconds")
    job.until("no pod is left", lambda: not job.pods(), 90)


def test_a_finished_job_goes_when_its_time_is_over(make_job: Make) -> None:
    job = make_job(
        "brief", trainer__steps=1, data__validation=None, lifecycle={"ttlSecondsAfterFinished": 1}
    ).apply()
    job.until("it is gone", lambda: not job.resource, 150)


@pytest.mark.parametrize("mode", ["eval", "rollout"])
def test_jobs_without_a_trainer_end_with_a_result(make_job: Make, mode: str) -> None:
    changes: dict[str, dict[str, object]] = {
        "eval": {
            "data__train": None,
            "data__validation__everySteps": None,
            "rollout__groupSize": None,
        },
        "rollout": {"rollout__groups": 4, "data__validation": None},
    }
    job = make_job(
        f"only-{mode}", mode=mode, trainer=None, rollout__maxStaleness=None, **changes[mode]
    ).apply()
    job.until_phase("Succeeded")
    assert (job.artifacts() / "result.json").exists()


def test_status_and_logs_of_the_cli_work_against_the_cluster(
    cluster: Cluster, make_job: Make
) -> None:
    import subprocess
    import sys
    from pathlib import Path

    job = make_job("told", turn_seconds=0.2).apply()
    job.until("it trains", lambda: job.step >= 1)

    def rljob(*args: str) -> str:
        run = subprocess.run(
            [Path(sys.executable).with_name("rljob"), *args],
            capture_output=True, text=True, timeout=60, env={"KUBECONFIG": str(cluster.kubeconfig), "PATH": "/usr/bin"},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert "Running" in rljob("status", "told", "-n", job.namespace)
    assert "trained" in rljob("logs", "trainer", "--run", "told", "-n", job.namespace)
