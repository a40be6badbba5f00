"""A pool over sandboxes that fail to start, lie about who they are, do not come clean, or die."""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import prometheus_client
import pytest

from rljob.api.rljob_types import SandboxPool
from rljob.errors import SandboxError
from rljob.sandbox_client import SandboxClient
from rljob_sandbox_pool.broker import Broker, OneJob
from rljob_sandbox_pool.guest.claims import State
from rljob_sandbox_pool.guest.wire import Request, Response
from rljob_sandbox_pool.leases import ClaimRequest, Owner
from rljob_sandbox_pool.manager import Manager
from rljob_sandbox_pool.pool import NoSandboxError, Pool
from rljob_sandbox_pool.runtimes.base import SandboxSpec
from rljob_sandbox_pool.runtimes.simulated import SimulatedRuntime, SimulatedSandbox


@dataclasses.dataclass
class Runtime(SimulatedRuntime):
    """Simulated sandboxes with faults: each start takes the next one of `faults`."""

    faults: list[str] = dataclasses.field(default_factory=list)
    started: list[SimulatedSandbox] = dataclasses.field(default_factory=list)

    def start(self, spec: SandboxSpec) -> SimulatedSandbox:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "no start":
            raise SandboxError("no memory for it")
        if fault == "other key":
            spec = msgspec.structs.replace(spec, key=b"another key")
        box = SimulatedSandbox(spec)
        if fault == "tainted":
            box.guest.lock.state = State.TAINTED
        if fault == "unclean":
            box.backend.reset = lambda done: done(["something is left"])
        if fault == "deaf":
            hear = box.guest.handle
            box.guest.handle = lambda request, reply: (
                request.path == "/claim" or hear(request, reply)
            )
        if fault == "dies":
            box.kill()
        self.started.append(box)
        return box


@asynccontextmanager
async def running(runtime: Runtime, **spec: Any) -> AsyncIterator[Pool]:
    pool = Pool(
        SandboxPool.model_validate({"name": "p", "warm": 1, "max": 2, **spec}),
        runtime,
        "pool key",
        name="p",
    )
    loop = asyncio.create_task(pool.keep_warm_loop())
    try:
        yield pool
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await pool.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def claim(
    pool: Pool, claim_id: str = "c1", wait: float = 20.0, **more: Any
) -> dict[str, str]:
    return json.loads(await pool.claim(ClaimRequest(id=claim_id, wait_seconds=wait, **more)))


async def test_it_keeps_its_warm_sandboxes_ready() -> None:
    async with running(Runtime(), warm=3, max=5) as pool:
        await until(lambda: pool.counts().ready == 3)
        await claim(pool)
        await until(lambda: pool.counts().ready == 3)
        assert pool.counts().claimed == 1


async def test_it_never_has_more_than_its_maximum() -> None:
    async with running(Runtime(), warm=2, max=3) as pool:
        for name in "abc":
            await claim(pool, name)
        with pytest.raises(NoSandboxError, match="all 3 sandboxes of pool p are taken") as none:
            await claim(pool, "d", wait=0.2)
        assert none.value.error == "at_max"
        assert pool.counts().total == 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no start", "no memory for it"),
        ("other key", "failed the keyed challenge"),
        ("tainted", "calls itself tainted"),
        ("dies", ""),
    ],
)
async def test_a_sandbox_that_does_not_come_up_is_replaced_after_a_pause(
    fault: str, words: str
) -> None:
    runtime = Runtime(faults=[fault, fault])
    async with running(runtime, warm=1, max=1) as pool:
        with pytest.raises(NoSandboxError) as none:
            await claim(pool, wait=0.05)
        assert none.value.error == "warming"
        await claim(pool)
        assert pool.status().failed_total == 2
        assert pool.problem() == ""


async def test_starts_that_keep_failing_are_a_problem_with_its_reason() -> None:
    async with running(Runtime(faults=["no start"] * 100)) as pool:
        await until(lambda: pool.problem() != "")
        assert "no memory for it" in pool.problem()
        with pytest.raises(NoSandboxError, match="no memory for it"):
            await claim(pool, wait=0.01)
        assert pool.status().failed_total < 10


async def test_starts_that_fail_together_are_one_failure_in_a_row() -> None:
    async with running(Runtime(faults=["dies"] * 4), warm=4, max=4) as pool:
        await until(lambda: pool.status().failed_total == 4)
        assert pool.problem() == ""
        await until(lambda: pool.status().ready == 4)
        assert pool.status().failed_total == 4


async def test_an_adopted_sandbox_that_dies_is_no_start_that_failed() -> None:
    runtime = Runtime()
    async with running(runtime, warm=0, max=2) as pool:
        limits = pool.spec.limits
        box = runtime.start(SandboxSpec(id="b", key=b"k" * 32, index=0, limits=limits))
        pool.adopt("b", "", box)
        box.kill()
        await until(lambda: pool.counts().total == 0)
        assert pool.status().failed_total == 0


async def test_a_sandbox_that_does_not_come_clean_is_never_claimed_again() -> None:
    async with running(Runtime(faults=["unclean"]), warm=1, max=1) as pool:
        first = await claim(pool, "a")
        assert await pool.release("a")
        second = await claim(pool, "b")
        assert second["sandbox_id"] != first["sandbox_id"]


async def test_a_sandbox_that_somebody_else_claimed_is_not_handed_out() -> None:
    runtime = Runtime()
    async with running(runtime, warm=1, max=2) as pool:
        await until(lambda: pool.counts().ready == 1)
        runtime.started[0].guest.lock.state = State.CLAIMED
        answer = await claim(pool)
        assert answer["sandbox_id"] == runtime.started[1].guest.id


async def test_the_same_claim_again_is_the_same_answer() -> None:
    async with running(Runtime()) as pool:
        assert await claim(pool, "a") == await claim(pool, "a")
        assert pool.counts().claimed == 1


async def test_a_claim_that_is_cancelled_midway_leaves_no_sandbox_claimed() -> None:
    runtime = Runtime(faults=["deaf"])
    async with running(runtime, warm=1, max=1) as pool:
        await until(lambda: pool.counts().ready == 1)
        task = asyncio.create_task(pool.claim(ClaimRequest(id="a", wait_seconds=5.0)))
        await until(lambda: pool.counts().claimed == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: pool.counts().ready == 1)
        assert len(runtime.started) == 1


async def test_an_expired_claim_frees_its_place() -> None:
    runtime = Runtime()
    async with running(runtime, warm=1, max=1) as pool:
        await claim(pool, "a", ttl_seconds=0.05)
        await claim(pool, "b")
        assert not await pool.release("a")
        assert len(runtime.started) == 2


async def test_a_release_is_known_once() -> None:
    async with running(Runtime()) as pool:
        await claim(pool, "a")
        assert [await pool.release("a"), await pool.release("a"), await pool.release("never")] == [
            True,
            False,
            False,
        ]


async def test_a_restarted_owner_gives_back_what_its_earlier_boot_held() -> None:
    async with running(Runtime(), warm=1, max=2) as pool:
        await claim(pool, "a", owner=Owner("worker-0", "boot 1"))
        await claim(pool, "b", owner=Owner("worker-1", "boot 1"))
        await claim(pool, "c", owner=Owner("worker-0", "boot 2"))
        assert [await pool.release(name) for name in "abc"] == [False, True, True]


async def test_a_broken_sandbox_is_replaced_not_reset() -> None:
    runtime = Runtime()
    async with running(runtime, warm=1, max=1) as pool:
        await claim(pool, "a")
        await pool.release("a", broken=True)
        await claim(pool, "b")
        assert len(runtime.started) == 2


async def test_a_death_while_claimed_or_ready_is_made_up_for() -> None:
    runtime = Runtime()
    async with running(runtime, warm=1, max=2) as pool:
        await claim(pool, "a")
        await until(lambda: pool.counts().ready == 1)
        for box in list(runtime.started):
            box.kill()
        await until(lambda: (pool.counts().ready, pool.counts().claimed) == (1, 0))


@pytest.fixture
async def manager() -> AsyncIterator[Manager]:
    spec = SandboxPool.model_validate({"name": "p", "warm": 1, "max": 2, "runtime": "simulated"})
    manager = Manager([spec], {"simulated": Runtime()}, token="t", pool_key="k")
    yield manager
    await manager.close()


async def test_a_loop_that_fails_ends_the_manager(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(manager.pools["p"], "_size", broken)
    await manager.start("127.0.0.1", 0)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await manager.run(asyncio.Event())


async def test_a_claimer_that_hangs_up_while_it_waits_leaves_the_queue(manager: Manager) -> None:
    address = await manager.start("127.0.0.1", 0)
    pool = manager.pools["p"]
    async with asyncio.timeout(20):
        first, second = await claim(pool, "a"), await claim(pool, "b")
    client = SandboxClient(address, "t")
    waiting = asyncio.create_task(client.acquire("p"))
    await until(lambda: pool.counts().waiting == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: pool.counts().waiting == 0)
    await client.aclose()
    assert first["sandbox_id"] != second["sandbox_id"]


async def test_a_release_takes_back_what_was_granted_but_not_answered_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(method: str, path: str, body: bytes = b"") -> Request:
        return Request(method, path, {}, {"authorization": "Bearer t"}, body)

    async with running(Runtime()) as pool:
        await until(lambda: pool.counts().ready > 0)
        broker, grant = Broker(OneJob({"p": pool}, "t")), pool.claim
        releasing: list[asyncio.Task[Response]] = []

        async def claim_then_release(request: ClaimRequest) -> bytes:
            granted = await grant(request)
            release = broker.handle(asked("DELETE", "/v1/claims/a"))
            releasing.append(asyncio.get_running_loop().create_task(release))
            return granted

        monkeypatch.setattr(pool, "claim", claim_then_release)
        body = json.dumps({"request_id": "a", "pool": "p"}).encode()
        await broker.handle(asked("POST", "/v1/claims", body))
        await asyncio.gather(*releasing)
        assert pool.counts().claimed == 0


async def test_the_same_claim_id_of_another_job_is_another_claim() -> None:
    async with running(Runtime(), warm=2, max=2) as pool:
        requests = [ClaimRequest(id="x", job=job, wait_seconds=10) for job in ("ns/a", "ns/b")]
        answers = [json.loads(await pool.claim(request)) for request in requests]
        assert answers[0]["sandbox_id"] != answers[1]["sandbox_id"]
        assert not await pool.release("x", job="ns/c")
        assert await pool.release("x", job="ns/a")
        assert await pool.release("x", job="ns/b")
        assert pool.counts().claimed == 0


async def test_with_one_sandbox_what_was_begun_is_finished_before_anything_else_begins() -> None:
    done: list[str] = []

    async def episode(name: str) -> None:
        """As of a task with freshSandbox: nobody holds a sandbox while it waits for another."""
        await claim(pool, f"{name} runs")
        done.append(f"{name} runs")
        await pool.release(f"{name} runs")
        await claim(pool, f"{name} is scored", priority=10)
        done.append(f"{name} is scored")
        await pool.release(f"{name} is scored")

    async with running(Runtime(), warm=1, max=1) as pool:
        await asyncio.gather(*(episode(name) for name in "abcd"))
    assert len(done) == 8
    # One more may begin in the moment between the release and the next claim.
    assert max(done.index(f"{n} is scored") - done.index(f"{n} runs") for n in "abcd") <= 2


async def test_a_job_gets_no_more_than_its_share_of_a_pool() -> None:
    async with running(Runtime(), warm=3, max=4, maxPerJob=2) as pool:
        for name in "ab":
            await claim(pool, name, job="ns/greedy")
        with pytest.raises(NoSandboxError, match="holds 2 sandboxes of pool p, as many as") as none:
            await claim(pool, "c", wait=0.0, job="ns/greedy")
        assert none.value.error == "at_quota"
        await claim(pool, "d", job="ns/modest")
        waiting = asyncio.create_task(claim(pool, "c", job="ns/greedy"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await pool.release("a", job="ns/greedy")
        assert (await waiting)["claim_id"] == "c"


async def test_a_sandbox_that_does_not_come_clean_is_kept_with_its_evidence() -> None:
    seen: list[tuple[str, list[str]]] = []
    async with running(Runtime(faults=["unclean"]), warm=1, max=3) as pool:
        pool.on_state = lambda member: seen.append((member.state.value, list(member.evidence)))
        first = await claim(pool, "a")
        await pool.release("a")
        await until(lambda: pool.status().quarantined == 1)
        await until(lambda: pool.status().ready == 1)
        assert ("quarantined", ["something is left"]) in seen
        for name in "bcd":
            assert (await claim(pool, name))["sandbox_id"] != first["sandbox_id"]
        assert pool.status().quarantined == 0  # its place was wanted


async def test_a_reset_after_which_the_guest_cannot_prove_itself_is_no_reset() -> None:
    runtime = Runtime()
    async with running(runtime, warm=1, max=2, recycle={"quarantineSeconds": 0}) as pool:
        first = await claim(pool, "a")
        runtime.started[0].guest._key = b"somebody else's"
        await pool.release("a")
        assert (await claim(pool, "b"))["sandbox_id"] != first["sandbox_id"]
        await until(lambda: pool.counts().quarantined + pool.counts().ending == 0)


async def test_the_metrics_tell_claims_that_found_a_sandbox_from_those_that_waited() -> None:
    def num(phase: str, result: str) -> float:
        labels = {"pool": "p", "image": "", "phase": phase, "result": result}
        found = prometheus_client.REGISTRY.get_sample_value(
            "rljob_sandbox_claim_seconds_count", labels
        )
        return found or 0.0

    async with running(Runtime(), warm=1, max=1) as pool:
        await until(lambda: pool.counts().ready == 1)
        kinds = [(phase, result) for phase in ("queue", "accept") for result in ("hit", "miss")]
        before = {kind: num(*kind) for kind in kinds}
        await claim(pool, "a")
        waiting = asyncio.create_task(claim(pool, "b"))
        await until(lambda: pool.counts().waiting == 1)
        await pool.release("a")
        await waiting
        assert {kind: num(*kind) - before[kind] for kind in kinds} == dict.fromkeys(kinds, 1.0)
