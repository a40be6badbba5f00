"""The engine agent over a simulated engine and a ledger that is one struct."""

import asyncio
import contextlib

import httpx
import pytest

from rljob.clock import SystemClock
from rljob.engine import EngineClient
from rljob.errors import FencedError, StoreError
from rljob.ids import PolicyVersion
from rljob.ledger import Policy
from rljob.settings import Settings
from rljob.testing.clock import ScaledClock
from rljob.testing.engine_server import SimulatedEngine, SimulatedEngineOptions
from rljob.weights import Canary, RawTensor, WeightStore
from rljob_rollout_worker.engine_agent import EngineAgent

V = PolicyVersion


class OneVersionLedger:
    """The policy, and which versions were said to be held."""

    def __init__(self):
        self.answer = Policy(version=None)
        self.held = []
        self.error = None

    async def policy(self):
        if self.error:
            raise self.error
        return self.answer

    async def hold_version(self, worker, boot_id, version):
        self.held.append(version)


class World:
    """An agent, what it follows and what it drives."""

    def __init__(self, artifacts, tmp_path):
        self.ledger, self.store = OneVersionLedger(), WeightStore(artifacts)
        self.source = tmp_path / "source"
        self.source.mkdir()
        self.engine = SimulatedEngine()
        self.is_up = True
        settings = Settings(
            component="w", job_file="", artifacts=str(artifacts), work_dir=str(tmp_path / "work")
        )
        clock = ScaledClock(20)
        self.fetched = tmp_path / "work" / "weights"
        client = EngineClient(
            "http://engine", clock=clock, transport=httpx.ASGITransport(self.route)
        )
        self.agent = EngineAgent(
            settings, self.ledger, worker="w", boot_id="b", clock=clock, client=client
        )

    async def route(self, scope, receive, send):
        if not self.is_up:
            raise httpx.ConnectError("refused")
        await self.engine(scope, receive, send)

    def commit(self, version, *, publish=True):
        if publish:
            weight = RawTensor("w", "F32", [1], version.n.to_bytes(4, "little"))
            canary = Canary(prompt_ids=[1], token_ids=[2], logprobs=[-1.0])
            self.store.publish(version, self.source, canary, tensors=[weight])
        digest = self.store.manifest(version).digest if publish else "0" * 64
        self.ledger.answer = Policy(version=version, digest=digest, step=version.n)

    async def until(self, condition, seconds=10):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    async def serving(self, version):
        await self.until(lambda: self.agent.current == version and version in self.ledger.held[-1:])


@pytest.fixture
async def world(artifacts, tmp_path):
    world = World(artifacts, tmp_path)
    task = asyncio.create_task(world.agent.run())
    yield world
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_it_follows_the_newest_version_also_when_n_goes_back(world):
    await world.until(lambda: world.agent.problem == "no version is committed yet")
    assert world.agent.current is None
    for version in (V(1, 0), V(1, 1), V(1, 2), V(2, 1)):
        world.commit(version)
        await world.serving(version)
    assert world.ledger.held == [V(1, 0), V(1, 1), V(1, 2), V(2, 1)]
    await world.until(lambda: world.agent.problem == "")
    assert [path.name for path in world.fetched.iterdir()] == ["2-1"]


async def test_a_restarted_engine_is_given_its_version_again(world):
    world.commit(V(1, 3))
    await world.serving(V(1, 3))
    world.engine, world.ledger.held = SimulatedEngine(), []
    await world.serving(V(1, 3))
    assert world.engine.num_switches == 1


async def test_an_engine_that_is_away_serves_no_version_until_it_is_back(world):
    world.commit(V(1, 1))
    await world.serving(V(1, 1))
    world.is_up = False
    await world.until(lambda: world.agent.current is None)
    await world.until(lambda: world.agent.problem == "the engine is not reachable")
    world.is_up = True
    await world.until(lambda: world.agent.current == V(1, 1))
    assert world.engine.num_switches == 1


async def test_a_worker_that_restarts_takes_over_what_its_engine_serves(world, artifacts, tmp_path):
    world.commit(V(1, 1))
    await world.serving(V(1, 1))
    settings = Settings(
        component="w", job_file="", artifacts=str(artifacts), work_dir=str(tmp_path / "again")
    )
    client = EngineClient("http://engine", transport=httpx.ASGITransport(world.engine))
    again = EngineAgent(
        settings, world.ledger, worker="w", boot_id="c", clock=SystemClock(), client=client
    )
    task = asyncio.create_task(again.run())
    await world.until(lambda: again.current == V(1, 1))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert world.engine.num_switches == 1


async def test_a_version_that_vanished_is_passed_over_for_the_newest(world):
    world.commit(V(1, 0))
    await world.serving(V(1, 0))
    world.commit(V(1, 1), publish=False)
    await asyncio.sleep(0.1)
    assert world.agent.current == V(1, 0)
    world.commit(V(1, 2))
    await world.serving(V(1, 2))


async def test_weights_that_do_not_verify_are_tried_again_and_named(world):
    world.commit(V(1, 0))
    await world.serving(V(1, 0))
    world.store.publish(V(1, 1), world.source, None, tensors=[RawTensor("w", "F32", [1], b"abcd")])
    file = world.store.path(V(1, 1)) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"x")
    world.ledger.answer = Policy(version=V(1, 1), digest=world.store.manifest(V(1, 1)).digest)
    await world.until(lambda: "model.safetensors does not match" in world.agent.problem)
    assert world.agent.current == V(1, 0)
    file.write_bytes(whole)
    await world.serving(V(1, 1))


async def test_weights_that_the_engine_refuses_are_fetched_afresh(world):
    world.commit(V(1, 0))
    await world.serving(V(1, 0))
    world.commit(V(1, 1))
    right, world.ledger.answer = world.ledger.answer, Policy(version=V(1, 1), digest="f" * 64)
    await world.until(lambda: "digest" in world.agent.problem)
    assert not (world.fetched / "1-1").exists()
    world.ledger.answer = right
    await world.serving(V(1, 1))


async def test_the_switch_waits_for_whoever_wants_to_be_asked(world):
    asked, go = [], asyncio.Event()

    async def before_switch(version):
        asked.append(version)
        await go.wait()

    world.agent.before_switch = before_switch
    world.commit(V(1, 0))
    await world.until(lambda: asked == [V(1, 0)])
    await asyncio.sleep(0.05)
    assert world.agent.current is None
    go.set()
    await world.serving(V(1, 0))


async def test_a_store_that_is_away_does_not_end_it_and_being_fenced_does(
    world, artifacts, tmp_path
):
    world.commit(V(1, 0))
    await world.serving(V(1, 0))
    world.ledger.error = StoreError("redis is away")
    await world.until(lambda: world.agent.problem == "redis is away")
    assert world.agent.current == V(1, 0)
    world.ledger.error = None
    world.commit(V(1, 1))
    await world.serving(V(1, 1))
    (tmp_path / "other").mkdir()
    other = World(artifacts, tmp_path / "other")
    other.ledger.error = FencedError("another boot")
    with pytest.raises(FencedError, match="another boot"):
        await other.agent.run()


async def test_a_failed_load_is_repeated_on_the_restarted_engine(world):
    world.engine = SimulatedEngine(exit_process=lambda _: None)
    world.engine.options = SimulatedEngineOptions(verdict="old")
    world.commit(V(1, 0))
    await world.until(lambda: "canary" in world.agent.problem)
    world.engine = SimulatedEngine()
    await world.serving(V(1, 0))
