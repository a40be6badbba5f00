"""Pure parts of the pool manager in a cluster: how fast it starts, what it writes and when, what it is told."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.api.rljob_types import SandboxPoolSpec
from rljob.errors import MachineError
from rljob.kube.calls import MAX_CONNECTIONS
from rljob_sandbox_pool import cluster_config
from rljob_sandbox_pool.pool_conditions import is_due, refused, status
from rljob_sandbox_pool.runtimes.base import Trouble
from rljob_sandbox_pool.sizing import Counts
from rljob_sandbox_pool.starts import (
    LARGEST_BATCH,
    MAX_DELETIONS,
    MAX_IN_FLIGHT,
    SlowStart,
    StartBucket,
)

NOW = 1_800_000_000.0


def test_one_create_then_two_then_four_and_one_again_after_a_refusal() -> None:
    slow, batches = SlowStart(), []
    for _ in range(10):
        batches.append(room := slow.room)
        slow.begin(room)
        for _ in range(room):
            slow.succeeded()
    assert batches == [1, 2, 4, 8, 16, *[LARGEST_BATCH] * 5]
    assert slow.room == LARGEST_BATCH
    slow.begin(1)
    slow.failed()
    assert slow.room == 1


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.floats(0, 1)), max_size=60)
)
def test_all_pools_together_never_start_faster_than_the_rate(
    asks: list[tuple[str, int, float]],
) -> None:
    bucket, now, given = StartBucket(rate=10.0, burst=5), 0.0, 0
    for who, wanted, pause in asks:
        now += pause
        taken = bucket.take(who, wanted, now)
        assert 0 <= taken <= wanted
        given += taken
        for _ in range(taken):
            bucket.answered()
    assert given <= 5 + 10.0 * now + 1e-6


def test_a_large_pool_leaves_a_small_one_its_share() -> None:
    bucket, given, now = StartBucket(rate=50.0, burst=50), {"large": 0, "small": 0}, 0.0
    answered = 0
    while now < 2.0:
        given["large"] += bucket.take("large", 1000, now)
        if given["small"] < 20:
            given["small"] += bucket.take("small", 20 - given["small"], now)
        for _ in range(sum(given.values()) - answered):
            bucket.answered()
        answered = sum(given.values())
        now += 0.1
    assert given["small"] == 20
    assert given["large"] >= 80


def test_creates_that_are_not_answered_hold_up_the_next_ones() -> None:
    bucket = StartBucket(rate=1000.0, burst=1000)
    assert bucket.take("a", 1000, 0.0) == MAX_IN_FLIGHT
    assert MAX_IN_FLIGHT + MAX_DELETIONS < MAX_CONNECTIONS
    assert bucket.take("b", 1000, 1.0) == 0
    bucket.answered()
    assert bucket.take("b", 1000, 2.0) == 1


def written(counts: Counts, trouble: Trouble | None = None, **earlier: Any) -> dict[str, Any]:
    spec = SandboxPoolSpec(warm=3, max=5)
    return status(spec, counts, trouble, generation=7, earlier=earlier, now=NOW)


def conditions(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(c["type"], c["status"], c["reason"]) for c in found["conditions"]]


@pytest.mark.parametrize(
    ("counts", "trouble", "expected"),
    [
        (Counts(), None, [("Ready", "False", "Warming"), ("Degraded", "False", "AsExpected")]),
        (Counts(ready=3), None, [("Ready", "True", "Warm"), ("Degraded", "False", "AsExpected")]),
        (
            Counts(claimed=5),
            None,
            [("Ready", "True", "Warm"), ("Degraded", "False", "AsExpected")],
        ),
        (
            Counts(starting=3),
            Trouble("CapacityLimited", "no room"),
            [("Ready", "False", "Warming"), ("Degraded", "True", "CapacityLimited")],
        ),
    ],
)
def test_conditions(counts: Counts, trouble: Trouble | None, expected: object) -> None:
    found = written(counts, trouble)
    assert conditions(found) == expected
    assert found["observedGeneration"] == 7


def test_a_transitions_time_stays_while_nothing_changes() -> None:
    first = written(Counts(ready=3))
    spec = SandboxPoolSpec(warm=3, max=5)
    later = status(spec, Counts(ready=3), None, generation=7, earlier=first, now=NOW + 60)
    assert later == first
    changed = status(spec, Counts(ready=1), None, generation=7, earlier=first, now=NOW + 60)
    times = [each["lastTransitionTime"] for each in changed["conditions"]]
    assert times[0] > times[1] == first["conditions"][1]["lastTransitionTime"]


@pytest.mark.parametrize(
    ("before", "after", "age", "due"),
    [
        (Counts(ready=3), Counts(ready=3), 1000, False),
        (Counts(ready=3), Counts(ready=3, claimed=1), 4, False),
        (Counts(ready=3), Counts(ready=3, claimed=1), 6, True),
        (Counts(ready=3), Counts(ready=2), 1, False),
        (Counts(ready=3), Counts(ready=2), 3, True),
    ],
)
def test_when_a_status_is_written(before: Counts, after: Counts, age: float, due: bool) -> None:
    earlier = written(before)
    assert is_due(written(after, **earlier), earlier, age) is due


def test_a_refused_spec_keeps_the_counts() -> None:
    found = refused("spec.warm: no", generation=8, earlier={"ready": 2}, now=NOW)
    assert found["ready"] == 2
    assert conditions(found)[1] == ("Degraded", "True", "InvalidSpec")


def test_the_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("guest_image: a:1\nsandbox_image: b:1\nnamespaces: [x]\n")
    config = cluster_config.load(path)
    assert config.pods().guest_image == "a:1"
    assert (config.namespaces, config.port) == (["x"], 8080)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("guest_image: a:1", "missing required field `sandbox_image`"),
        ("guest_image: a:1\nsandbox_image: b:1\nextra: 1", "unknown field `extra`"),
        ("[", "pool.yaml: "),
    ],
)
def test_a_configuration_that_makes_no_sense_is_one_line(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    with pytest.raises(MachineError, match=words):
        cluster_config.load(path)
    with pytest.raises(MachineError, match="cannot be read"):
        cluster_config.load(tmp_path / "missing.yaml")


def test_keys_are_long_enough(tmp_path: Path) -> None:
    config = cluster_config.PoolManagerConfig(
        guest_image="a", sandbox_image="b", keys_path=str(tmp_path)
    )
    with pytest.raises(MachineError, match="cannot be read"):
        cluster_config.read_key(config, "pool_key")
    (tmp_path / "pool_key").write_text("short")
    with pytest.raises(MachineError, match="less than 16"):
        cluster_config.read_key(config, "pool_key")
    (tmp_path / "pool_key").write_text("long enough a key\n")
    assert cluster_config.read_key(config, "pool_key") == "long enough a key"
