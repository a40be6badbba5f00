"""The pod of a sandbox: what it may do, what it says about itself, and what its status means."""

import json
from typing import Any

import msgspec
import pytest

from rljob import labels
from rljob.api.rljob_types import SandboxPoolSpec
from rljob_sandbox_pool.runtimes.base import SandboxSpec, Trouble
from rljob_sandbox_pool.runtimes.pod_status import fate, is_scheduled, trouble
from rljob_sandbox_pool.runtimes.pod_template import (
    Owner,
    PodConfig,
    label_value,
    pod,
    template_hash,
)

CONFIG = PodConfig(guest_image="pool:1", sandbox_image="box:1", image_pull_secrets=["pull"])
OWNER = Owner(namespace="ns", name="j-default", uid="u", job="j", job_uid="ju")
LIMITS = SandboxPoolSpec().limits


def made(sandbox_id: str = "box-1", **spec: Any) -> dict[str, Any]:
    pool = SandboxPoolSpec.model_validate(spec)
    sandbox = SandboxSpec(id=sandbox_id, key=b"\1", index=0, limits=pool.limits, image="img:1")
    return pod(sandbox, pool, OWNER, CONFIG)


def test_it_meets_the_restricted_standard() -> None:
    spec = made()["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec["initContainers"], *spec["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert all("emptyDir" in volume for volume in spec["volumes"])


def test_it_holds_nothing_of_the_cluster_and_is_never_restarted() -> None:
    spec = made(runtimeClassName="gvisor")["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert "activeDeadlineSeconds" not in spec


def test_each_sandbox_has_a_user_of_its_own() -> None:
    users = {made(f"box-{n}")["spec"]["securityContext"]["runAsUser"] for n in range(50)}
    assert len(users) == 50
    assert min(users) >= 100_000


def test_baseline_leaves_the_user_to_the_image() -> None:
    security = made(podSecurity="baseline", runtimeClassName="kata")["spec"]["securityContext"]
    assert "runAsUser" not in security


def test_it_says_whose_it_is() -> None:
    metadata = made()["metadata"]
    assert metadata["labels"][labels.POOL] == "j-default"
    assert metadata["labels"][labels.JOB] == "j"
    assert metadata["labels"][labels.JOB_UID] == "ju"
    assert metadata["labels"][labels.COMPONENT] == "sandbox"
    assert metadata["labels"][labels.MANAGED_BY] == labels.POOL_FIELD_MANAGER
    assert [each["uid"] for each in metadata["ownerReferences"]] == ["u"]


@pytest.mark.parametrize("name", ["a", "a" * 63, "a" * 64, "a-" * 60 + "b"])
def test_a_labels_value_fits(name: str) -> None:
    value = label_value(name)
    assert len(value) <= 63
    assert value == name or len(name) > 63
    assert value[-1].isalnum()


def guest_config(manifest: dict[str, Any]) -> dict[str, Any]:
    (variable,) = manifest["spec"]["containers"][0]["env"]
    assert "$" not in variable["value"]
    return json.loads(variable["value"])


def test_the_guest_is_told_its_limits() -> None:
    config = guest_config(made(limits={"pids": 10, "cpuSeconds": 60}))
    assert config["rlimits"]["RLIMIT_NPROC"] == 12
    assert config["rlimits"]["RLIMIT_CPU"] == 60
    assert config["key"] == "01"


def test_small_folders_are_memory_and_large_ones_disk() -> None:
    small, large = made(limits={"diskMib": 64}), made(limits={"diskMib": 4096})
    volumes = {v["name"]: v["emptyDir"] for v in small["spec"]["volumes"]}
    assert volumes["workspace"] == {"medium": "Memory", "sizeLimit": "64Mi"}
    assert guest_config(small)["shared_folders"] == []
    volumes = {v["name"]: v["emptyDir"] for v in large["spec"]["volumes"]}
    assert volumes["workspace"] == {"sizeLimit": "4096Mi"}
    assert guest_config(large)["shared_folders"] == ["/workspace", "/tmp"]


def test_resources_follow_the_limits_or_are_given() -> None:
    limits = made(limits={"memoryMib": 512, "diskMib": 64})["spec"]["containers"][0]["resources"]
    assert limits["limits"]["memory"] == f"{512 + 2 * 64 + 16 + 64}Mi"
    given = {"requests": {"cpu": "2"}}
    assert made(resources=given)["spec"]["containers"][0]["resources"] == given


def test_what_makes_pods_outdated() -> None:
    def hashed(config: PodConfig = CONFIG, **spec: Any) -> str:
        return template_hash(SandboxPoolSpec.model_validate(spec), config)

    assert hashed() == hashed(warm=9, max=99) == hashed(images=[{"image": "a:1"}])
    other = msgspec.structs.replace(CONFIG, guest_image="pool:2")
    changed = {hashed(limits={"pids": 9}), hashed(runtimeClassName="x"), hashed(other)}
    assert len(changed | {hashed()}) == 4


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Running"}, ""),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, "Evicted: disk"),
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "sandbox", "state": {"terminated": {"exitCode": 3}}}
                ],
            },
            "container sandbox: exit code 3  the claim's time to live is over",
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {
                        "name": "sandbox",
                        "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    }
                ],
            },
            "container sandbox: exit code 137 OOMKilled",
        ),
        ({"phase": "Succeeded"}, "the pod is Succeeded"),
    ],
)
def test_how_a_sandbox_ended(status: dict[str, Any], words: str) -> None:
    assert fate({"status": status}) == words


def test_a_pod_that_is_being_deleted_serves_no_more() -> None:
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert fate({"metadata": metadata, "status": {"phase": "Running"}})


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": "sandbox", "image": "i:1", "state": state}]}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, None),
        (waiting("PodInitializing"), None),
        (
            waiting("ErrImagePull", "not found"),
            Trouble("ImageUnavailable", "ErrImagePull: i:1: not found"),
        ),
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "i:1": ErrImagePull: not found'),
            Trouble("ImageUnavailable", "ErrImagePull: i:1: not found"),
        ),
        (
            waiting("CreateContainerError", "no such user"),
            Trouble("ContainerNotCreated", "CreateContainerError: no such user"),
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no room"}]},
            Trouble("CapacityLimited", "no room"),
        ),
    ],
)
def test_what_a_pod_waits_for(status: dict[str, Any], expected: Trouble | None) -> None:
    assert trouble({"status": status}) == expected


def test_scheduled_is_who_has_a_node() -> None:
    assert is_scheduled({"spec": {"nodeName": "n"}})
    assert not is_scheduled({"spec": {}})
