"""The pool's pure parts: its size, its leases, what becomes of a sandbox, who comes first."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rljob.api.rljob_types import Recycle
from rljob_sandbox_pool.leases import Lease, Leases
from rljob_sandbox_pool.ready_queue import ReadyQueue
from rljob_sandbox_pool.reset import Fate, fate
from rljob_sandbox_pool.sizing import (
    Counts,
    backoff_seconds,
    evictions,
    num_missing,
    num_to_end,
    share,
    starts,
)

MAX_STARTING = 4


@pytest.mark.parametrize(
    ("counts", "warm", "maximum", "expected"),
    [
        (Counts(), 3, 10, 3),
        (Counts(), 100, 200, MAX_STARTING),
        (Counts(starting=2), 3, 10, 1),
        (Counts(ready=3), 3, 10, 0),
        (Counts(claimed=3), 3, 10, 3),
        (Counts(claimed=9), 3, 10, 1),
        (Counts(claimed=10), 3, 10, 0),
        (Counts(claimed=9, ending=1), 3, 10, 0),
        (Counts(resetting=3), 3, 10, 0),
        (Counts(waiting=2), 0, 10, 2),
        (Counts(waiting=2, resetting=2), 0, 10, 0),
        (Counts(), 0, 10, 0),
    ],
)
def test_starts(counts: Counts, warm: int, maximum: int, expected: int) -> None:
    found = starts({"": counts}, {"": warm}, maximum=maximum, max_starting=MAX_STARTING)
    assert len(found) == expected


some_counts = st.builds(Counts, *(st.integers(0, 30) for _ in range(7)))
some_images = st.dictionaries(st.sampled_from("abc"), some_counts, min_size=1)


def total(counts: dict[str, Counts]) -> Counts:
    return sum(counts.values(), Counts())


@given(some_images, st.integers(0, 40), st.integers(1, 40), st.integers(1, 50))
def test_never_more_than_the_maximum(
    counts: dict[str, Counts], warm: int, maximum: int, max_starting: int
) -> None:
    wanted = share(warm, dict.fromkeys(counts, 1))
    found = starts(counts, wanted, maximum=maximum, max_starting=max_starting)
    assert not found or total(counts).total + len(found) <= maximum
    assert not found or total(counts).starting + len(found) <= max_starting


def test_an_image_that_is_waited_for_is_started_before_one_to_spare() -> None:
    counts = {"a": Counts(), "b": Counts(waiting=1)}
    assert starts(counts, {"a": 3, "b": 0}, maximum=10, max_starting=2) == ["b", "a"]


def test_the_emptiest_image_is_filled_first() -> None:
    counts = {"a": Counts(ready=3), "b": Counts(ready=1)}
    assert starts(counts, {"a": 4, "b": 4}, maximum=10, max_starting=3) == ["b", "b", "a"]


@given(st.integers(0, 1000), st.dictionaries(st.text(), st.integers(1, 1000), min_size=1))
def test_shares_add_up_and_follow_the_weights(warm: int, weights: dict[str, int]) -> None:
    given = share(warm, weights)
    assert sum(given.values()) == warm
    for image, weight in weights.items():
        assert abs(given[image] - warm * weight / sum(weights.values())) < 1


@pytest.mark.parametrize(
    ("counts", "maximum", "expected"),
    [
        ({"a": Counts(ready=3)}, 3, {}),
        ({"a": Counts(ready=3)}, 1, {"a": 2}),
        ({"a": Counts(ready=3, waiting=1)}, 9, {"a": 1}),
        ({"a": Counts(ready=2), "b": Counts(waiting=1, claimed=1)}, 3, {"a": 1}),
        ({"a": Counts(ready=2), "b": Counts(waiting=1, claimed=1)}, 4, {}),
        ({"a": Counts(ready=2), "b": Counts(waiting=1, starting=1)}, 3, {}),
        ({"a": Counts(ready=1, ending=1), "b": Counts(waiting=1)}, 2, {}),
    ],
)
def test_idle_sandboxes_make_room(
    counts: dict[str, Counts], maximum: int, expected: dict[str, int]
) -> None:
    assert evictions(counts, maximum=maximum) == expected


@given(some_counts, st.integers(0, 40), st.integers(0, 30))
@example(Counts(ready=4, waiting=2), 1, 1)
@settings(max_examples=500)
def test_no_sandbox_is_ended_that_a_start_would_replace(
    counts: Counts, warm: int, idle: int
) -> None:
    if num := num_to_end(counts, warm=warm, idle=idle):
        assert num_missing(counts, warm=warm) == 0
        assert num_missing(replace(counts, ready=counts.ready - num), warm=warm) == 0


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


def nothing() -> None:
    """Nobody needs to know."""


async def test_who_waits_longest_is_served_first() -> None:
    queue: ReadyQueue[str] = ReadyQueue()
    tasks = [asyncio.create_task(queue.get(5, nothing)) for _ in range(3)]
    await asyncio.sleep(0)
    assert queue.num_waiting == 3
    for item in "abc":
        queue.put(item)
    assert await asyncio.gather(*tasks) == ["a", "b", "c"]
    assert (queue.num_ready, queue.num_waiting) == (0, 0)


async def test_who_gave_up_or_was_cancelled_gets_nothing_and_loses_nothing() -> None:
    queue: ReadyQueue[str] = ReadyQueue()
    assert await queue.get(0, nothing) is None
    assert await queue.get(0.01, nothing) is None
    task = asyncio.create_task(queue.get(5, nothing))
    await asyncio.sleep(0)
    queue.put("a")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await queue.get(0, nothing) == "a"


async def test_what_becomes_ready_while_a_claim_begins_to_wait_is_not_missed() -> None:
    queue: ReadyQueue[str] = ReadyQueue()
    assert await queue.get(5, lambda: queue.put("just in time")) == "just in time"


async def test_the_last_used_is_taken_and_the_oldest_is_offered_for_ending() -> None:
    queue: ReadyQueue[str] = ReadyQueue()
    for item in "abc":
        queue.put(item)
    assert await queue.get(0, nothing) == "c"
    assert queue.oldest(5) == ["a", "b"]
    queue.remove("a")
    assert queue.oldest(5) == ["b"]
