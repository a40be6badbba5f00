"""Who gets which sandbox, and in which order."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from rljob_sandbox_pool.leases import ClaimRequest
from rljob_sandbox_pool.ready_queue import ReadyQueue


@dataclass
class Box:
    name: str
    image: str = ""
    job: str = ""


class Queue(ReadyQueue[Box]):
    """Keeps account of what was granted, as a pool does."""

    def __init__(self, max_per_job: int | None = None) -> None:
        super().__init__(self.granted, self.put)
        self.max_per_job = max_per_job

    def granted(self, box: Box, request: ClaimRequest) -> None:
        box.job = request.job
        self.took(request.job)

    def claim(
        self, name: str = "c", *, wait: float = 5.0, image: str = "", **more: Any
    ) -> Coroutine[Any, Any, Box | None]:
        return self.get(ClaimRequest(id=name, **more), image, wait, lambda: None)


async def waiting(*claims: Coroutine[Any, Any, Box | None]) -> list[asyncio.Task[Box | None]]:
    tasks = [asyncio.create_task(claim) for claim in claims]
    await asyncio.sleep(0)
    return tasks


async def order(queue: Queue, tasks: list[asyncio.Task[Box | None]]) -> list[int]:
    """Which of the tasks get a sandbox, one by one."""
    found: list[int] = []
    for nth in range(len(tasks)):
        queue.put(Box(str(nth)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        found += [n for n, task in enumerate(tasks) if task.done() and n not in found]
    return found


async def test_who_came_first_is_served_first() -> None:
    queue = Queue()
    tasks = await waiting(*(queue.claim() for _ in range(3)))
    assert queue.num_waiting == 3
    assert await order(queue, tasks) == [0, 1, 2]
    assert queue.num_waiting == 0


async def test_a_higher_priority_comes_before_and_a_lower_one_after() -> None:
    queue = Queue()
    tasks = await waiting(*(queue.claim(priority=priority) for priority in (0, -5, 10)))
    assert await order(queue, tasks) == [2, 0, 1]


async def test_the_job_that_holds_the_fewest_comes_first() -> None:
    queue = Queue()
    tasks = await waiting(*(queue.claim(job=job) for job in "aaabb"))
    assert await order(queue, tasks) == [0, 3, 1, 4, 2]


async def test_a_job_that_holds_as_many_as_it_may_waits_until_it_gives_one_back() -> None:
    queue = Queue(max_per_job=1)
    queue.put(Box("fresh"))
    first, second, other = await waiting(*(queue.claim(job=job) for job in "aab"))
    assert (await first).name == "fresh"
    assert [each.image for each in queue.waiting()] == [""]
    queue.put(Box("another"))
    queue.put(Box("third"))
    assert (await other).name == "another"
    assert not second.done()
    assert queue.is_at_quota("a")
    queue.gave_back("a")
    assert (await second).name == "third"


async def test_only_so_many_claims_of_a_job_count_as_it_may_still_have() -> None:
    queue = Queue(max_per_job=2)
    tasks = await waiting(*(queue.claim(job=job, image=job) for job in "aaab"))
    assert sorted(each.image for each in queue.waiting()) == ["a", "a", "b"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_larger_quota_serves_who_waited_for_it() -> None:
    queue = Queue(max_per_job=1)
    queue.put(Box("one"))
    queue.put(Box("two"))
    assert await queue.claim(job="a")
    (task,) = await waiting(queue.claim(job="a"))
    queue.max_per_job = None
    queue.serve_all()
    assert (await task).name == "one"


async def test_who_gave_up_or_was_cancelled_gets_nothing_and_loses_nothing() -> None:
    queue = Queue()
    assert await queue.claim(wait=0) is None
    assert await queue.claim(wait=0.01) is None
    (task,) = await waiting(queue.claim())
    queue.put(Box("a"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await queue.claim(wait=0)).name == "a"


async def test_what_becomes_ready_while_a_claim_begins_to_wait_is_not_missed() -> None:
    queue = Queue()
    request = ClaimRequest(id="c")
    box = await queue.get(request, "", 5, lambda: queue.put(Box("just in time")))
    assert box.name == "just in time"


async def test_a_claim_gets_what_its_own_job_used_last_else_what_nobody_used() -> None:
    queue = Queue()
    for box in (Box("a1", job="a"), Box("a2", job="a"), Box("b1", job="b"), Box("new")):
        queue.put(box)
    found = [(await queue.claim(job="a", wait=0)) for _ in range(4)]
    assert [box and box.name for box in found] == ["a2", "a1", "new", None]


async def test_another_image_fits_nobody_else() -> None:
    queue = Queue()
    (task,) = await waiting(queue.claim(image="x"))
    queue.put(Box("y", image="y"))
    assert queue.num_waiting == 1
    queue.put(Box("x", image="x"))
    assert (await task).name == "x"


async def test_a_sandbox_that_is_gone_is_offered_no_more() -> None:
    queue, box = Queue(), Box("a")
    queue.put(box)
    queue.remove(box)
    queue.remove(box)
    assert await queue.claim(wait=0) is None
