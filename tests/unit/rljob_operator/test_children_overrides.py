"""A person's template over the rendered pod: maps key by key, named things by name, nothing that is the operator's."""

from __future__ import annotations

from typing import Any

import pytest

from rljob.errors import ManifestError
from rljob_operator.observed import Object
from rljob_operator.render.overrides import merge
from tests.unit.rljob_operator.children_cases import child, container, env, render
from tests.unit.rljob_operator.conftest import make_job

BASE: dict[str, Any] = {
    "metadata": {"labels": {"rljob.dev/job": "j"}},
    "spec": {
        "restartPolicy": "Never",
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "containers": [
            {
                "name": "trainer",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "ports": [{"name": "metrics", "containerPort": 9101}],
                "volumeMounts": [{"name": "work", "mountPath": "/scratch"}],
                "readinessProbe": {
                    "httpGet": {"path": "/healthz", "port": 9101},
                    "periodSeconds": 5,
                },
            }
        ],
        "volumes": [
            {"name": "work", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    },
}


def merged(spec: dict[str, Any]) -> dict[str, Any]:
    return merge(BASE, {"spec": spec}, "t")["spec"]


def merged_container(**fields: Any) -> dict[str, Any]:
    (made,) = merged({"containers": [{"name": "trainer", **fields}]})["containers"]
    return made


def test_maps_merge_key_by_key_and_null_deletes() -> None:
    made = merged({"nodeSelector": {"zone": "a"}, "tolerations": None})
    assert made["nodeSelector"] == {"zone": "a"}
    assert "tolerations" not in made
    assert made["containers"] == BASE["spec"]["containers"]


def test_variables_merge_by_name_and_a_value_gives_way_to_a_source() -> None:
    source = {"secretKeyRef": {"name": "s", "key": "k"}}
    made = merged_container(env=[{"name": "B", "valueFrom": source}, {"name": "C", "value": "3"}])
    assert made["env"] == [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": source},
        {"name": "C", "value": "3"},
    ]


def test_ports_and_mounts_merge_by_what_identifies_them() -> None:
    made = merged_container(
        ports=[{"containerPort": 9101, "hostPort": 9101}],
        volumeMounts=[
            {"mountPath": "/scratch", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    )
    assert made["ports"] == [{"name": "metrics", "containerPort": 9101, "hostPort": 9101}]
    assert [mount["name"] for mount in made["volumeMounts"]] == ["work", "shm"]


def test_a_sidecar_and_a_toleration_of_ones_own_are_added() -> None:
    made = merged({"containers": [{"name": "logs", "image": "l"}], "tolerations": [{"key": "x"}]})
    assert [part["name"] for part in made["containers"]] == ["trainer", "logs"]
    assert [item["key"] for item in made["tolerations"]] == ["nvidia.com/gpu", "x"]


def test_a_volume_of_another_kind_takes_the_place_of_ours() -> None:
    claim = {"name": "work", "persistentVolumeClaim": {"claimName": "fast"}}
    assert merged({"volumes": [claim]})["volumes"][0] == claim


def test_a_volume_of_the_same_kind_is_merged() -> None:
    made = merged({"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}}]})["volumes"]
    assert made[1] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}


def test_a_probe_has_one_question() -> None:
    made = merged_container(readinessProbe={"exec": {"command": ["true"]}})
    assert made["readinessProbe"] == {"exec": {"command": ["true"]}, "periodSeconds": 5}


def test_patch_delete_removes_a_named_thing() -> None:
    assert merged_container(env=[{"name": "A", "$patch": "delete"}])["env"] == [
        {"name": "B", "value": "2"}
    ]


def test_nothing_that_is_merged_is_changed_in_place() -> None:
    before = str(BASE)
    merged_container(env=[{"name": "A", "value": "9"}])
    assert str(BASE) == before


FAULTS: dict[str, dict[str, Any]] = {
    "t.status": {"status": {}},
    "t.metadata.name": {"metadata": {"name": "x"}},
    "t.metadata.labels.rljob.dev/job": {"metadata": {"labels": {"rljob.dev/job": "x"}}},
    "t.metadata.labels.app.kubernetes.io/component": {
        "metadata": {"labels": {"app.kubernetes.io/component": None}}
    },
    "t.metadata.annotations.rljob.dev/config-hash": {
        "metadata": {"annotations": {"rljob.dev/config-hash": "x"}}
    },
    "t.metadata.labels.a": {"metadata": {"labels": {"a": 1}}},
    "t.spec.restartPolicy": {"spec": {"restartPolicy": "Always"}},
    "t.spec.subdomain": {"spec": {"subdomain": None}},
    "t.spec": {"spec": ["x"]},
    "t.spec.containers": {"spec": {"containers": {"trainer": {}}}},
    "t.spec.containers[0]": {"spec": {"containers": [{"image": "x"}]}},
    "t.spec.containers[1]": {"spec": {"containers": [{"name": "trainer"}, "x"]}},
    "t.spec.containers[0].restartPolicy": {
        "spec": {"containers": [{"name": "trainer", "restartPolicy": "Always"}]}
    },
    "t.spec.containers[0].env[1]": {
        "spec": {
            "containers": [{"name": "trainer", "env": [{"name": "X"}, {"name": "RLJOB_TOKEN"}]}]
        }
    },
    "t.spec.containers[0].env[0]": {
        "spec": {"containers": [{"name": "trainer", "env": [{"name": "RLJOB_SECRET_REDIS"}]}]}
    },
    "t.spec.containers[0].env[0].value": {
        "spec": {"containers": [{"name": "trainer", "env": [{"name": "X", "value": 1}]}]}
    },
    "t.spec.containers[trainr]": {"spec": {"containers": [{"name": "trainr", "env": []}]}},
    "t.spec.initContainers[trainer]": {
        "spec": {"initContainers": [{"name": "trainer", "image": "x"}]}
    },
    "t.spec.volumes": {"spec": {"volumes": "none"}},
    "t.spec.tolerations[0]": {"spec": {"tolerations": ["x"]}},
    "t.spec.volumes[0].emptyDir": {"spec": {"volumes": [{"name": "x", "emptyDir": "x"}]}},
    "t.spec.containers[0].resources": {
        "spec": {"containers": [{"name": "x", "image": "x", "resources": [1]}]}
    },
    "t.spec.containers[0].ports": {
        "spec": {"containers": [{"name": "x", "image": "x", "ports": "x"}]}
    },
    "t.metadata": {"metadata": None},
    "t.metadata.labels": {"metadata": {"labels": None}},
    "t.metadata.annotations": {"metadata": {"annotations": None}},
}


def test_a_template_may_not_take_the_whole_spec_away() -> None:
    with pytest.raises(ManifestError, match=r"^t.spec: cannot be removed"):
        merge(BASE, {"spec": None}, "t")


@pytest.mark.parametrize(("path", "override"), FAULTS.items())
def test_what_is_reserved_or_malformed_is_refused_with_its_path(
    path: str, override: dict[str, Any]
) -> None:
    with pytest.raises(ManifestError) as caught:
        merge(BASE, override, "t")
    assert caught.value.path == path


def overridden(**rollout: Any) -> Object:
    parts: dict[str, Any] = {
        "engine": {"kind": "simulated", **rollout.pop("engine", {})},
        **rollout,
    }
    job = make_job(rollout={"groupSize": 4, "sampling": {"maxTokensPerTurn": 56}, **parts})
    return child(render(job), "StatefulSet", "test-rollout")


def test_the_workers_template_comes_after_the_engines() -> None:
    def zone(name: str) -> dict[str, Any]:
        return {"template": {"spec": {"nodeSelector": {"zone": name}, "hostNetwork": False}}}

    made = overridden(engine=zone("engine"), worker=zone("worker"))["spec"]["template"]["spec"]
    assert made["nodeSelector"] == {"zone": "worker"}
    assert (
        "hostNetwork" not in made
    )  # the API server would not print it, and every look would find a difference


def test_what_a_template_adds_is_written_as_the_api_server_keeps_it() -> None:
    parts = [
        {
            "name": "worker",
            "resources": {"limits": {"cpu": 0.5}},
            "ports": [{"containerPort": 99}],
            "env": [{"name": "E", "value": ""}],
        }
    ]
    made = container(overridden(worker={"template": {"spec": {"containers": parts}}}), "worker")
    assert made["resources"]["limits"] == {"cpu": "500m"}
    assert made["ports"][-1] == {"containerPort": 99, "protocol": "TCP"}
    assert made["env"][-1] == {"name": "E"}


def test_knobs_of_the_simulation_may_be_given_by_template() -> None:
    knob = {"name": "RLJOB_SIM_STEP_SECONDS", "value": "2"}
    template = {"spec": {"containers": [{"name": "trainer", "env": [knob]}]}}
    job = make_job(
        trainer={"backend": "simulated", "steps": 3, "groupsPerStep": 2, "template": template}
    )
    assert (
        env(child(render(job), "Job", "test-trainer-1"), "trainer")["RLJOB_SIM_STEP_SECONDS"] == "2"
    )


def test_the_pod_that_prepares_takes_its_own_container_of_the_trainers_template_and_no_node() -> (
    None
):
    token = [{"name": "HF_TOKEN", "value": "t"}]
    parts = [{"name": "prepare", "env": token}, {"name": "logs", "image": "l"}]
    template = {"spec": {"containers": parts, "nodeSelector": {"gpu": "yes"}}}
    job = make_job(
        trainer={"backend": "simulated", "steps": 3, "groupsPerStep": 2, "template": template}
    )
    prepare, trainer = (
        child(render(job), "Job", f"test-{role}-1") for role in ("prepare", "trainer")
    )
    assert env(prepare, "prepare")["HF_TOKEN"] == "t"
    assert "nodeSelector" not in prepare["spec"]["template"]["spec"]
    assert [part["name"] for part in trainer["spec"]["template"]["spec"]["containers"]] == [
        "trainer",
        "logs",
    ]
