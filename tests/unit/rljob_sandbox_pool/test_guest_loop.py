"""The guest's loop: timers come in order, once, and those that were taken back leave nothing behind."""

from rljob_sandbox_pool.guest.loop import MIN_SWEEP, Loop


def test_timers_come_in_order_and_cancelled_ones_never() -> None:
    loop, seen = Loop(), list[int]()
    timers = [loop.call_at(loop.now() - n, lambda n=n: seen.append(n)) for n in range(5)]
    timers[3].cancel()
    loop.run_once(0.0)
    loop.run_once(0.0)
    assert seen == [4, 2, 1, 0]
    loop._selector.close()


def test_deadlines_that_are_taken_back_are_not_kept_until_they_would_come() -> None:
    loop, seen = Loop(), list[int]()
    kept = [loop.call_at(loop.now() + 3600, lambda: seen.append(1)) for _ in range(10)]
    for _ in range(10_000):
        loop.call_at(loop.now() + 3600, lambda: seen.append(2)).cancel()
    assert len(loop._timers) <= 2 * len(kept) + MIN_SWEEP
    loop.call_at(loop.now() - 1, lambda: seen.append(3))
    loop.run_once(0.0)
    assert seen == [3]
    assert sum(timer.callback is not None for _, _, timer in loop._timers) == len(kept)
    loop._selector.close()
