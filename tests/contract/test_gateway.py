"""What the worker may rely on, by the gateway over real sockets and by its fake in `rljob.testing`."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rljob.clock import SystemClock
from rljob.engine import EngineStatus, Generation, ParsedTurn
from rljob.errors import GatewayError
from rljob.gateway import GatewayClient, SessionChat, SessionSpec
from rljob.ids import PolicyVersion
from rljob.testing.chat import FakeGateway
from rljob_services.gateway.__main__ import _Server
from rljob_services.gateway.app import control_app, data_app
from rljob_services.gateway.session import Service
from rljob_services.gateway.sessions import Sessions
from rljob_services.gateway.template import load_template
from rljob_services.gateway.turn import ReadyGate
from rljob_trainer.recipes.quickstart.tokenizer import save_tokenizer, train_tokenizer

ASK = [{"role": "user", "content": "go"}]


class Engine:
    """Says "Yes" for ever."""

    def __init__(self, template):
        self.template = template

    async def generate(self, request, *, timeout_seconds=300.0):
        ids = [*self.template.vocabulary.encode("Yes"), self.template.stop_token_ids[0]]
        version = PolicyVersion(1, 0)
        return Generation(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason="stop",
            version=version,
            boot_id="b",
        )

    async def parse(self, tools, *, text=None, timeout_seconds=30.0):
        return ParsedTurn(content=text)

    async def status(self, *, timeout_seconds=10.0):
        return EngineStatus(boot_id="b", version=PolicyVersion(1, 0), state="ready")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(train_tokenizer(512, 50), folder)
    return load_template(folder)


class Real:
    """The gateway's own apps on two ports of this process."""

    def __init__(self, template, free_port):
        engine, clock = Engine(template), SystemClock()
        self.service = Service(template, engine, ReadyGate(engine, clock), clock)
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]

    @asynccontextmanager
    async def running(self):
        self.sessions = Sessions(self.service)
        data, control = self.urls
        servers = [
            _Server(data_app(self.sessions, "policy"), "127.0.0.1", data),
            _Server(control_app(self.sessions, "t"), "127.0.0.1", control),
        ]
        tasks = [asyncio.create_task(server.serve()) for server in servers]
        async with GatewayClient(control, data, "t") as self.client:
            yield self
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)

    def chat(self, session):
        return SessionChat(session)

    def restart(self):
        self.sessions._sessions.clear()


class Fake:
    """The shipped fake."""

    def __init__(self):
        self.client = FakeGateway(lambda messages: {"role": "assistant", "content": "Yes"})

    def chat(self, session):
        return self.client.chat(session)

    def restart(self):
        self.client.restart()


@pytest.fixture(params=["real", "fake"])
async def gateway(request, template, free_port):
    if request.param == "fake":
        yield Fake()
    else:
        async with Real(template, free_port).running() as real:
            yield real


async def turns(gateway, session, count: int):
    messages = list(ASK)
    for _ in range(count):
        reply = await gateway.chat(session).complete(messages, [])
        messages += [reply.message, {"role": "user", "content": "more"}]
    return reply


async def test_turns_of_one_conversation_are_one_chain(gateway):
    session = await gateway.client.open_session(SessionSpec(session_id="a"))
    reply = await turns(gateway, session, 3)
    assert (reply.message["content"], reply.finish_reason, reply.context_full) == (
        "Yes",
        "stop",
        False,
    )
    closed = await gateway.client.close_session("a")
    (chain,) = closed.chains
    assert (closed.turns, closed.boot_id) == (3, session.boot_id)
    assert len(chain.tokens) == len(chain.action_mask)
    assert (
        len(chain.logprobs)
        == sum(chain.action_mask)
        == sum(span.length for span in chain.version_spans)
    )
    assert chain.action_mask.index(True) == chain.prompt_length


async def test_a_session_without_turns_has_no_chains(gateway):
    await gateway.client.open_session(SessionSpec(session_id="a"))
    closed = await gateway.client.close_session("a")
    assert (closed.chains, closed.turns) == ([], 0)


async def test_sessions_do_not_mix(gateway):
    sessions = [await gateway.client.open_session(SessionSpec(session_id=name)) for name in "abc"]
    await asyncio.gather(*(turns(gateway, session, 2) for session in sessions))
    for name in "abc":
        assert len((await gateway.client.close_session(name)).chains) == 1


@pytest.mark.parametrize("how", ["closed", "aborted", "lost in a restart"])
async def test_a_session_that_is_over_takes_no_turn(gateway, how):
    session = await gateway.client.open_session(SessionSpec(session_id="a"))
    await turns(gateway, session, 1)
    if how == "closed":
        await gateway.client.close_session("a")
    elif how == "aborted":
        await gateway.client.abort_session("a")
    else:
        gateway.restart()
    with pytest.raises(GatewayError):
        await gateway.chat(session).complete(ASK, [])


async def test_a_session_that_nobody_opened_is_an_error_to_close_and_none_to_abort(gateway):
    await gateway.client.abort_session("nobody")
    with pytest.raises(GatewayError):
        await gateway.client.close_session("nobody")


async def test_a_session_s_id_is_used_once(gateway):
    await gateway.client.open_session(SessionSpec(session_id="a"))
    with pytest.raises(GatewayError):
        await gateway.client.open_session(SessionSpec(session_id="a", max_context_tokens=7))
