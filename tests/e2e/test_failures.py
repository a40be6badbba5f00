"""What goes wrong on a cluster is named; no child is created twice, no trajectory lost, the operator never stuck."""

import time
from collections.abc import Callable

from tests.harness.cluster import Cluster
from tests.harness.cluster_job import ClusterJob

Make = Callable[..., ClusterJob]

QUICK_TO_GIVE_UP = {"readyDeadlineSeconds": 15}


def uids(job: ClusterJob) -> dict[str, str]:
    """Names and uids of its pods, sandboxes aside."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for pod in job.pods()
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] != "sandbox"
    }


def with_template(**container: object) -> dict[str, object]:
    """A trainer pod template that changes its container."""
    return {"spec": {"containers": [{"name": "trainer", **container}]}}


def test_what_only_rljob_can_know_is_not_accepted_with_its_path(make_job: Make) -> None:
    tasks = [{"name": "shell", "type": "no_such_family", "sandbox": {"pool": "shells"}}]
    job = make_job("unknown", tasks=tasks).apply()
    found = job.until_condition("Accepted", "False", "no_such_family")
    assert "spec.tasks[0].type" in found["message"]
    assert job.phase == "Rejected"
    assert not job.pods()


def test_an_image_that_is_not_there_is_a_condition_with_the_message(make_job: Make) -> None:
    job = make_job("noimage", rollout__worker__image="localhost/no-such-image:1").apply()
    found = job.until_condition("RolloutsReady", "False", "no-such-image")
    assert found["reason"] == "ErrImagePull"


def test_gpus_that_nobody_has_are_a_condition_and_the_job_suspends_itself(make_job: Make) -> None:
    job = make_job(
        "nogpus",
        trainer__resources={"limits": {"nvidia.com/gpu": 64}},
        lifecycle=QUICK_TO_GIVE_UP,
    ).apply()
    job.until_condition("TrainerReady", "False", "Insufficient nvidia.com/gpu")
    first = uids(job)
    time.sleep(5)
    assert {name: uid for name, uid in uids(job).items() if name in first} == first, (
        "pods are churned"
    )
    found = job.until_condition("Suspended", "True", "trainer", seconds=90)
    assert "Insufficient nvidia.com/gpu" in found["message"]
    assert job.resource["spec"]["suspend"] is True
    job.until("its pods are gone", lambda: not job.pods(), 90)


def test_a_quota_that_is_exceeded_is_named(cluster: Cluster, make_job: Make) -> None:
    job = make_job("quota", lifecycle=QUICK_TO_GIVE_UP)
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "tight"},
        "spec": {"hard": {"pods": "2"}},
    }
    cluster.apply(quota, job.namespace)
    job.apply()
    job.until(
        "a condition names the quota",
        lambda: any(
            "exceeded quota" in c.get("message", "") for c in job.status.get("conditions", [])
        ),
    )
    cluster.delete("ResourceQuota", "tight", job.namespace)
    job.until("it goes on or is suspended", lambda: job.phase in {"Running", "Suspended"}, 90)


def test_a_volume_that_never_binds_is_named(cluster: Cluster, make_job: Make) -> None:
    job = make_job("novolume", store__artifacts="pvc://never")
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "never"},
        "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "no-such-class",
                 "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip
    cluster.apply(claim, job.namespace)
    job.apply()
    job.until(
        "a condition names the claim",
        lambda: any("never" in c.get("message", "") for c in job.status.get("conditions", [])),
    )


def test_a_secret_that_is_missing_is_named_and_waited_for(make_job: Make) -> None:
    job = make_job(
        "nosecret", store__redis={"secretRef": {"name": "not-yet", "key": "url"}}
    ).apply()
    job.until_condition("StoreReady", "False", "not-yet")
    assert not job.pods("trainer")


def test_a_trainer_that_crashes_goes_on_from_its_checkpoint(make_job: Make) -> None:
    job = make_job("crash", turn_seconds=0.2, trainer__steps=10).apply()
    job.until("a checkpoint", lambda: job.step >= 4)
    (pod,) = job.pods("trainer")
    job.cluster.kubectl(
        "exec", pod["metadata"]["name"], "-n", job.namespace, "-c", "trainer", "--",
        "python", "-c", "import os, signal; [os.kill(int(p), signal.SIGKILL) for p in os.listdir('/proc')"
        " if p.isdigit() and int(p) not in (os.getpid(),)]", check=False,
    )  # fmt: skip
    job.delete_pod(pod)
    job.until("a second attempt", lambda: job.status.get("trainer", {}).get("attempt", 1) >= 2)
    job.until_phase("Succeeded")
    job.assert_nothing_lost()


def test_a_trainer_that_always_crashes_fails_the_job_with_its_last_lines(make_job: Make) -> None:
    command = [
        "python",
        "-c",
        "import sys; print('the very last line', file=sys.stderr); sys.exit(1)",
    ]
    job = make_job(
        "hopeless",
        trainer__template=with_template(command=command, args=[]),
        lifecycle={"backoffLimit": 1},
    ).apply()
    found = job.until_condition("Failed", "True", "the very last line")
    assert found["reason"] == "BackoffLimitExceeded"
    assert job.status["trainer"]["attempt"] == 2


def test_a_rollout_pod_that_is_deleted_comes_back_and_nothing_is_lost(make_job: Make) -> None:
    job = make_job("rollout", turn_seconds=0.2, trainer__steps=10).apply()
    job.until("it trains", lambda: job.step >= 2)
    (pod,) = job.pods("rollout")
    job.delete_pod(pod)
    job.until_phase("Succeeded")
    job.assert_nothing_lost()


def test_a_store_pod_that_is_deleted_comes_back_with_what_it_had(make_job: Make) -> None:
    job = make_job("store", turn_seconds=0.2, trainer__steps=10).apply()
    job.until("it trains", lambda: job.step >= 2)
    (pod,) = job.pods("store")
    job.delete_pod(pod)
    job.until_phase("Succeeded")
    job.assert_nothing_lost()


def test_a_drained_node_is_left_and_the_job_goes_on_when_there_is_one_again(
    cluster: Cluster, make_job: Make
) -> None:
    job = make_job(
        "drain", turn_seconds=0.2, trainer__steps=10, rollout__deadlines={"drainSeconds": 10}
    ).apply()
    job.until("it trains", lambda: job.step >= 2)
    (node,) = {pod["spec"]["nodeName"] for pod in job.pods("rollout")}
    try:
        cluster.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=90s",
            f"--pod-selector=rljob.dev/job={job.name}", timeout=120,
        )  # fmt: skip
    finally:
        cluster.kubectl("uncordon", node)
    job.until_phase("Succeeded")
    job.assert_nothing_lost()
