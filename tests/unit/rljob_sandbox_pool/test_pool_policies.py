"""The pool's pure parts: its size, its leases, what becomes of a sandbox. The whole is in test_decide."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rljob.api.rljob_types import Recycle
from rljob_sandbox_pool.leases import Lease, Leases
from rljob_sandbox_pool.reset import Fate, fate, quarantine_seconds
from rljob_sandbox_pool.sizing import (
    Counts,
    num_not_needed,
    num_spare_missing,
    num_to_end,
    share,
)
from rljob_sandbox_pool.starts import Failures, backoff_seconds


@given(st.integers(0, 1000), st.dictionaries(st.text(), st.integers(1, 1000), min_size=1))
def test_shares_add_up_and_follow_the_weights(warm: int, weights: dict[str, int]) -> None:
    given = share(warm, weights)
    assert sum(given.values()) == warm
    for image, weight in weights.items():
        assert abs(given[image] - warm * weight / sum(weights.values())) < 1


some_counts = st.builds(Counts, *(st.integers(0, 30) for _ in range(7)))


@given(some_counts, st.integers(0, 40), st.integers(0, 30))
@example(Counts(ready=4, waiting=2), 1, 1)
@settings(max_examples=500)
def test_no_sandbox_is_ended_that_a_start_would_replace(
    counts: Counts, warm: int, idle: int
) -> None:
    if num := num_to_end(counts, warm=warm, idle=idle):
        left = replace(counts, ready=counts.ready - num)
        assert num_spare_missing(left, warm=warm) == 0
    if num := num_not_needed(counts, warm=warm):
        assert num_spare_missing(counts, warm=warm) == 0
        assert counts.coming - num >= counts.waiting


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0.0), (1, 0.25), (2, 0.5), (4, 2.0), (20, 30.0), (10**9, 30.0)]
)
def test_backoff_doubles_up_to_a_bound(failures: int, seconds: float) -> None:
    assert backoff_seconds(failures) == seconds


@pytest.mark.parametrize(
    ("recycle", "uses", "broken", "expected"),
    [
        (Recycle(), 1, False, Fate.RESET),
        (Recycle(), 1, True, Fate.REPLACE),
        (Recycle(), 50, False, Fate.RESET),
        (Recycle(), 51, False, Fate.REPLACE),
        (Recycle(strategy="reset", max_reuses=2), 3, False, Fate.REPLACE),
        (Recycle(strategy="recreate"), 1, False, Fate.REPLACE),
    ],
)
def test_fates(recycle: Recycle, uses: int, broken: bool, expected: Fate) -> None:
    assert fate(recycle, uses=uses, broken=broken) is expected


class Clock:
    """Stands still."""

    def __init__(self) -> None:
        self.time = 5.0

    def monotonic(self) -> float:
        return self.time


def lease(claim: str, expires: float) -> Lease:
    return Lease(claim_id=claim, sandbox_id=f"box-of-{claim}", expires=expires, answer=b"")


def test_leases_expire_by_the_monotonic_clock() -> None:
    clock = Clock()
    leases = Leases(clock)
    leases.add(lease("a", 15))
    leases.add(lease("b", 25))
    assert leases.expired() == []
    clock.time = 15.0
    assert [each.claim_id for each in leases.expired()] == ["a"]
    assert leases.remove("a")
    assert leases.remove("a") is None
    assert leases.remove_sandbox("box-of-b")
    assert len(leases) == 0


def test_starts_that_were_under_way_together_are_one_failure_in_a_row() -> None:
    failures = Failures("no memory", now=10.0)
    for _ in range(3):
        failures.add("no memory", began=9.0, now=10.0)
    assert (failures.num, failures.no_start_before) == (1, 10.25)
    failures.add("no disk", began=11.0, now=12.0)
    assert (failures.num, failures.no_start_before, failures.problem) == (2, 12.5, "no disk")


@pytest.mark.parametrize(("given", "seconds"), [(None, 600.0), (0, 0.0), (5, 5.0)])
def test_a_sandbox_that_did_not_verify_is_kept_ten_minutes_unless_told_otherwise(
    given: int | None, seconds: float
) -> None:
    assert quarantine_seconds(Recycle(quarantine_seconds=given)) == seconds
