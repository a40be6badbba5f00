"""How many rollout pods a job should have."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_operator.observed import ChildKey, LedgerView
from rljob_operator.policies.autoscale import Advice, Bounds, Look, Memory, advise
from tests.unit.rljob_operator.fake_cluster import FakeCluster, report, running, snapshot

BOUNDS = Bounds(1, 8)
STARVED: dict[str, Any] = {"waits": 0.5}
FLOODED: dict[str, Any] = {"waits": 0.0, "ready_groups": 4}
HELD: dict[str, Any] = {"waits": 0.0, "held_back": True}
BUSY: dict[str, Any] = {"waits": 0.1}


def watch(
    looks: list[dict[str, Any]], current: int = 2, bounds: Bounds = BOUNDS, seconds: float = 60.0
) -> tuple[list[int], Advice]:
    """The number after each look, `seconds` apart; all pods become ready at once."""
    memory, now, waited, numbers = Memory(), 0.0, 0.0, [current]
    advice = Advice(memory, current)
    for fields in [{"waits": 0.0}, *looks]:
        now, waited = now + seconds, waited + seconds * fields["waits"]
        more = {key: value for key, value in fields.items() if key != "waits"}
        base: dict[str, Any] = {
            "now_seconds": now, "waiting_seconds": waited, "incarnation": 1, "ready_groups": 0, "groups_per_step": 4,
            "held_back": False, "ready_replicas": numbers[-1],
        }  # fmt: skip
        advice = advise(advice.memory, Look(**(base | more)), numbers[-1], bounds)
        numbers.append(advice.desired)
    return numbers[2:], advice


@pytest.mark.parametrize(
    ("looks", "numbers"),
    [
        ([STARVED], [2]),
        ([STARVED, STARVED], [2, 4]),
        ([STARVED, BUSY, STARVED], [2, 2, 2]),
        ([STARVED, STARVED, STARVED, STARVED], [2, 4, 4, 8]),
        ([{"waits": 0.3}, {"waits": 0.3}], [2, 3]),
        ([STARVED | {"held_back": True}] * 4, [2] * 4),
        ([STARVED | {"ready_groups": 4}] * 4, [2] * 4),
        ([STARVED | {"ready_replicas": 1}] * 4, [2] * 4),
        ([FLOODED] * 3, [2] * 3),
        ([FLOODED] * 4, [2, 2, 2, 1]),
        ([HELD] * 4, [2, 2, 2, 1]),
        ([BUSY] * 9, [2] * 9),
        ([FLOODED, FLOODED, FLOODED, BUSY, FLOODED], [2] * 5),
        ([STARVED, {"waits": 0.5, "incarnation": 2}, STARVED], [2, 2, 2]),
    ],
)
def test_looks_in_a_row_change_the_number(looks: list[dict[str, Any]], numbers: list[int]) -> None:
    assert watch(looks)[0] == numbers


def test_looks_that_are_too_near_each_other_do_not_count() -> None:
    assert watch([STARVED] * 3, seconds=5.0)[0] == [2, 2, 2]


def test_it_says_why() -> None:
    assert (
        watch([STARVED] * 2)[1].why
        == "the trainer waited for 50% of the time, 0 of 4 groups are ready"
    )
    assert "staleness bound" in watch([HELD] * 4)[1].why
    assert watch([BUSY])[1].why == ""


def test_after_a_change_down_nothing_goes_down_for_five_minutes() -> None:
    numbers, _ = watch([FLOODED] * 9, current=4)
    assert numbers == [4, 4, 4, 3, 3, 3, 3, 3, 2]


def test_new_bounds_hold_at_once() -> None:
    advice = advise(Memory(), None, 9, Bounds(2, 5))
    assert (advice.desired, advice.why) == (5, "minReplicas is 2, maxReplicas 5")
    assert advise(Memory(), None, 3, Bounds(2, 5)).desired == 3


LOOK = st.fixed_dictionaries(
    {
        "waits": st.floats(0, 1),
        "ready_groups": st.integers(0, 8),
        "held_back": st.booleans(),
        "ready_replicas": st.integers(0, 12),
        "incarnation": st.integers(1, 2),
    }
)


@settings(max_examples=200, deadline=None)
@given(looks=st.lists(LOOK, max_size=40), low=st.integers(1, 5), more=st.integers(0, 7))
def test_the_number_keeps_its_bounds_and_never_more_than_doubles(
    looks: list[dict[str, Any]], low: int, more: int
) -> None:
    bounds = Bounds(low, low + more)
    numbers, _ = watch(looks, current=low, bounds=bounds)
    for before, after in zip([low, *numbers], numbers, strict=False):
        assert bounds.minimum <= after <= bounds.maximum
        assert after <= max(before + 1, 2 * before)


@settings(max_examples=100, deadline=None)
@given(looks=st.lists(LOOK, min_size=4, max_size=40))
def test_two_changes_are_never_within_the_pause(looks: list[dict[str, Any]]) -> None:
    numbers, _ = watch(looks, current=4, seconds=30.0)
    changes = [i for i, (a, b) in enumerate(zip([4, *numbers], numbers, strict=False)) if a != b]
    assert all((b - a) * 30.0 >= 90.0 for a, b in itertools.pairwise(changes))


def test_memory_is_plain_data() -> None:
    memory = watch([STARVED])[1].memory
    assert msgspec.convert(msgspec.to_builtins(memory), Memory) == memory


# ── in a job ──


def look(cluster: FakeCluster, waited: float, waits_for: str = "") -> None:
    reports = {"trainer": report(seconds_waiting=waited), "worker-0": report(waits_for)}
    cluster.ledger = LedgerView(snapshot=snapshot(1, reports=reports))
    cluster.run(2)


def test_a_starved_job_gets_more_rollouts_within_its_bounds_and_says_so() -> None:
    cluster = running(rollout={"minReplicas": 1, "maxReplicas": 3})
    assert cluster.status["rollouts"]["desired"] == 1
    for minute in range(12):
        look(cluster, 50.0 * minute)
        cluster.now += 60
    assert cluster.status["rollouts"]["desired"] == 3
    assert len(cluster.of("rollout")) == 3
    scaled = [event for event in cluster.events if event.reason == "RolloutsScaled"]
    assert [event.message.partition(":")[0] for event in scaled] == ["1 → 2", "2 → 3"]


def test_a_job_without_bounds_has_as_many_as_the_manifest_says() -> None:
    cluster = running()
    cluster.resource["spec"]["rollout"]["replicas"] = 2
    cluster.run(3)
    assert len(cluster.of("rollout")) == 2
    assert "autoscale" not in cluster.status


def test_the_number_survives_a_suspension() -> None:
    cluster = running(rollout={"minReplicas": 1, "maxReplicas": 2})
    for minute in range(6):
        look(cluster, 50.0 * minute)
        cluster.now += 60
    assert cluster.status["rollouts"]["desired"] == 2
    cluster.resource["spec"]["suspend"] = True
    cluster.run(4)
    assert cluster.phase == "Suspended"
    cluster.resource["spec"]["suspend"] = False
    cluster.run(4)
    assert cluster.status["rollouts"]["desired"] == 2


def test_replicas_that_a_horizontal_pod_autoscaler_decides_are_left_to_it() -> None:
    cluster = running()
    sts = cluster.children[ChildKey("StatefulSet", "j-rollout")]
    sts["spec"]["replicas"] = 4
    sts["metadata"]["managedFields"] = [
        {
            "manager": "kube-controller-manager",
            "subresource": "scale",
            "fieldsV1": {"f:spec": {"f:replicas": {}}},
        }
    ]
    assert cluster.step().shape.rollouts == 4
    assert cluster.status["rollouts"]["desired"] == 4
