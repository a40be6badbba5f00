"""Rendered objects before a real API server, dry: it takes them under strict validation, and keeps them as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rljob.api.load import load
from rljob_operator.observed import Owner
from tests.harness.cluster import Cluster
from tests.unit.rljob_operator.children_cases import CASES, PRINTED, UID, render

Object = dict[str, Any]
POOLS = "sandboxpools.rljob.dev"


def objects(cluster: Cluster, namespace: str, name: str) -> list[Object]:
    """The children of a case, in that namespace; pools only where their CRD is installed."""
    job = load(CASES[name], plugins=False)
    found = render(job, owner=Owner(namespace, job.name, UID), crds=frozenset())
    has_pools = cluster.get("CustomResourceDefinition", POOLS) is not None
    return [item for item in found if has_pools or item["kind"] != "SandboxPool"]


def dry(cluster: Cluster, items: list[Object]) -> list[Object]:
    """What the API server would store."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    answer = cluster.kubectl(
        "apply", "--server-side", "--field-manager=rljob-operator", "--dry-run=server",
        "--validate=strict", "-o", "json", "-f", "-", stdin=text,
    )  # fmt: skip
    stored = json.loads(answer)
    return stored["items"] if stored["kind"] == "List" else [stored]


def make_account(cluster: Cluster, children: list[Object]) -> None:
    """The account that the pods run as; without its owner, which is not there and whose garbage it would be."""
    account = next(item for item in children if item["kind"] == "ServiceAccount")
    kept = {k: v for k, v in account["metadata"].items() if k != "ownerReferences"}
    cluster.apply({**account, "metadata": kept})


def differences(wanted: Any, stored: Any, path: str) -> Iterator[str]:
    """Where what is stored does not hold what was wanted; more may be in it."""
    if isinstance(wanted, dict) and isinstance(stored, dict):
        for key, value in wanted.items():
            yield from differences(value, stored.get(key), f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(stored, list) and len(wanted) == len(stored):
        for index, (one, other) in enumerate(zip(wanted, stored, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif wanted != stored:
        yield f"{path}: {wanted!r} is stored as {stored!r}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_stored_holds_what_was_rendered_so_that_a_quiet_job_causes_no_writes(
    cluster: Cluster, namespace: str, name: str
) -> None:
    wanted = objects(cluster, namespace, name)
    stored = dry(cluster, wanted)
    for one, other in zip(wanted, stored, strict=True):
        assert list(differences(one, other, f"{one['kind']} {one['metadata']['name']}")) == []


@pytest.mark.parametrize("name", CASES)
def test_every_pod_is_admitted_where_only_restricted_pods_are(
    cluster: Cluster, namespace: str, name: str
) -> None:
    children = objects(cluster, namespace, name)
    make_account(cluster, children)
    templates = [
        item["spec"]["template"] for item in children if "template" in item.get("spec", {})
    ]
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": f"pod-{index}", "namespace": namespace},
            # no PriorityClass of a golden manifest exists here
            "spec": {k: v for k, v in template["spec"].items() if k != "priorityClassName"},
        }
        for index, template in enumerate(templates)
    ]
    assert len(dry(cluster, pods)) == len(templates) >= 3


def test_a_pod_that_is_not_restricted_is_not_admitted_here(
    cluster: Cluster, namespace: str
) -> None:
    children = objects(cluster, namespace, "simulated")
    make_account(cluster, children)
    template = next(item["spec"]["template"] for item in children if item["kind"] == "Job")
    template["spec"]["containers"][0]["securityContext"] = {}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": namespace}}
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        dry(cluster, [{**pod, "spec": template["spec"]}])


def test_quantities_are_printed_as_the_table_says(cluster: Cluster, namespace: str) -> None:
    quotas = [
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": f"q{index}", "namespace": namespace},
            "spec": {"hard": {"requests.cpu": quantity}},
        }
        for index, quantity in enumerate(PRINTED)
    ]
    stored = dry(cluster, quotas)
    found = [item["spec"]["hard"]["requests.cpu"] for item in stored]
    assert dict(zip(PRINTED, found, strict=True)) == PRINTED
