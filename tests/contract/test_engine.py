"""One behaviour suite over both engines: the simulated one, and the plugin's gate before a vLLM made of dictionaries.

The same on a real vLLM: tests/integration/test_vllm_engine.py.
"""

import asyncio
import json
import struct
from types import SimpleNamespace

import httpx
import pytest

from rljob.engine import EngineClient, GenerateRequest, OldWeightsError
from rljob.errors import CorruptError, EngineError, EngineNotReadyError
from rljob.ids import PolicyVersion
from rljob.testing.engine_server import SimulatedEngine, SimulatedEngineOptions
from rljob.weights import Canary, RawTensor, WeightStore
from rljob_rollout_worker import vllm_plugin

V = PolicyVersion
TOKEN = "secret"
TURN_TOKENS, TOKEN_SECONDS = 20, 0.005


async def nothing():
    pass


class FakeVllm:
    """What the plugin uses of vLLM's engine client, and the app behind the gate. One weight, one score: -weight."""

    def __init__(self):
        self.model_config = SimpleNamespace(dtype="torch.float32")
        self.errored = False
        self.weight = 0.0
        self.is_paused = False
        self.output_processor = SimpleNamespace(request_states={}, parent_requests={})
        self.calls = []
        self.busy_blocks = 1
        self.loads_nothing = False
        self.before_pause = self.before_load = self.before_queue = nothing

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        body = json.loads((await receive())["body"])
        await self.before_queue()
        request_id = f"r{id(scope)}"
        aborted = asyncio.Event()
        self.output_processor.request_states[request_id] = aborted
        tokens = []
        while len(tokens) < body["max_tokens"] and not aborted.is_set():
            await asyncio.sleep(TOKEN_SECONDS)
            if not self.is_paused:
                tokens.append(int(self.weight))
        self.output_processor.request_states.pop(request_id, None)
        choice = {
            "token_ids": tokens,
            "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
            "finish_reason": "abort" if aborted.is_set() else "length",
        }
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(
            {"type": "http.response.body", "body": json.dumps({"choices": [choice]}).encode()}
        )

    async def pause_generation(self, **_):
        await self.before_pause()
        self.is_paused = True
        await self.abort(list(self.output_processor.request_states), internal=True)

    async def resume_generation(self):
        self.is_paused = False

    async def abort(self, ids, internal):
        for request_id in ids:
            self.output_processor.request_states[request_id].set()

    async def collective_rpc(self, method, args):
        assert method == "rljob_load"
        await self.before_load()
        assert not self.output_processor.request_states, "weights changed under a running request"
        [(_, _, _, data)] = vllm_plugin.read_tensors(vllm_plugin.Path(args[0]), args[1])
        if not self.loads_nothing:
            [self.weight] = struct.unpack("<f", data)
        self.busy_blocks = 1
        return [1]

    async def reset_prefix_cache(self):
        self.busy_blocks -= 1
        return self.busy_blocks < 0

    async def reset_encoder_cache(self):
        self.calls.append("reset_encoder_cache")


async def fake_score(engine, canary):
    return [-engine.weight] * len(canary["token_ids"])


class Bench:
    """An engine of one kind, its weights and its client."""

    def __init__(self, app, artifacts, exits, loads_nothing, vllm=None):
        self.store = WeightStore(artifacts)
        self.source = artifacts / "source"
        self.source.mkdir()
        (self.source / "config.json").write_text("{}")
        self.exits, self.loads_nothing = exits, loads_nothing
        self.app, self.vllm = app, vllm

    def client(self, token=TOKEN):
        transport = httpx.ASGITransport(self.app)
        return EngineClient("http://engine", token, transport=transport)

    def publish(self, version):
        weight = RawTensor("w", "F32", [1], struct.pack("<f", version.n))
        canary = Canary(prompt_ids=[1], token_ids=[2, 3], logprobs=[-float(version.n)] * 2)
        self.store.publish(version, self.source, canary, tensors=[weight])
        return self.store.path(version)


def simulated(artifacts):
    exits = []
    options = SimulatedEngineOptions(turn_seconds=TURN_TOKENS * TOKEN_SECONDS, turns=1)
    app = SimulatedEngine(options, token=TOKEN, exit_process=exits.append)

    def loads_nothing():
        app.options = SimulatedEngineOptions(verdict="old")

    return Bench(app, artifacts, exits, loads_nothing)


def plugin(artifacts, monkeypatch):
    exits = []
    monkeypatch.setenv("RLJOB_TOKEN", TOKEN)
    monkeypatch.setattr(vllm_plugin, "score", fake_score)
    monkeypatch.setattr(vllm_plugin, "exit_process", lambda: exits.append(1))
    monkeypatch.setattr(vllm_plugin, "EXIT_SECONDS", 0.01)
    vllm = FakeVllm()
    gate = vllm_plugin.Middleware(vllm)

    async def app(scope, receive, send):
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=vllm))
        await gate(scope, receive, send)

    def loads_nothing():
        vllm.loads_nothing = True

    return Bench(app, artifacts, exits, loads_nothing, vllm)


@pytest.fixture(params=["simulated", "plugin"])
def bench(request, artifacts, monkeypatch):
    return simulated(artifacts) if request.param == "simulated" else plugin(artifacts, monkeypatch)


@pytest.fixture
async def engine(bench):
    async with bench.client() as client:
        yield client


TURN = GenerateRequest(prompt_ids=[1, 2, 3], max_tokens=TURN_TOKENS, stop_token_ids=[7])


async def test_an_engine_that_has_loaded_nothing_refuses_to_generate(engine):
    status = await engine.status()
    assert (status.state, status.version) == ("empty", None)
    with pytest.raises(EngineNotReadyError, match="engine is empty"):
        await engine.generate(TURN)


async def test_answers_name_the_version_and_the_boot_that_sampled_them(engine, bench):
    result = await engine.switch(V(1, 3), bench.publish(V(1, 3)))
    assert result.verdict == "new"
    answer = await engine.generate(TURN)
    status = await engine.status()
    assert answer.version == status.version == V(1, 3)
    assert answer.boot_id == status.boot_id
    assert len(answer.token_ids) == len(answer.logprobs) > 0


async def test_a_turn_in_flight_ends_with_what_it_has_and_goes_on_under_the_new_version(
    engine, bench
):
    await engine.switch(V(1, 0), bench.publish(V(1, 0)))
    turn = asyncio.create_task(engine.generate(TURN))
    await asyncio.sleep(TURN_TOKENS * TOKEN_SECONDS / 3)
    await engine.switch(V(1, 1), bench.publish(V(1, 1)))
    answer = await turn
    assert (answer.finish_reason, answer.version) == ("abort", V(1, 0))
    assert 0 < len(answer.token_ids) < TURN_TOKENS
    assert (await engine.generate(TURN)).version == V(1, 1)


async def test_n_may_go_back_with_a_new_incarnation(engine, bench):
    for version in (V(1, 5), V(2, 4), V(2, 5)):
        await engine.switch(version, bench.publish(version))
        assert (await engine.generate(TURN)).version == version


async def test_a_second_switch_to_the_same_version_does_nothing(engine, bench):
    path = bench.publish(V(1, 1))
    first, second = await asyncio.gather(engine.switch(V(1, 1), path), engine.switch(V(1, 1), path))
    assert (first.already, second.already) == (False, True)


async def test_a_directory_that_is_not_what_it_is_called_is_refused_and_the_old_version_goes_on(
    engine, bench
):
    await engine.switch(V(1, 1), bench.publish(V(1, 1)))
    path = bench.publish(V(1, 2))
    for version, where, digest in (
        (V(1, 9), path, ""),
        (V(1, 2), path, "0" * 64),
        (V(1, 3), path / "no", ""),
    ):
        with pytest.raises(CorruptError):
            await engine.switch(version, where, digest)
    assert (await engine.generate(TURN)).version == V(1, 1)


async def test_a_client_that_goes_away_does_not_stop_the_switch(engine, bench):
    await engine.switch(V(1, 1), bench.publish(V(1, 1)))
    path = bench.publish(V(1, 2))
    updater = asyncio.create_task(engine.switch(V(1, 2), path))
    await asyncio.sleep(0.001)
    updater.cancel()
    while (await engine.status()).version != V(1, 2):
        await asyncio.sleep(0.005)
    assert (await engine.generate(TURN)).version == V(1, 2)


async def test_a_load_that_changes_nothing_ends_the_process(engine, bench):
    await engine.switch(V(1, 1), bench.publish(V(1, 1)))
    bench.loads_nothing()
    with pytest.raises(OldWeightsError):
        await engine.switch(V(1, 2), bench.publish(V(1, 2)))
    with pytest.raises(EngineError):
        await engine.generate(TURN)
    await asyncio.sleep(0.05)
    assert bench.exits == [1]


async def test_every_route_but_health_wants_the_token(bench):
    async with bench.client("wrong") as stranger:
        for call in (stranger.status(), stranger.generate(TURN), stranger.parse([], text="")):
            with pytest.raises(EngineError, match="401"):
                await call


async def test_an_unknown_route_and_a_malformed_body_are_refused_with_a_reason(bench):
    headers = {"authorization": f"Bearer {TOKEN}"}
    transport = httpx.ASGITransport(bench.app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://engine", headers=headers
    ) as http:
        assert (await http.get("/rljob/v1/nothing")).status_code == 404
        for body in (b"{", b"{}"):
            answer = await http.post("/rljob/v1/switch", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]


# ──── only the plugin: what goes wrong in the middle of a switch ────


@pytest.fixture
async def gate(artifacts, monkeypatch):
    """A bench of the plugin on version 1-1, and its client."""
    bench = plugin(artifacts, monkeypatch)
    async with bench.client() as client:
        await client.switch(V(1, 1), bench.publish(V(1, 1)))
        yield bench, client


async def hang():
    await asyncio.sleep(60)


async def break_down():
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("trouble", [hang, break_down])
async def test_a_switch_that_fails_before_loading_began_goes_back_to_the_old_version(gate, trouble):
    bench, client = gate
    bench.vllm.before_pause = trouble
    with pytest.raises(EngineError, match=r"TimeoutError|out of luck"):
        await client.switch(V(1, 2), bench.publish(V(1, 2)), timeout_seconds=0.1)
    assert (await client.generate(TURN)).version == V(1, 1)
    assert bench.exits == []
    bench.vllm.before_pause = nothing
    await client.switch(V(1, 2), bench.publish(V(1, 2)))
    assert (await client.status()).message == ""


@pytest.mark.parametrize("trouble", [hang, break_down])
async def test_a_switch_that_fails_after_loading_began_fails_health_and_ends_the_process(
    gate, trouble
):
    bench, client = gate
    bench.vllm.before_load = trouble
    with pytest.raises(EngineError, match="the engine restarts"):
        await client.switch(V(1, 2), bench.publish(V(1, 2)), timeout_seconds=0.1)
    assert (await client.status()).state == "failed"
    transport = httpx.ASGITransport(bench.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        assert (await http.get("/health")).status_code == 503
    with pytest.raises(EngineError, match="503"):
        await client.generate(TURN)
    await asyncio.sleep(0.05)
    assert bench.exits == [1]


async def test_a_tensor_that_changes_between_the_check_and_the_load_ends_the_process(gate):
    bench, client = gate
    path = bench.publish(V(1, 2))

    async def corrupt():
        data = bytearray((path / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (path / "model.safetensors").write_bytes(data)

    bench.vllm.before_load = corrupt
    with pytest.raises(EngineError, match="not the tensor"):
        await client.switch(V(1, 2), path)
    await asyncio.sleep(0.05)
    assert bench.exits == [1]


async def test_a_request_admitted_just_before_the_gate_closed_is_met_before_the_load(gate):
    bench, client = gate
    bench.vllm.before_queue = lambda: asyncio.sleep(
        0.05
    )  # past the gate, not yet where an abort finds it
    turn = asyncio.create_task(client.generate(TURN))
    await asyncio.sleep(0.01)
    await client.switch(
        V(1, 2), bench.publish(V(1, 2))
    )  # the fake asserts that nothing runs while it loads
    answer = await turn
    assert (answer.finish_reason, answer.version, answer.token_ids) == ("abort", V(1, 1), [])


@pytest.mark.parametrize(("weight", "verdict"), [(1, "indistinguishable"), (5, "old")])
async def test_without_a_trainer_the_weights_must_score_as_those_the_engine_began_with(
    gate, weight, verdict
):
    bench, client = gate  # its engine holds weight 1
    tensor = RawTensor("w", "F32", [1], struct.pack("<f", weight))
    canary = Canary(prompt_ids=[1], token_ids=[2, 3])
    bench.store.publish(V(2, 0), bench.source, canary, tensors=[tensor])
    if verdict == "old":
        with pytest.raises(EngineError, match="the engine restarts"):
            await client.switch(V(2, 0), bench.store.path(V(2, 0)))
        return
    result = await client.switch(V(2, 0), bench.store.path(V(2, 0)))
    assert result.verdict == verdict
    assert (await client.status()).version == V(2, 0)
