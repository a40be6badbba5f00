"""What a pool does next: single decisions, and any of them."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_sandbox_pool.decide import Actions, End, Observed, Seen, Wanted, decide, yields
from rljob_sandbox_pool.leases import Lease
from rljob_sandbox_pool.member import MemberState as S


def boxes(*states: S, image: str = "a", **more: Any) -> list[Seen]:
    """Each younger than the one before."""
    return [
        Seen(f"{image}{nth}", image, state, since=90.0, born=float(nth), **more)
        for nth, state in enumerate(states)
    ]


def decided(sandboxes: list[Seen], *waiting: str, **more: Any) -> Actions:
    given = {"now": 100.0, "warm": 0, "maximum": 10, "max_starting": 4, "weights": {"a": 1}} | more
    claims = [Wanted(image) for image in waiting]
    return decide(Observed(sandboxes=sandboxes, waiting=claims, **given))


def ended(actions: Actions) -> list[str]:
    return sorted(end.id for end in actions.end)


@pytest.mark.parametrize(
    ("states", "warm", "waiting", "expected"),
    [
        ([], 3, 0, 3),
        ([], 10, 0, 4),
        ([S.STARTING] * 2, 3, 0, 1),
        ([S.READY] * 3, 3, 0, 0),
        ([S.CLAIMED] * 3, 3, 0, 3),
        ([S.CLAIMED] * 9, 3, 0, 1),
        ([S.CLAIMED] * 10, 3, 0, 0),
        ([S.CLAIMED] * 9 + [S.ENDING], 3, 0, 0),
        ([S.RESETTING] * 3, 3, 0, 0),
        ([], 0, 2, 2),
        ([S.RESETTING] * 2, 0, 2, 0),
        ([S.RESETTING] * 2, 1, 2, 1),
        ([S.READY] * 2, 2, 1, 1),
        ([S.QUARANTINED] * 3, 1, 0, 1),
        ([], 0, 0, 0),
    ],
)
def test_as_many_start_as_are_missing(
    states: list[S], warm: int, waiting: int, expected: int
) -> None:
    actions = decided(boxes(*states), *["a"] * waiting, warm=warm, quarantine_seconds=600.0)
    assert len(actions.start) == expected
    assert actions.end == []


def test_what_claims_wait_for_starts_first_then_the_emptiest_image() -> None:
    weights = {"a": 1, "b": 1, "c": 1}
    sandboxes = boxes(S.READY, image="a")
    actions = decided(sandboxes, "c", "b", warm=6, weights=weights, max_starting=6)
    assert actions.start == ["c", "b", "b", "c", "a", "b"]


def test_too_many_are_ended_kept_ones_first_then_unready_ones_then_the_newest() -> None:
    states = [S.READY, S.STARTING, S.READY, S.QUARANTINED, S.READY, S.CLAIMED, S.RESETTING]
    order = []
    for maximum in range(6, 1, -1):
        found = decided(boxes(*states), maximum=maximum, warm=2, quarantine_seconds=600.0)
        order += [box for box in ended(found) if box not in order]
    assert order == ["a3", "a1", "a4", "a2", "a0"]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([S.READY, S.READY], ["a1"]),
        ([S.READY, S.STARTING], ["a1"]),
        ([S.READY, S.QUARANTINED], ["a1"]),
        ([S.CLAIMED, S.RESETTING], []),
        ([S.READY, S.ENDING], []),
        ([S.READY], []),
    ],
)
def test_what_nobody_waits_for_makes_room_for_a_claim(states: list[S], expected: list[str]) -> None:
    weights, sandboxes = {"a": 1, "b": 1}, boxes(*states)
    found = decided(sandboxes, "b", maximum=2, warm=2, weights=weights, quarantine_seconds=600.0)
    assert ended(found) == expected
    assert found.start == (["b"] if len(states) < 2 else [])


def test_a_start_that_a_claim_waits_for_makes_room_for_no_other() -> None:
    weights = {"a": 1, "b": 1}
    assert ended(decided(boxes(S.STARTING), "a", "b", maximum=1, weights=weights)) == []
    assert ended(decided(boxes(S.STARTING), "b", maximum=1, weights=weights)) == ["a0"]


def test_a_spare_sandbox_takes_the_place_of_one_that_is_kept_and_of_no_other() -> None:
    found = decided(boxes(S.QUARANTINED, S.READY), maximum=2, warm=2, quarantine_seconds=600.0)
    assert ended(found) == ["a0"]


def test_one_kept_for_a_look_goes_when_its_time_is_over_or_there_are_many() -> None:
    kept = [
        Seen(str(since), "a", S.QUARANTINED, since=float(since), born=0.0)
        for since in range(90, 100)
    ]
    assert ended(decided(kept, maximum=20, quarantine_seconds=600.0)) == ["90", "91"]
    assert ended(decided(kept, maximum=20, quarantine_seconds=2.0)) == [
        str(n) for n in range(90, 99)
    ]


def test_of_idle_ones_beyond_warm_the_longest_unused_go() -> None:
    sandboxes = [
        Seen(str(idle), "a", S.READY, since=1000.0 - idle, born=0.0) for idle in (200, 130, 300, 5)
    ]
    assert ended(decided(sandboxes, now=1000.0, warm=2)) == ["200", "300"]


def test_what_was_made_from_an_earlier_spec_goes_unless_somebody_holds_it() -> None:
    states = [S.READY, S.STARTING, S.CLAIMED, S.RESETTING]
    assert ended(decided(boxes(*states, is_outdated=True))) == ["a0", "a1"]


def test_an_adopted_sandbox_is_left_alone_until_it_was_heard() -> None:
    unheard = boxes(S.STARTING, S.STARTING, is_unheard=True, is_outdated=True)
    assert ended(decided(unheard, "b", maximum=1, weights={"b": 1})) == []


def test_stuck_starts_are_held_and_ended_only_when_nobody_wants_them() -> None:
    stuck = boxes(S.STARTING, S.STARTING, is_stuck=True)
    held = decided(stuck, "a", warm=3)
    assert (held.start, held.end) == ([], [])
    assert ended(decided(stuck, "a")) == ["a1"]
    other = decided([*stuck, *boxes(S.READY, image="b")], warm=4, weights={"a": 1, "b": 1})
    assert (other.start, ended(other)) == (["b"], [])


def test_after_a_failure_an_image_waits_and_then_tries_one_at_a_time() -> None:
    weights = {"a": 1, "b": 1}
    backing_off = decided([], "a", warm=4, weights=weights, failing={"a": 101.0})
    assert backing_off.start == ["b", "b"]
    assert decided([], "a", warm=4, failing={"a": 99.0}).start == ["a"]
    assert decided(boxes(S.STARTING), "a", warm=4, failing={"a": 99.0}).start == []


def test_what_another_job_has_used_is_not_on_its_way_to_a_claim() -> None:
    back = boxes(S.RESETTING, S.RESETTING, job="j")
    for job, expected in (("j", []), ("k", ["a"])):
        seen = Observed(100.0, 0, 10, 4, {"a": 1}, back, [Wanted("a", job)])
        assert decide(seen).start == expected


LONG_AGO, JUST_NOW = 90.0, 99.5
BACK = Seen("back", "a", S.RESETTING, since=99.0, born=10.0, job="j", grown=11.0)


def is_to_yield(*waiting: Wanted, others: list[Seen] | None = None, **more: Any) -> bool:
    """The sandbox `back` of a full pool."""
    others = boxes(S.CLAIMED) if others is None else others
    given = {"weights": {"a": 1, "b": 1}, "maximum": 2, "sandboxes": [*others, BACK]} | more
    return yields(Observed(100.0, 0, max_starting=4, waiting=waiting, **given), BACK)


@pytest.mark.parametrize(
    "other", [Wanted("b", "j", since=LONG_AGO), Wanted("a", "k", since=LONG_AGO)]
)
def test_who_waits_for_long_for_another_image_or_job_is_not_passed_over(other: Wanted) -> None:
    own = Wanted("a", "j", since=JUST_NOW)
    assert is_to_yield(other, own)
    assert is_to_yield(other)
    assert not is_to_yield(own, other)
    assert not is_to_yield(other._replace(since=JUST_NOW), own)
    assert not is_to_yield(other._replace(since=JUST_NOW))
    assert is_to_yield(other._replace(since=JUST_NOW, priority=1), own)
    assert not is_to_yield(own)


def test_nothing_makes_room_for_who_gets_another_place_or_cannot_have_one() -> None:
    other = Wanted("b", "k", since=LONG_AGO)
    assert not is_to_yield(other, maximum=3)
    assert is_to_yield(other, other, maximum=3)
    for state in (S.STARTING, S.RESETTING):
        assert not is_to_yield(other, others=boxes(state, image="b"))
        assert is_to_yield(other, other, others=boxes(state, image="b"))
    for state in (S.READY, S.QUARANTINED, S.ENDING):
        assert not is_to_yield(other, others=boxes(state))
    assert is_to_yield(other, others=boxes(S.RESETTING, image="b", job="j"))
    assert not is_to_yield(other, weights={"a": 1})
    assert not is_to_yield(other, failing={"b": 101.0})
    assert is_to_yield(other, failing={"b": 99.0})
    assert not is_to_yield(other, other, failing={"b": 99.0}, others=boxes(S.STARTING, image="b"))
    assert not is_to_yield(other, other, others=boxes(S.STARTING, image="b", is_stuck=True))


@pytest.mark.parametrize(
    ("start_seconds", "age", "expected"),
    [(0.1, 0.3, False), (0.1, 0.5, True), (60.0, 9.9, False), (60.0, 10.1, True)],
)
def test_a_sandbox_makes_room_only_after_its_start_has_paid(
    start_seconds: float, age: float, expected: bool
) -> None:
    grown = 100.0 - age
    box = BACK._replace(born=grown - start_seconds, grown=grown)
    waiting = [Wanted("b", since=LONG_AGO)]
    seen = Observed(100.0, 0, 1, 4, {"a": 1, "b": 1}, [box], waiting)
    assert yields(seen, box) is expected


def test_a_claim_whose_time_is_over_ends_its_sandbox() -> None:
    lease = Lease("c", "a0", expires=99.0, answer=b"")
    actions = decided(boxes(S.CLAIMED), expired=[lease])
    assert actions.expire == [lease]
    assert actions.end == [End("a0", "the claim's time to live is over")]


images = st.sampled_from("abc")
times = st.floats(0, 1000, allow_nan=False)
jobs = st.sampled_from(["", "j", "k"])
some_claim = st.builds(Wanted, images, jobs, st.sampled_from([0, 10]), times)


@st.composite
def some_sandbox(draw: st.DrawFn) -> Seen:
    state = draw(st.sampled_from(S))
    is_starting = state is S.STARTING
    is_stuck = is_starting and draw(st.booleans())
    return Seen(
        id=draw(st.uuids()).hex,
        image=draw(images),
        state=state,
        since=draw(times),
        born=draw(times),
        is_outdated=draw(st.booleans()),
        is_stuck=is_stuck,
        is_unheard=is_starting and not is_stuck and draw(st.booleans()),
        job="" if is_starting else draw(jobs),
        grown=draw(times),
    )


some_pool = st.builds(
    Observed,
    now=st.just(1000.0),
    warm=st.integers(0, 12),
    maximum=st.integers(1, 12),
    max_starting=st.integers(1, 6),
    weights=st.dictionaries(images, st.integers(1, 5), min_size=1),
    sandboxes=st.lists(some_sandbox(), max_size=14),
    waiting=st.lists(some_claim, max_size=6),
    failing=st.dictionaries(images, times.map(lambda at: at + 500)),
    quarantine_seconds=st.sampled_from([0.0, 300.0]),
)


@given(some_pool)
@settings(max_examples=300, deadline=None)
def test_whatever_is_seen_no_bound_is_broken_and_nobody_loses_what_is_held(seen: Observed) -> None:
    actions = decide(seen)
    by_id = {each.id: each for each in seen.sandboxes}
    assert len(actions.end) == len(set(actions.end))
    for end in actions.end:
        box = by_id[end.id]
        assert box.state in (S.READY, S.STARTING, S.QUARANTINED)
        assert not box.is_unheard
    if actions.start:
        assert len(seen.sandboxes) + len(actions.start) <= seen.maximum
        starting = sum(each.state is S.STARTING for each in seen.sandboxes)
        assert starting + len(actions.start) <= seen.max_starting
    assert set(actions.start) <= set(seen.weights)
    assert not any(seen.failing.get(image, 0.0) > seen.now for image in actions.start)


@given(some_pool, some_sandbox())
@settings(max_examples=300, deadline=None)
def test_the_place_of_one_that_yields_goes_to_a_claim_that_it_did_not_fit(
    seen: Observed, box: Seen
) -> None:
    box = box._replace(state=S.RESETTING, is_outdated=False)
    others = [each for each in seen.sandboxes if each.state in (S.CLAIMED, S.RESETTING)]
    full = dataclasses.replace(
        seen, sandboxes=[*others, box], maximum=len(others) + 1, max_starting=len(others) + 1
    )
    if yields(full, box):
        start = decide(dataclasses.replace(full, sandboxes=others)).start
        before = itertools.takewhile(lambda claim: not claim.fits(box), seen.waiting)
        assert start[0] in {claim.image for claim in before}


def steps(seen: Observed, num: int) -> list[Actions]:
    """What is decided, and done at once, so many times, five seconds apart."""
    found, sandboxes = [], list(seen.sandboxes)
    for step in range(num):
        now = seen.now + 5.0 * step
        actions = decide(dataclasses.replace(seen, sandboxes=sandboxes, now=now))
        gone = {end.id for end in actions.end}
        sandboxes = [
            each._replace(state=S.READY) if each.state is S.STARTING and not each.is_stuck else each
            for each in sandboxes
            if each.id not in gone and each.state is not S.ENDING
        ]
        sandboxes += [
            Seen(f"{step}.{nth}", image, S.STARTING, since=now, born=now)
            for nth, image in enumerate(actions.start)
        ]
        found.append(actions)
    return found


@given(some_pool)
@settings(max_examples=100, deadline=None)
def test_without_failures_it_comes_to_rest(seen: Observed) -> None:
    """Nobody takes what becomes ready here, so claims that wait only make it look for more."""
    calm = dataclasses.replace(seen, waiting=(), failing={}, warm=min(seen.warm, seen.maximum))
    *_, last = steps(calm, 40)
    assert (last.start, last.end) == ([], [])
