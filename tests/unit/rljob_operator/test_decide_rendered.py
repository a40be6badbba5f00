"""What is decided, rendered: the names, labels and containers by which the next pass knows its own children."""

from __future__ import annotations

from typing import Any

import pytest

from rljob import labels
from rljob_operator.decision import objects
from rljob_operator.decision.seen import see
from rljob_operator.observed import ChildKey, Object, Observed, Owner, Shape
from rljob_operator.parse import parse
from rljob_operator.render.children import children
from rljob_operator.render.context import Context
from rljob_operator.render.secrets import secret_values
from tests.unit.rljob_operator.fake_cluster import CONFIG, FakeCluster

EVERYTHING = Shape(store=True, prepare_attempt=1, pools=True, rollouts=2, trainer_attempt=12)


def rendered(shape: Shape, **spec: Any) -> tuple[Object, list[Object]]:
    resource = FakeCluster(**spec).resource
    job, owner = parse(resource), Owner("n", "j", "u")
    assert not isinstance(job, list)
    values = secret_values(Context(job, owner, CONFIG), None, token="t", password="p")
    return resource, children(job, owner, CONFIG, shape, secrets=values, pinned=None)


def pod_of(workload: Object, name: str) -> Object:
    template = workload["spec"]["template"]
    return {**template, "metadata": {**template["metadata"], "name": name}, "status": {}}


def test_every_child_that_a_shape_asks_for_is_found_again() -> None:
    resource, made = rendered(EVERYTHING)
    by_key = {ChildKey(child["kind"], child["metadata"]["name"]): child for child in made}
    trainer = by_key[ChildKey("Job", "j-trainer-12")]
    rollout = by_key[ChildKey("StatefulSet", "j-rollout")]
    pods = (pod_of(trainer, "j-trainer-12-0"), pod_of(rollout, "j-rollout-0"))
    seen = see(Observed(resource=resource, children=by_key, pods=pods))
    assert set(seen.prepare_jobs) == {1}
    assert set(seen.trainer_jobs) == {12}
    assert seen.store_set is not None
    assert seen.rollout_set is not None
    assert [objects.name_of(pool) for pool in seen.pools] == [labels.pool_name("j", "shells")]
    assert {"j-store", "j-artifacts"} <= set(seen.claims)
    assert [objects.name_of(pod) for pod in seen.pods_of_attempt("trainer", 12)] == [
        "j-trainer-12-0"
    ]
    assert seen.pods_of_attempt("trainer", 1) == []
    assert [objects.name_of(pod) for pod in seen.of("rollout")] == ["j-rollout-0"]


def test_the_containers_that_policies_name_are_the_rendered_ones() -> None:
    _, made = rendered(EVERYTHING)
    rollout = next(
        child
        for child in made
        if child["metadata"]["name"] == "j-rollout" and child["kind"] == "StatefulSet"
    )
    spec = rollout["spec"]["template"]["spec"]
    assert {"engine", "gateway"} <= {container["name"] for container in spec["initContainers"]}
    assert "worker" in {container["name"] for container in spec["containers"]}


@pytest.mark.parametrize("shape", [Shape(), Shape(rollouts=0), EVERYTHING])
def test_every_shape_can_be_rendered_and_says_how_many(shape: Shape) -> None:
    _, made = rendered(shape)
    sets = {
        c["metadata"]["name"]: c["spec"]["replicas"] for c in made if c["kind"] == "StatefulSet"
    }
    assert sets["j-store"] == int(shape.store)
    assert sets.get("j-rollout") == shape.rollouts
    assert any(child["kind"] == "SandboxPool" for child in made) == shape.pools


def test_a_collector_is_numbered_like_a_trainer() -> None:
    _, made = rendered(EVERYTHING, mode="rollout", trainer=None)
    assert "j-trainer-12" in {child["metadata"]["name"] for child in made if child["kind"] == "Job"}
