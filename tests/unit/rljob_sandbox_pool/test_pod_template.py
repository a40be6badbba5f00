"""The pod of a sandbox: what it may do, what it says about itself, and what its status means."""

import json
from typing import Any

import msgspec
import pytest

from rljob import labels
from rljob.api.rljob_types import SandboxPoolSpec
from rljob_sandbox_pool.runtimes.base import SandboxSpec, Trouble
from rljob_sandbox_pool.runtimes.pod_identity import Owner, label_value
from rljob_sandbox_pool.runtimes.pod_status import fate, is_scheduled, trouble
from rljob_sandbox_pool.runtimes.pod_template import PodConfig, pod, template_hash

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


BASELINE_ALLOWS = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip


def test_baseline_leaves_the_user_to_the_image_and_root_what_it_needs() -> None:
    spec = made(podSecurity="baseline", hostUsers=False, writablePaths=["/root"])["spec"]
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert spec["hostUsers"] is False
    guest, seed = spec["initContainers"]
    for container in (seed, *spec["containers"]):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        assert {"KILL", "DAC_OVERRIDE"} <= set(security["capabilities"]["add"]) < BASELINE_ALLOWS
    assert "add" not in guest["securityContext"]["capabilities"]
    manifest = made(podSecurity="baseline", hostUsers=False)
    assert {"/etc/hosts", "/dev/"} <= set(guest_config(manifest)["sealed"])
    assert "/dev/" not in guest_config(made())["sealed"]


def test_a_user_namespace_has_a_user_that_it_knows() -> None:
    spec = made(hostUsers=False)["spec"]
    assert spec["hostUsers"] is False
    assert 0 < spec["securityContext"]["runAsUser"] < 65_536
    assert "hostUsers" not in made()["spec"]


def test_writable_paths_are_copied_once_to_begin_with_and_once_to_go_back_to() -> None:
    manifest = made(writablePaths=["/root", "/opt/venv"], limits={"diskMib": 100})
    spec = manifest["spec"]
    seed, sandbox = spec["initContainers"][1], spec["containers"][0]
    assert seed["image"] == sandbox["image"] == "img:1"
    at = {mount["mountPath"]: mount for mount in sandbox["volumeMounts"]}
    assert at["/root"] == {"name": "writable", "mountPath": "/root", "subPath": "0"}
    assert at["/opt/venv"] == {"name": "writable", "mountPath": "/opt/venv", "subPath": "1"}
    assert at["/opt/rljob/seeds"]["readOnly"] is True
    assert guest_config(manifest)["writable"] == [
        {"path": "/root", "seed": "/opt/rljob/seeds/0"},
        {"path": "/opt/venv", "seed": "/opt/rljob/seeds/1"},
    ]
    assert seed["command"][-5:] == [
        "--max-mib=100", "/opt/rljob/seeds", "/opt/rljob/copies", "/root", "/opt/venv",
    ]  # fmt: skip
    mounts = {mount["mountPath"] for mount in seed["volumeMounts"]}
    assert mounts == {"/opt/rljob/guest", "/opt/rljob/seeds", "/opt/rljob/copies"}


def test_writable_paths_have_room_in_memory_or_on_disk() -> None:
    small = made(writablePaths=["/a", "/b"], limits={"diskMib": 64, "memoryMib": 512})["spec"]
    volumes = {v["name"]: v["emptyDir"] for v in small["volumes"]}
    assert volumes["writable"] == {"medium": "Memory", "sizeLimit": "128Mi"}
    assert volumes["seeds"] == {"sizeLimit": "128Mi"}
    limits = small["containers"][0]["resources"]["limits"]
    assert limits["memory"] == f"{512 + 16 + 64 + 4 * 64}Mi"
    assert limits["ephemeral-storage"] == f"{128 + 128}Mi"
    assert small["initContainers"][1]["resources"]["limits"]["memory"] == f"{64 + 128}Mi"
    large = made(writablePaths=["/a"], limits={"diskMib": 1000})["spec"]
    volumes = {v["name"]: v["emptyDir"] for v in large["volumes"]}
    assert volumes["writable"] == volumes["seeds"] == {"sizeLimit": "1000Mi"}
    limits = large["containers"][0]["resources"]["limits"]
    assert limits["ephemeral-storage"] == f"{128 + 1000 + 3 * 1000}Mi"
    assert large["initContainers"][1]["resources"]["limits"]["memory"] == "64Mi"


def test_without_writable_paths_nothing_is_copied() -> None:
    spec = made()["spec"]
    assert [container["name"] for container in spec["initContainers"]] == ["guest"]
    assert {"seeds", "writable"}.isdisjoint(volume["name"] for volume in spec["volumes"])


def test_a_writable_root_has_room_on_disk() -> None:
    spec = made(readOnlyRoot=False, recycle={"strategy": "recreate"}, limits={"diskMib": 100})
    sandbox = spec["spec"]["containers"][0]
    assert sandbox["securityContext"]["readOnlyRootFilesystem"] is False
    assert sandbox["resources"]["limits"]["ephemeral-storage"] == f"{128 + 100}Mi"
    guest = spec["spec"]["initContainers"][0]
    assert guest["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_persons_labels_never_replace_those_of_ours() -> None:
    pod = {
        "labels": {"team": "a", labels.JOB: "other"},
        "annotations": {"note": "x", "rljob.dev/template-hash": "0"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "imagePullSecrets": ["mine", "pull"],
    }
    manifest = made(pod=pod)
    assert manifest["metadata"]["labels"]["team"] == "a"
    assert manifest["metadata"]["labels"][labels.JOB] == "j"
    assert manifest["metadata"]["annotations"]["note"] == "x"
    assert manifest["metadata"]["annotations"]["rljob.dev/template-hash"] != "0"
    assert manifest["spec"]["nodeSelector"] == {"disk": "ssd"}
    assert manifest["spec"]["tolerations"] == [{"key": "a", "operator": "Exists"}]
    assert manifest["spec"]["imagePullSecrets"] == [{"name": "pull"}, {"name": "mine"}]


def test_sandboxes_of_one_image_like_to_be_together_where_there_are_several() -> None:
    images = [{"image": "img:1"}, {"image": "img:2"}]
    manifest = made(images=images)
    (wish,) = manifest["spec"]["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    wanted = wish["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert wanted.items() <= manifest["metadata"]["labels"].items()
    assert "affinity" not in made(images=images[:1])["spec"]


def test_nodes_to_avoid_are_a_wish_beside_that_for_the_same_image() -> None:
    pool = SandboxPoolSpec.model_validate({"images": [{"image": "img:1"}, {"image": "img:2"}]})
    sandbox = SandboxSpec(id="box-1", key=b"\1", index=0, limits=pool.limits, image="img:1")
    affinity = pod(sandbox, pool, OWNER, CONFIG, avoided=["a", "b"])["spec"]["affinity"]
    assert set(affinity) == {"nodeAffinity", "podAffinity"}
    (wish,) = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    fields = wish["preference"]["matchFields"]
    assert [(each["operator"], each["values"]) for each in fields] == [
        ("NotIn", ["a"]),
        ("NotIn", ["b"]),
    ]


@pytest.mark.parametrize(
    ("egress", "asks"), [("none", False), ("gateway", False), ("dns", True), ("public", True)]
)
def test_a_sandbox_without_dns_looks_nothing_up(egress: str, asks: bool) -> None:
    spec = made(egress=egress)["spec"]
    assert spec.get("dnsPolicy", "") == ("" if asks else "None")


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
    changed |= {hashed(recycle={"canary": "true"}), hashed(pod={"labels": {"a": "b"}})}
    changed |= {hashed(writablePaths=["/a"]), hashed(egress="dns")}
    assert len(changed | {hashed()}) == 8
    assert hashed(egress="gateway") == hashed(recycle={"maxReuses": 3}) == hashed(prePull=True)
    assert hashed(egress="public") == hashed(egress="dns")


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
