import asyncio
import itertools

import pytest

from rljob.errors import InfraError
from rljob.testing.clock import ScaledClock
from rljob_operator.wake import GONE, LONGEST_PAUSE_SECONDS, Wakes


@pytest.fixture
async def wakes():
    made = Wakes(ScaledClock(1000), gap_seconds=1)
    yield made
    await made.aclose(1)


async def until(true, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.001)


async def test_what_was_woken_before_the_start_is_looked_at_then(wakes):
    seen = []

    async def one_pass(uid):
        seen.append(uid)

    wakes.wake("a")
    await asyncio.sleep(0.01)
    assert not seen
    wakes.start(one_pass)
    await until(lambda: seen == ["a"])


async def test_wakes_during_a_pass_lead_to_one_more_and_passes_never_overlap(wakes):
    running, passes, go_on = 0, 0, asyncio.Event()

    async def one_pass(uid):
        nonlocal running, passes
        running += 1
        passes += 1
        assert running == 1
        await go_on.wait()
        running -= 1

    wakes.start(one_pass)
    wakes.wake("a")
    await until(lambda: passes == 1)
    for _ in range(10):
        wakes.wake("a")
    go_on.set()
    await until(lambda: passes == 2)
    await asyncio.sleep(0.05)
    assert passes == 2


async def test_a_pass_looks_again_when_it_asked_to(wakes):
    passes = itertools.count()

    async def one_pass(uid):
        return 0.01 if next(passes) < 3 else None

    wakes.start(one_pass)
    wakes.wake("a")
    await until(lambda: passes.__reduce__()[1][0] == 4)


async def test_failures_pause_longer_each_time_up_to_a_bound_and_wakes_do_not_hurry_them():
    times, clock = [], ScaledClock(10_000)
    wakes = Wakes(clock, gap_seconds=0)

    async def one_pass(uid):
        times.append(clock.monotonic())
        wakes.wake("a")
        raise InfraError("away")

    wakes.start(one_pass)
    wakes.wake("a")
    await until(lambda: len(times) == 9)
    await wakes.aclose(1)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert all(
        pause >= least for pause, least in zip(pauses, [1, 2, 4, 8, 16, 32, 60, 60], strict=True)
    )
    assert LONGEST_PAUSE_SECONDS == 60


async def test_a_fault_in_one_pass_leaves_the_others_and_is_tried_again(wakes):
    seen = []

    async def one_pass(uid):
        seen.append(uid)
        if uid == "bad":
            raise ValueError("a bug")

    wakes.start(one_pass)
    wakes.wake("bad")
    await until(lambda: seen.count("bad") >= 2)
    wakes.wake("good")
    await until(lambda: "good" in seen)


async def test_an_object_that_is_gone_leaves_nothing_and_may_come_again(wakes):
    seen = []

    async def one_pass(uid):
        seen.append(uid)
        return GONE

    wakes.start(one_pass)
    for count in (1, 2):
        wakes.wake("a")
        await until(lambda n=count: len(seen) == n and not wakes._events)
    assert not wakes._tasks


async def test_the_end_lets_a_pass_finish_and_starts_none():
    wakes, ended = Wakes(), []

    async def one_pass(uid):
        await asyncio.sleep(0.05)
        ended.append(uid)

    wakes.start(one_pass)
    wakes.wake("a")
    await asyncio.sleep(0.01)
    await wakes.aclose(5)
    assert ended == ["a"]
    wakes.wake("b")
    await asyncio.sleep(0.1)
    assert ended == ["a"]


async def test_the_end_does_not_wait_for_a_pass_that_hangs():
    wakes = Wakes()
    wakes.start(lambda uid: asyncio.Event().wait())
    wakes.wake("a")
    await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        await wakes.aclose(0.05)


async def test_only_so_many_passes_run_at_once(wakes):
    running, most, go_on = 0, 0, asyncio.Event()

    async def one_pass(uid):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1

    wakes.start(one_pass)
    for number in range(30):
        wakes.wake(str(number))
    await asyncio.sleep(0.05)
    go_on.set()
    await until(lambda: running == 0)
    assert most == 8
