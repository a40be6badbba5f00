"""How many sandboxes a job needs: a table, and properties that hold whatever the numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob.api.rljob_types import RLJob
from rljob.errors import ManifestError
from rljob_operator.policies.amounts import Amounts
from rljob_operator.policies.sandbox_needs import (
    MAX_WEIGHT,
    Needs,
    RowCount,
    apportion,
    needs,
    num_at_once,
    weights,
)
from tests.unit.rljob_operator.conftest import make_job

COUNTS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 10**7), min_size=1)


def job(*pools: dict[str, Any], episodes: int = 64, group: int = 8, **spec: Any) -> RLJob:
    """A job with one task per pool, both of one name."""
    given = [{"name": "p", **pool} if "name" not in pool else pool for pool in pools or ({},)]
    tasks = [
        {"name": p["name"], "type": "shell_files", "sandbox": {"pool": p["name"]}} for p in given
    ]
    rollout = {"groupSize": group, "maxConcurrentEpisodes": episodes}
    return make_job(**{"tasks": tasks, "sandboxPools": given, "rollout": rollout} | spec)


def rows(**counts: int) -> list[RowCount]:
    """Task → rows without an image of their own."""
    return [RowCount(task, None, number) for task, number in counts.items()]


def one(found: Needs) -> Any:
    (pool,) = found.pools
    return pool


def test_the_only_pool_of_a_job_may_be_wanted_by_every_episode() -> None:
    pool = one(needs(job({"warm": 8, "max": 72}), rows(p=1000)))
    assert (pool.at_once, pool.proposed_warm, pool.proposed_max, pool.at_most) == (64, 8, 72, 72)


@pytest.mark.parametrize(
    ("pool", "reward", "warm", "most"),
    [
        ({}, {}, 8, 72),
        ({"recycle": {"strategy": "recreate"}}, {}, 8, 80),
        ({}, {"freshSandbox": True}, 16, 80),
        ({"recycle": {"strategy": "recreate"}}, {"freshSandbox": True}, 16, 88),
    ],
)
def test_what_is_replaced_and_what_is_claimed_twice_needs_more_places(
    pool: dict[str, Any], reward: dict[str, Any], warm: int, most: int
) -> None:
    task = {"name": "p", "type": "shell_files", "sandbox": {"pool": "p"}, "reward": reward}
    found = one(needs(job(pool, tasks=[task]), rows(p=1000)))
    assert (found.proposed_warm, found.proposed_max) == (warm, most)


@pytest.mark.parametrize(("given", "waiting"), [(16, 48), (63, 1)])
def test_a_max_below_what_runs_at_once_does_not_fit(given: int, waiting: int) -> None:
    (problem,) = needs(job({"max": given}), rows(p=1000)).problems
    assert str(problem) == (
        f"spec.sandboxPools[0].max: {given} is below the 64 sandboxes that maxConcurrentEpisodes 64 can use at once: "
        f"{waiting} would wait; set 72, or lower maxConcurrentEpisodes"
    )


def test_a_share_per_job_below_what_runs_at_once_does_not_fit() -> None:
    (problem,) = needs(job({"max": 100, "maxPerJob": 32}), rows(p=1000)).problems
    assert str(problem).startswith("spec.sandboxPools[0].maxPerJob: 32 is below the 64 sandboxes")


def test_what_fits_is_not_called_a_problem() -> None:
    assert needs(job({"max": 64}), rows(p=1000)).problems == ()


@pytest.mark.parametrize(
    ("mode", "found"), [("eval", (10, 2)), ("rollout", (40, 8)), ("train", (64, 8))]
)
def test_only_training_comes_back_to_its_rows(mode: str, found: tuple[int, int]) -> None:
    validation = {"source": "recipe://quickstart", "samplesPerPrompt": 2}
    data = {"validation": validation} if mode == "eval" else {"train": {"source": "file://x"}}
    need = needs(job(mode=mode, data=data), rows(p=5))
    assert (need.episodes, need.group) == found


def test_rows_name_images_and_pools_get_them_by_weight() -> None:
    images = [{"image": "a"}, {"image": "b"}]
    counts = [RowCount("p", "a", 30), RowCount("p", "b", 10), RowCount("p", None, 50)]
    found = one(needs(job({"max": 72, "warm": 8, "images": images}), counts))
    assert [(each.image, each.rows, each.weight, each.warm, each.at_most) for each in found.images] == [
        ("a", 80, 8, 7, 64),
        ("b", 10, 1, 1, 8),
    ]  # fmt: skip
    assert needs(job({"max": 72, "warm": 8, "images": images}), counts).problems == ()


def test_a_tasks_own_image_is_that_of_rows_without_one() -> None:
    task = {"name": "p", "type": "shell_files", "sandbox": {"pool": "p", "image": "b"}}
    pool = {"max": 99, "images": [{"image": "a"}, {"image": "b"}]}
    found = needs(job(pool, tasks=[task]), rows(p=4))
    assert [(each.image, each.rows) for each in one(found).images] == [("a", 0), ("b", 4)]
    assert [str(problem) for problem in found.problems] == [
        "spec.sandboxPools[0].images: a: no row names it; remove it"
    ]


def test_images_that_no_pool_has_are_named_and_proposed() -> None:
    counts = [RowCount("p", f"i{number}", number + 1) for number in range(5)]
    found = needs(job({"max": 99, "images": [{"image": "i0"}]}), counts)
    assert str(found.problems[0]).startswith(
        "spec.sandboxPools[0].images: lacks i4, i3, i2 and 1 more, named by 14 of its rows"
    )
    assert {each.image: each.weight for each in one(found).images if each.weight} == {
        f"i{number}": number + 1 for number in range(5)
    }


def test_a_pool_without_images_has_none_that_rows_may_name() -> None:
    found = needs(job({"max": 99}), [RowCount("p", "a", 3), *rows(p=2)])
    assert [(each.image, each.rows, each.listed) for each in one(found).images] == [
        (None, 2, True),
        ("a", 3, False),
    ]
    assert "lacks a, named by 3 of its rows" in str(found.problems[0])


def test_more_images_than_a_pool_may_have_need_more_pools() -> None:
    counts = [RowCount("p", f"i{number:02}", 1) for number in range(70)]
    images = [{"image": f"i{number:02}"} for number in range(32)]
    problems = [str(one) for one in needs(job({"max": 999, "images": images}), counts).problems]
    assert (
        "spec.sandboxPools[0].images: would be 70, and a pool has at most 32; spread the tasks over 3 pools"
        in problems
    )


def test_two_pools_share_the_episodes_with_room_for_chance() -> None:
    found = needs(
        job({"name": "a", "max": 999}, {"name": "b", "max": 999}, episodes=640), rows(a=900, b=100)
    )
    assert [pool.at_once for pool in found.pools] == [640, 136]


def test_a_pool_that_no_row_uses_needs_nothing() -> None:
    found = needs(job({"name": "a", "max": 99}, {"name": "b", "max": 99}), rows(a=10))
    assert [(pool.at_once, pool.proposed_warm) for pool in found.pools] == [(64, 8), (0, 0)]


def test_where_rows_cannot_be_read_every_pool_may_be_wanted_by_all() -> None:
    found = needs(job({"name": "a", "max": 99}, {"name": "b", "max": 99}), None)
    assert [pool.at_once for pool in found.pools] == [64, 64]
    assert found.problems == ()


def test_a_sandbox_asks_for_what_its_pod_asks_for() -> None:
    plain = one(needs(job({}), rows(p=1)))
    assert plain.requests == Amounts(cpu_millis=50, memory_mib=128, disk_mib=64)
    assert plain.limits == Amounts(cpu_millis=2000, memory_mib=512 + 2 * 64 + 16 + 64, disk_mib=128)
    own = one(needs(job({"resources": {"limits": {"cpu": "1500m", "memory": "2Gi"}}}), rows(p=1)))
    assert own.requests == own.limits == Amounts(cpu_millis=1500, memory_mib=2048)


def test_all_pools_are_added_up() -> None:
    pools = ({"name": "a", "max": 10, "warm": 2}, {"name": "b", "max": 20, "warm": 2})
    found = needs(job(*pools), rows(a=50, b=50))
    assert (found.pods, found.requests) == (30, Amounts(cpu_millis=50, memory_mib=128, disk_mib=64) * 30)  # fmt: skip


def test_a_quantity_that_is_none_is_refused_with_its_path() -> None:
    with pytest.raises(ManifestError, match=r"spec\.sandboxPools\[0\]\.resources\.limits\.memory"):
        needs(job({"resources": {"limits": {"memory": "2Gx"}}}), None)


@given(COUNTS)
def test_weights_are_small_whole_numbers_in_the_order_of_the_rows(counts: dict[str, int]) -> None:
    found = weights({**counts})
    assert found.keys() == counts.keys()
    assert all(1 <= weight <= MAX_WEIGHT for weight in found.values())
    in_order = [found[image] for image in sorted(counts, key=lambda image: counts[image])]
    assert in_order == sorted(in_order)


@given(st.integers(0, 10_000), COUNTS)
def test_nothing_is_lost_or_made_by_sharing_out(total: int, counts: dict[str, int]) -> None:
    found = apportion(total, {**counts})
    whole = sum(counts.values())
    assert sum(found.values()) == total
    for image, number in found.items():
        assert abs(number - total * counts[image] / whole) < 1


@given(st.integers(1, 100_000), st.integers(1, 1024), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_never_needs_less_and_none_more_than_all(
    episodes: int, group: int, share: float, other: float
) -> None:
    small, large = sorted((share, other))
    most = num_at_once(episodes, group, large)
    assert num_at_once(episodes, group, 1.0) == episodes
    assert 0 <= most <= episodes
    assert num_at_once(episodes, group, small) <= most
    assert most >= min(episodes, int(episodes * large))


@given(
    st.integers(1, 400),
    st.integers(1, 16),
    st.booleans(),
    st.lists(st.integers(0, 500), min_size=2, max_size=2),
)
def test_what_is_proposed_fits_when_it_is_taken(
    episodes: int, group: int, recreate: bool, counts: list[int]
) -> None:
    """Proposals are a fixed point: nothing is wrong with them, and they are proposed again."""
    strategy = {"recycle": {"strategy": "recreate" if recreate else "reset"}}
    known = rows(a=counts[0], b=counts[1])
    made = job(
        *({"name": name, "warm": 0, "max": 1, **strategy} for name in "ab"),
        episodes=max(episodes, group),
        group=group,
    )
    proposed = needs(made, known).pools
    better = job(
        *(
            {"name": pool.name, "warm": pool.proposed_warm, "max": pool.proposed_max, **strategy}
            for pool in proposed
        ),
        episodes=max(episodes, group),
        group=group,
    )
    again = needs(better, known)
    assert again.problems == ()
    assert [(pool.proposed_warm, pool.proposed_max) for pool in again.pools] == [
        (pool.warm, pool.max) for pool in again.pools
    ]
    assert all(pool.at_most <= pool.max for pool in again.pools)
