"""Every rendered object against the official client's models: no unknown field, the right kinds of values.

The real judge is an API server (tests/e2e/test_rendered.py); this one needs none.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from kubernetes import client

from rljob_operator.observed import Object
from tests.unit.rljob_operator.children_cases import CASES, child, rendered

MODELS = {
    "ConfigMap": "V1ConfigMap",
    "Job": "V1Job",
    "NetworkPolicy": "V1NetworkPolicy",
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
    "Secret": "V1Secret",
    "Service": "V1Service",
    "ServiceAccount": "V1ServiceAccount",
    "StatefulSet": "V1StatefulSet",
}
OF_CRDS = {"SandboxPool", "PodMonitor"}
SCALARS: dict[str, type] = {"str": str, "int": int, "bool": bool, "bytes": str}


def faults(value: Any, kind: str, path: str) -> list[str]:
    """What is wrong with a value that should be of the client's type `kind`."""
    if match := re.fullmatch(r"(List|Dict)\[(?:str, )?(.+)\]", kind):
        outer = {"List": list, "Dict": dict}[match[1]]
        if not isinstance(value, outer):
            return [f"{path}: {value!r} is no {match[1].lower()}"]
        items = enumerate(value) if outer is list else value.items()
        return [fault for key, item in items for fault in faults(item, match[2], f"{path}.{key}")]
    if kind == "object":
        return [] if isinstance(value, str | int) else [f"{path}: {value!r} is no port or amount"]
    if kind in SCALARS:
        right = isinstance(value, SCALARS[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if right else [f"{path}: {value!r} is no {kind}"]
    return model_faults(value, getattr(client, kind), path)


def model_faults(value: Any, model: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is no {model.__name__}"]
    kinds = {name: model.openapi_types[key] for key, name in model.attribute_map.items()}
    unknown = [f"{path}.{key}: unknown" for key in value.keys() - kinds.keys()]
    known = value.keys() & kinds.keys()
    return unknown + [f for key in known for f in faults(value[key], kinds[key], f"{path}.{key}")]


def of(item: Object) -> list[str]:
    return faults(item, MODELS[item["kind"]], item["kind"])


@pytest.mark.parametrize("name", CASES)
def test_every_object_fits_the_schema_of_its_kind(name: str) -> None:
    objects = [item for item in rendered(name) if item["kind"] not in OF_CRDS]
    assert [fault for item in objects for fault in of(item)] == []


def test_the_check_sees_an_unknown_field_a_wrong_value_and_a_number_for_text() -> None:
    workload = child(rendered("quickstart"), "StatefulSet", "quickstart-rollout")
    spec = workload["spec"]["template"]["spec"]
    spec["containers"][0]["imagePullPolice"] = "Always"
    spec["terminationGracePeriodSeconds"] = "30"
    spec["containers"][0]["env"][0]["name"] = 1
    found = sorted(fault.rpartition(".")[2] for fault in of(workload))
    assert found == [
        "imagePullPolice: unknown",
        "name: 1 is no str",
        "terminationGracePeriodSeconds: '30' is no int",
    ]


def test_what_an_api_server_would_have_to_guess_is_written_out() -> None:
    for item in rendered("quickstart"):
        if "template" in item.get("spec", {}):
            for part in item["spec"]["template"]["spec"]["containers"]:
                assert all(port["protocol"] == "TCP" for port in part.get("ports", []))
                assert all(isinstance(v, str) for v in part["resources"]["requests"].values())
