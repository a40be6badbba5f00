"""The gateway as a process, beside a simulated engine as a process, both killed and restarted."""

import asyncio
import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from rljob.engine import EngineClient
from rljob.errors import EngineError, GatewayError
from rljob.gateway import GatewayClient, SessionChat, SessionSampling, SessionSpec
from rljob.ids import PolicyVersion
from rljob_trainer.recipes.quickstart.tokenizer import save_tokenizer, train_tokenizer

TOKEN = "job-token"
numbers = itertools.count()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }
    for name, key in (("bash", "command"), ("submit", "answer"))
]
ASK = [{"role": "user", "content": "Find it. sim-answer=yes"}]
ENGINE = """
import os, pathlib, sys
from rljob.testing.engine_server import serve
port, token, model_dir = sys.argv[1:]
serve("127.0.0.1", int(port), token=token, model_dir=pathlib.Path(model_dir), env=os.environ)
"""


def die_with_parent() -> None:
    """The parent is the thread that starts the process: only the main one may do that here."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Process:
    """A component that a test starts, kills and starts again."""

    def __init__(self, argv: list[str], env: dict[str, str], url: str):
        self.argv, self.env, self.url = argv, {**os.environ, **env}, url

    def start(self) -> "Process":
        self.child = subprocess.Popen(
            self.argv,
            env=self.env,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - prctl takes no lock
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.child.poll() is None:
            try:
                httpx.get(f"{self.url}/healthz", timeout=1)
                return self
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(f"{self.argv} did not start: {self.child.stderr.read()}")

    def stop(self, number: int = signal.SIGKILL) -> int:
        self.child.send_signal(number)
        code = self.child.wait(20)
        if self.child.stderr and not self.child.stderr.closed:
            self.child.stderr.close()
        return code

    def restart(self) -> None:
        self.stop()
        self.start()


@pytest.fixture(scope="module")
def module_port():
    """As `free_port`, for what lives as long as the module."""

    def port() -> int:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return sock.getsockname()[1]

    return port


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "prepared" / "model"
    folder.mkdir(parents=True)
    save_tokenizer(train_tokenizer(512, 100), folder)
    return folder


@pytest.fixture(scope="module")
def engine(model, module_port):
    port = module_port()
    argv = [sys.executable, "-c", ENGINE, str(port), TOKEN, str(model)]
    env = {"RLJOB_SIM_TURN_SECONDS": "0.6", "RLJOB_SIM_TURNS": "3"}
    process = Process(argv, env, f"http://127.0.0.1:{port}")
    yield process.start()
    process.stop()


def gateway_env(model: Path, engine_url: str, data_port: int, control_port: int) -> dict[str, str]:
    return {
        "RLJOB_COMPONENT": "gateway-0",
        "RLJOB_JOB_FILE": "unused",
        "RLJOB_ARTIFACTS": str(model.parents[1]),
        "RLJOB_WORK_DIR": str(model),
        "RLJOB_TOKEN": TOKEN,
        "RLJOB_ENGINE_URL": engine_url,
        "RLJOB_GATEWAY_URL": f"http://127.0.0.1:{data_port}",
        "RLJOB_GATEWAY_CONTROL_URL": f"http://127.0.0.1:{control_port}",
    }


ARGV = [sys.executable, "-m", "rljob_services.gateway"]


@pytest.fixture(scope="module")
def shared_gateway(model, engine, module_port):
    env = gateway_env(model, engine.url, module_port(), module_port())
    process = Process(ARGV, env, env["RLJOB_GATEWAY_URL"])
    yield process.start()
    process.stop()


@pytest.fixture
def gateway(shared_gateway):
    """The module's gateway, started again where the last test ended it."""
    return shared_gateway if shared_gateway.child.poll() is None else shared_gateway.start()


@pytest.fixture
async def client(gateway):
    control = gateway.env["RLJOB_GATEWAY_CONTROL_URL"]
    async with GatewayClient(control, gateway.url, TOKEN) as client:
        yield client


@pytest.fixture
async def switch(engine, tmp_path):
    """Gives the engine a version."""
    async with EngineClient(engine.url, TOKEN) as http:

        async def switch(n: int) -> None:
            version = PolicyVersion(1, n)
            folder = tmp_path / str(version)
            folder.mkdir(exist_ok=True)
            manifest = {"incarnation": 1, "n": n, "digest": ""}
            (folder / "rljob-manifest.json").write_text(json.dumps(manifest))
            for _ in range(100):
                try:
                    await http.switch(version, folder)
                    return
                except EngineError as error:
                    problem = error
                    await asyncio.sleep(0.1)
            raise AssertionError(f"the engine took no version: {problem}")

        yield switch


def spec() -> SessionSpec:
    return SessionSpec(
        session_id=f"t1-0.{next(numbers)}",
        sampling=SessionSampling(max_tokens_per_turn=200),
        turn_seconds=60,
    )


async def episode(chat: SessionChat) -> list[dict]:
    """Three turns: two bash calls and a submit."""
    messages = list(ASK)
    for _ in range(3):
        reply = await chat.complete(messages, TOOLS)
        messages.append(reply.message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "a<|im_end|>b\n"}
            for call in reply.message["tool_calls"]
        ]
    return messages


def check(chain) -> None:
    covered = [False] * len(chain.tokens)
    for span in chain.version_spans:
        assert not any(covered[span.start : span.start + span.length])
        covered[span.start : span.start + span.length] = [True] * span.length
    assert covered == chain.action_mask
    assert len(chain.logprobs) == sum(chain.action_mask)


async def test_an_episode_across_a_switch_of_weights_is_one_chain_of_two_versions(client, switch):
    await switch(0)
    session = await client.open_session(spec())
    running = asyncio.create_task(episode(SessionChat(session)))
    await asyncio.sleep(0.9)  # inside the second turn
    await switch(1)
    messages = await running
    assert [call["function"]["name"] for m in messages for call in m.get("tool_calls", [])] == [
        "bash",
        "bash",
        "submit",
    ]
    closed = await client.close_session(session.id)
    (chain,) = closed.chains
    check(chain)
    assert {span.n for span in chain.version_spans} == {0, 1}
    assert closed.turns == 3
    assert (await client.close_session(session.id)).chains == closed.chains


async def test_a_turn_survives_the_engine_being_killed(client, switch, engine):
    await switch(0)
    session = await client.open_session(spec())
    running = asyncio.create_task(episode(SessionChat(session)))
    await asyncio.sleep(0.9)
    engine.restart()
    await switch(0)
    await running
    (chain,) = (await client.close_session(session.id)).chains
    check(chain)
    assert len(chain.version_spans) == 3


async def test_an_engine_without_weights_is_waited_for(client, switch, engine):
    engine.restart()
    session = await client.open_session(spec())
    running = asyncio.create_task(episode(SessionChat(session)))
    await asyncio.sleep(0.5)
    await switch(0)
    await running
    assert (await client.close_session(session.id)).engine_wait_seconds > 0.3


async def test_a_gateway_that_was_killed_has_lost_its_sessions_and_says_so(client, switch, gateway):
    await switch(0)
    session = await client.open_session(spec())
    running = asyncio.create_task(episode(SessionChat(session)))
    await asyncio.sleep(0.3)
    gateway.restart()
    with pytest.raises(GatewayError, match="not known"):
        await running
    with pytest.raises(GatewayError, match="not known"):
        await client.close_session(session.id)
    again = await client.open_session(spec())
    assert again.boot_id != session.boot_id


async def test_sigterm_ends_it_well_with_a_turn_in_flight(client, switch, gateway):
    await switch(0)
    session = await client.open_session(spec())
    running = asyncio.create_task(episode(SessionChat(session)))
    await asyncio.sleep(0.3)
    assert gateway.stop(signal.SIGTERM) == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_openai_s_own_client_can_speak_to_a_session(client, switch):
    openai = pytest.importorskip("openai")
    await switch(0)
    session = await client.open_session(spec())
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.token) as agent:
        reply = await agent.chat.completions.create(model="policy", messages=ASK, tools=TOOLS)
        message = reply.choices[0].message
        assert message.tool_calls[0].function.name == "bash"
        more = [*ASK, message.model_dump(), {"role": "tool", "tool_call_id": "x", "content": "y"}]
        stream = await agent.chat.completions.create(
            model="policy", messages=more, tools=TOOLS, stream=True
        )
        names = [
            call.function.name
            async for chunk in stream
            for call in chunk.choices[0].delta.tool_calls or []
        ]
        assert names == ["bash"]
    assert len((await client.close_session(session.id)).chains) == 1


def run_to_its_end(env: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        ARGV, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True, timeout=30, check=False
    )
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_a_model_without_a_chat_template_is_one_line_and_exit_code_2(model, tmp_path, free_port):
    broken = tmp_path / "prepared" / "model"
    broken.mkdir(parents=True)
    (broken / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    code, line = run_to_its_end(gateway_env(broken, "http://127.0.0.1:1", free_port(), free_port()))
    assert code == 2
    assert line.startswith("spec.model.source: the model has no chat template; ")


def test_a_port_in_use_is_one_line_and_exit_code_2(model, engine, free_port):
    taken = int(engine.url.rsplit(":", 1)[1])
    code, line = run_to_its_end(gateway_env(model, engine.url, taken, free_port()))
    assert code == 2
    assert line.startswith(f"127.0.0.1:{taken}: cannot listen: ")
