"""What a job is pinned to: an operator upgrade changes nothing, a change of the spec only what the table names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob import labels
from rljob.api.mutability import MUTABLE as MUTABLE_KEYS
from rljob.api.rljob_types import RLJob
from rljob.errors import CorruptError, ManifestError
from rljob_operator.observed import ClusterConfig, Object, Shape
from rljob_operator.render import pinned as pins
from rljob_operator.render.context import Context
from tests.unit.rljob_operator.children_cases import UP, child, config, owner, render
from tests.unit.rljob_operator.conftest import make_job


def pin_of(objects: list[Object]) -> Object:
    return child(objects, "ConfigMap", "test-pinned")


def changed(before: RLJob, after: RLJob, operator: ClusterConfig | None = None) -> set[str]:
    """Paths below kind/name that differ once `after` is rendered over what `before` is pinned to."""
    old = render(before)
    new = render(after, pinned=pin_of(old), config=operator or config())
    return {
        path
        for one, other in zip(old, new, strict=True)
        for path in differences(one, other, one["kind"])
    }


def differences(one: Any, other: Any, path: str) -> set[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {*one, *other}
        return {
            found
            for key in keys
            for found in differences(one.get(key), other.get(key), f"{path}.{key}")
        }
    return set() if one == other else {path}


versions = st.text("abcdef0123456789", min_size=1, max_size=8)
configs = st.builds(
    config,
    versions,
    image_pull_policy=st.sampled_from(["Always", "Never"]),
    image_pull_secrets=st.lists(versions, max_size=2, unique=True),
    operator_namespace=st.sampled_from(["rljob-system", "elsewhere"]),
    broker_url=st.sampled_from(["http://a:1", "http://b:2"]),
    storage_class=st.none() | st.just("fast"),
    artifacts_size=st.sampled_from(["1Gi", "2Gi"]),
)
shapes = st.builds(
    Shape, store=st.booleans(), pools=st.booleans(), rollouts=st.none() | st.integers(0, 9),
    trainer_attempt=st.none() | st.integers(1, 9), prepare_attempt=st.none() | st.integers(1, 9),
)  # fmt: skip


@settings(deadline=None)
@given(configs, shapes)
def test_an_operator_upgrade_changes_no_object_of_a_job(
    upgraded: ClusterConfig, shape: Shape
) -> None:
    job = make_job()
    pin = pin_of(render(job, shape))
    assert render(job, shape, pinned=pin, config=upgraded) == render(job, shape, pinned=pin)


def test_a_job_that_is_pinned_is_rendered_as_it_was_first() -> None:
    job = make_job()
    objects = render(job)
    assert render(job, pinned=pin_of(objects)) == objects


def test_a_new_attempt_after_an_upgrade_is_the_pinned_trainer() -> None:
    job = make_job()
    pin = pin_of(render(job, Shape()))
    trainer = child(render(job, UP, pinned=pin, config=config("2")), "Job", "test-trainer-1")
    assert trainer["spec"]["template"]["spec"]["containers"][0]["image"] == "rljob/trainer:1"


def test_replicas_follow_the_shape_of_a_pinned_job() -> None:
    job = make_job()
    more = Shape(store=True, rollouts=7)
    workload = child(render(job, more, pinned=pin_of(render(job))), "StatefulSet", "test-rollout")
    assert workload["spec"]["replicas"] == 7


POOL = {"name": "shells", "runtime": "simulated"}
ROLLOUT = {"groupSize": 4, "engine": {"kind": "simulated"}, "sampling": {"maxTokensPerTurn": 56}}
TEMPLATE = "StatefulSet.spec.template"
CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "sandboxPools.warm": ({"sandboxPools": [POOL | {"warm": 9}]}, {"SandboxPool.spec.warm"}),
    "sandboxPools.max": ({"sandboxPools": [POOL | {"max": 99}]}, {"SandboxPool.spec.max"}),
    "lifecycle": ({"lifecycle": {"backoffLimit": 9}}, set()),
    "suspend": ({"suspend": True}, set()),
    "rollout.replicas": ({"rollout": ROLLOUT | {"replicas": 5}}, set()),
    "rollout.minReplicas": ({"rollout": ROLLOUT | {"minReplicas": 1, "maxReplicas": 5}}, set()),
    "rollout.maxReplicas": ({"rollout": ROLLOUT | {"minReplicas": 1, "maxReplicas": 6}}, set()),
    "rollout.deadlines": (
        {"rollout": ROLLOUT | {"deadlines": {"drainSeconds": 500}}},
        {
            f"{TEMPLATE}.metadata.annotations.{labels.CONFIG_HASH}",
            f"{TEMPLATE}.spec.terminationGracePeriodSeconds",
        },
    ),
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_change_of_the_spec_reaches_exactly_the_fields_that_follow_it(key: str) -> None:
    spec, expected = CHANGES[key]
    found = changed(make_job(), make_job(**spec), config("2"))
    assert found == expected | {"ConfigMap.data.job.json"}


def test_every_key_that_may_change_is_tried_above() -> None:
    assert set(CHANGES) == set(MUTABLE_KEYS)


def test_what_may_not_change_is_not_taken_over_even_if_it_did() -> None:
    engine = {"kind": "simulated", "image": "example.invalid/other:9"}
    found = changed(make_job(), make_job(rollout=ROLLOUT | {"engine": engine}))
    assert {path for path in found if path.startswith("StatefulSet")} == {
        f"{TEMPLATE}.metadata.annotations.{labels.CONFIG_HASH}"
    }


def test_keys_that_only_the_operator_reads_restart_no_rollout() -> None:
    found = changed(make_job(), make_job(lifecycle={"progressDeadlineSeconds": 60}, suspend=True))
    assert found == {"ConfigMap.data.job.json"}


def test_the_pin_of_a_job_that_had_this_name_before_is_not_used() -> None:
    job = make_job()
    pin = pin_of(render(job))
    anew = render(job, pinned=pin, owner=owner(job, uid="another"), config=config("2"))
    trainer = child(anew, "Job", "test-trainer-1")["spec"]["template"]["spec"]
    assert trainer["containers"][0]["image"] == "rljob/trainer:2"


def test_no_secret_is_pinned() -> None:
    kept = pins.unpinned(pin_of(render(make_job())), owner(make_job()).uid)
    assert kept is not None
    assert {item["kind"] for item in kept.objects}.isdisjoint(pins.UNPINNED)


@pytest.mark.parametrize("data", ["", "!!", "AAAA"])
def test_a_pin_that_does_not_decode_is_named(data: str) -> None:
    job = make_job()
    pin = pin_of(render(job))
    pin["binaryData"] = {pins.KEY: data}
    with pytest.raises(CorruptError, match="ConfigMap test-pinned"):
        render(job, pinned=pin)


def test_a_rendering_that_fits_no_object_is_refused() -> None:
    import random

    noise = random.Random(1).randbytes(800_000).hex()
    job = make_job()
    item = {"kind": "ConfigMap", "metadata": {"name": "x", "labels": {}}, "data": {"x": noise}}
    with pytest.raises(ManifestError, match="KiB compressed"):
        pins.pin(Context(job, owner(job), config()), [item], "hash")


@pytest.mark.parametrize("field", pins.MUTABLE)
def test_every_field_of_the_table_exists_and_has_a_reason(field: pins.Mutable) -> None:
    found = [
        item
        for item in render(make_job())
        if (item["kind"], item["metadata"]["labels"][labels.COMPONENT])
        == (field.kind, field.component)
    ]
    assert field.why
    assert found
    for item in found:
        at: Any = item
        if "job.json" in field.path and item["metadata"]["name"] == "test-pinned":
            continue
        for key in field.path:
            at = at[key]
