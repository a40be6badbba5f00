"""The children of a job: golden files hold them (`RLJOB_WRITE_GOLDEN=1` rewrites them); and what no file shows."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob import labels
from rljob.api.rljob_types import RLJob
from rljob.settings import Settings
from rljob_operator.observed import Object, Shape
from rljob_operator.render import gpus
from tests.unit.rljob_operator.children_cases import (
    CASES,
    GOLDEN,
    UP,
    child,
    container,
    env,
    names,
    owner,
    render,
    rendered,
    values,
)
from tests.unit.rljob_operator.conftest import make_job


class Plain(yaml.SafeDumper):
    """No anchors: what is shared in memory is repeated in the file."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def text_of(objects: list[Object]) -> str:
    shown = [item for item in objects if not item["metadata"]["name"].endswith("-pinned")]
    return yaml.dump_all(shown, Dumper=Plain, sort_keys=False, width=140)


@pytest.mark.parametrize("name", CASES)
def test_the_children_are_what_the_golden_file_says(name: str) -> None:
    text, golden = text_of(rendered(name)), GOLDEN / f"{name}.yaml"
    if os.environ.get("RLJOB_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_every_child_belongs_to_its_job_and_has_a_name_of_its_own(name: str) -> None:
    objects = rendered(name)
    keys = {(item["kind"], item["metadata"]["name"]) for item in objects}
    assert len(keys) == len(objects)
    for item in objects:
        (reference,) = item["metadata"]["ownerReferences"]
        assert reference["controller"]
        assert reference["blockOwnerDeletion"]
        assert item["metadata"]["labels"][labels.JOB] == reference["name"]


@pytest.mark.parametrize("name", CASES)
def test_every_container_can_read_its_settings(name: str) -> None:
    roles = {"prepare": "prepare-1", "trainer": "trainer-1", "rollout": "rollout"}
    objects = rendered(name)
    for item in objects:
        role = next(
            (role for role, suffix in roles.items() if item["metadata"]["name"].endswith(suffix)),
            "",
        )
        if item["kind"] not in {"Job", "StatefulSet"} or not role:
            continue
        spec = item["spec"]["template"]["spec"]
        for part in (*spec.get("initContainers", []), *spec["containers"]):
            if part["name"] != "engine-extension":
                texts = {k: v for k, v in env(item, part["name"]).items() if isinstance(v, str)}
                assert Settings.from_env(texts).artifacts == "/artifacts"


def pods(objects: list[Object]) -> list[dict[str, Any]]:
    return [
        item["spec"]["template"]["spec"] for item in objects if "template" in item.get("spec", {})
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_pod_meets_the_restricted_standard(name: str) -> None:
    for spec in pods(rendered(name)):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for part in (*spec.get("initContainers", []), *spec["containers"]):
            assert part["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }


@pytest.mark.parametrize("name", CASES)
def test_every_mount_has_its_volume_and_every_volume_a_mount(name: str) -> None:
    for spec in pods(rendered(name)):
        volumes = [volume["name"] for volume in spec["volumes"]]
        parts = (*spec.get("initContainers", []), *spec["containers"])
        mounts = {mount["name"] for part in parts for mount in part["volumeMounts"]}
        assert sorted(set(volumes)) == sorted(volumes)
        assert mounts == set(volumes)


def test_a_secret_is_only_in_the_secret() -> None:
    job = make_job()
    others = [item for item in render(job) if item["kind"] != "Secret"]
    assert values(job)["redis"] not in json.dumps(others)
    assert values(job)["token"] not in json.dumps(others)


def test_secrets_come_before_the_variables_that_are_expanded_from_them() -> None:
    variables = container(
        child(rendered("quickstart"), "StatefulSet", "quickstart-rollout"), "worker"
    )["env"]
    order = [item["name"] for item in variables]
    assert order.index("RLJOB_SECRET_REDIS") < order.index("RLJOB_REDIS_URL")
    assert order.index("POD_INDEX") < order.index("RLJOB_COMPONENT")


def test_a_persons_dollar_signs_are_not_expanded_by_the_kubelet() -> None:
    engine = {"kind": "simulated", "env": {"A": "$(HOME) $$ ${x:y} $1"}}
    job = make_job(rollout={"groupSize": 4, "engine": engine, "sampling": {"maxTokensPerTurn": 56}})
    made = env(child(render(job), "StatefulSet", "test-rollout"), "engine")["A"]
    assert made == "$$(HOME) $$$$ $${x:y} $$1"


def test_worker_gateway_and_engine_meet_inside_their_pod_and_are_named_by_its_number() -> None:
    workload = child(rendered("quickstart"), "StatefulSet", "quickstart-rollout")
    for part in ("engine", "gateway", "worker"):
        variables = env(workload, part)
        assert variables["RLJOB_ENGINE_URL"] == "http://127.0.0.1:8000"
        assert variables["RLJOB_COMPONENT"] == f"{part}-$(POD_INDEX)"
        assert variables["RLJOB_WORK_DIR"] == f"/scratch/{part}"


def test_an_own_redis_is_named_by_its_secret_and_nothing_of_a_store_is_made() -> None:
    objects = rendered("own-redis")
    assert not [name for item in objects if (name := item["metadata"]["name"]).endswith("-store")]
    trainer = env(child(objects, "Job", "own-redis-trainer-1"), "trainer")
    assert trainer["RLJOB_SECRET_REDIS_URL"] == {
        "secretKeyRef": {"name": "redis-url", "key": "url"}
    }
    assert trainer["RLJOB_REDIS_URL"] == "$(RLJOB_SECRET_REDIS_URL)"


def test_a_redis_url_reaches_the_pods_as_it_was_written() -> None:
    job = make_job(store={"redis": {"url": "redis://:p$(x)@host:6379/0"}})
    assert (
        env(child(render(job), "Job", "test-trainer-1"), "trainer")["RLJOB_REDIS_URL"]
        == "redis://:p$$(x)@host:6379/0"
    )


def test_one_claim_for_rows_and_artifacts_is_one_volume() -> None:
    spec = child(rendered("own-redis"), "Job", "own-redis-prepare-1")["spec"]["template"]["spec"]
    claims = [v for v in spec["volumes"] if "persistentVolumeClaim" in v]
    mounts = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "artifacts"]
    assert len(claims) == 1
    assert mounts == [
        {"name": "artifacts", "mountPath": "/artifacts", "subPath": "default/own-redis"},
        {"name": "artifacts", "mountPath": "/volumes/shared", "readOnly": True},
    ]


def test_a_pool_reaches_what_it_asks_for_and_only_gateway_pools_reach_the_gateway() -> None:
    objects = rendered("egress")
    closed = child(objects, "NetworkPolicy", "egress-sandboxes")["spec"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in closed
    opened = [name for name in names(objects, "NetworkPolicy") if name.endswith("-egress")]
    assert opened == [f"egress-{pool}-egress" for pool in ("dns", "agents", "open", "own")]
    for name in opened:
        spec = child(objects, "NetworkPolicy", name)["spec"]
        (selected,) = spec["podSelector"]["matchExpressions"]
        assert selected["values"] == [name.removesuffix("-egress")]
        assert spec["policyTypes"] == ["Egress"]
    gateway = child(objects, "NetworkPolicy", "egress-gateway")["spec"]
    assert gateway["podSelector"]["matchLabels"][labels.COMPONENT] == "rollout"
    ((rule,),) = [gateway["ingress"]]
    assert rule["ports"] == [{"port": labels.GATEWAY_PORT, "protocol": "TCP"}]
    assert rule["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["egress-agents"]
    assert "test-gateway" not in names(render(make_job()), "NetworkPolicy")
    workload = child(objects, "StatefulSet", "egress-rollout")
    assert env(workload, "worker")["RLJOB_GATEWAY_URL"] == "http://$(POD_IP):8001"
    assert env(workload, "gateway")["RLJOB_GATEWAY_URL"] == "http://127.0.0.1:8001"
    order = [item["name"] for item in container(workload, "worker")["env"]]
    assert order.index("POD_IP") < order.index("RLJOB_GATEWAY_URL")


def test_only_what_writes_artifacts_may_write_them() -> None:
    workload = child(rendered("quickstart"), "StatefulSet", "quickstart-rollout")
    mounts = {
        part: next(m for m in container(workload, part)["volumeMounts"] if m["name"] == "artifacts")
        for part in ("engine", "gateway", "worker")
    }
    assert {part: mount.get("readOnly", False) for part, mount in mounts.items()} == {
        "engine": True, "gateway": True, "worker": False,
    }  # fmt: skip


def test_a_suspended_job_keeps_its_volumes_and_scales_the_rest_to_nothing() -> None:
    objects = rendered("quickstart", Shape(store=False, pools=False, rollouts=0))
    assert child(objects, "StatefulSet", "quickstart-store")["spec"]["replicas"] == 0
    assert child(objects, "StatefulSet", "quickstart-rollout")["spec"]["replicas"] == 0
    assert names(objects, "PersistentVolumeClaim") == ["quickstart-artifacts", "quickstart-store"]
    assert names(objects, "Job") == names(objects, "SandboxPool") == []


def test_before_rollouts_are_due_there_is_no_set_of_them() -> None:
    objects = rendered("quickstart", Shape(store=True, prepare_attempt=3))
    assert names(objects, "StatefulSet") == ["quickstart-store"]
    assert names(objects, "Job") == ["quickstart-prepare-3"]


def test_an_attempt_is_in_the_name_and_the_labels_and_nowhere_else() -> None:
    first, second = (
        child(rendered("quickstart", Shape(trainer_attempt=n)), "Job", f"quickstart-trainer-{n}")
        for n in (1, 2)
    )
    assert first["metadata"]["labels"][labels.ATTEMPT] == "1"
    assert json.dumps(first).replace("trainer-1", "trainer-2").replace(
        f'"{labels.ATTEMPT}": "1"', f'"{labels.ATTEMPT}": "2"'
    ) == json.dumps(second)


def test_a_monitor_is_made_where_there_is_something_that_reads_it() -> None:
    assert names(rendered("quickstart"), "PodMonitor") == ["quickstart"]
    assert names(rendered("quickstart", crds=frozenset()), "PodMonitor") == []


def test_a_sandbox_reaches_nothing_and_is_reached_by_rollouts_and_the_pool_manager_alone() -> None:
    spec = child(rendered("quickstart"), "NetworkPolicy", "quickstart-sandboxes")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in spec
    ((rollouts, manager),) = [rule["from"] for rule in spec["ingress"]]
    assert rollouts["podSelector"]["matchLabels"][labels.COMPONENT] == "rollout"
    assert manager["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "rljob-system"
    }
    assert [port["port"] for port in spec["ingress"][0]["ports"]] == [labels.GUEST_PORT]


def test_no_sandbox_is_among_the_friends_of_the_store() -> None:
    (rule,) = child(rendered("quickstart"), "NetworkPolicy", "quickstart-store")["spec"]["ingress"]
    mine = rule["from"][0]["podSelector"]
    assert mine["matchExpressions"][0]["values"] == ["prepare", "rollout", "trainer"]


def test_pods_with_gpus_tolerate_them_and_get_shared_memory_and_time_to_start() -> None:
    workload = child(rendered("gpu"), "StatefulSet", "qwen-swe-rollout")
    spec = workload["spec"]["template"]["spec"]
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert container(workload, "engine")["resources"]["limits"]["nvidia.com/gpu"] == "8"
    prepare = child(rendered("gpu"), "Job", "qwen-swe-prepare-1")["spec"]["template"]["spec"]
    assert "tolerations" not in prepare


def test_gpus_of_a_job_are_counted_over_its_pods(gpu_job: RLJob) -> None:
    assert gpus.requested(gpu_job) == 4 * 8 + 8
    assert gpus.requested(gpu_job, rollouts=1) == 8 + 8
    assert gpus.requested(make_job()) == 0


@pytest.fixture
def gpu_job() -> RLJob:
    from rljob.api.load import load

    return load(CASES["gpu"], plugins=False)


def test_kueue_finds_its_queue_on_every_workload() -> None:
    workloads = [item for item in rendered("gpu") if item["kind"] in {"Job", "StatefulSet"}]
    assert {item["metadata"]["labels"].get(labels.KUEUE_QUEUE) for item in workloads} == {
        "research"
    }


def test_secret_values_that_exist_are_kept_and_missing_ones_are_made() -> None:
    job = make_job()
    first = values(job)
    assert values(job, {**first, "redis": "kept"})["redis"] == "kept"
    assert values(job, {"token": "old"}) == {**first, "token": "old"}
    assert "requirepass 00c0ffee" in first["valkey.conf"]
    assert 'dir "/store"' in first["valkey.conf"]
    assert "bind 0.0.0.0" in first["valkey.conf"]


shapes = st.builds(
    Shape,
    store=st.booleans(),
    prepare_attempt=st.none() | st.integers(1, 99),
    pools=st.booleans(),
    rollouts=st.none() | st.integers(0, 500),
    trainer_attempt=st.none() | st.integers(1, 99),
)


@settings(deadline=None)
@given(shapes)
def test_a_shape_chooses_and_numbers_but_changes_nothing_else(shape: Shape) -> None:
    job = make_job()
    up = {(o["kind"], o["metadata"]["name"].rstrip("0123456789")): o for o in render(job, UP)}
    for item in render(job, shape):
        full = up[item["kind"], item["metadata"]["name"].rstrip("0123456789")]
        if item["kind"] == "StatefulSet":
            assert item["spec"] | {"replicas": 0} == full["spec"] | {"replicas": 0}
        elif item["kind"] != "Job":
            assert item == full


def test_a_job_made_again_under_its_name_does_not_adopt_the_pods_of_the_old_one() -> None:
    job = make_job()
    elsewhere = render(job, owner=owner(job, uid="another"))
    selector = child(elsewhere, "StatefulSet", "test-rollout")["spec"]["selector"]
    assert selector["matchLabels"][labels.JOB_UID] == "another"
