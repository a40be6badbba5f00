"""The gateway's client against a scripted server on a real socket."""

import asyncio
import json

import pytest

from rljob import gateway as gateway_module
from rljob.codec import pack_chains
from rljob.errors import DeadlineError, EngineError, GatewayError, TaskError
from rljob.gateway import GatewayClient, Session, SessionChat, SessionSpec


class Script:
    """Answers each request with the next step: (status, headers, body), or None to hang up."""

    def __init__(self):
        self.steps = []
        self.requests = []

    async def handle(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    line for line in head.split("\r\n") if line.startswith("content-length")
                )
                body = await reader.readexactly(int(length.split(":")[1]))
                self.requests.append((head, body))
                if (step := self.steps.pop(0)) is None:
                    break
                status, headers, answer = step
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Length: {len(answer)}\r\n{lines}\r\n".encode()
                    + answer
                )
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def script():
    return Script()


@pytest.fixture
async def client(script):
    server = await asyncio.start_server(script.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        async with GatewayClient(url, url, "job-token") as client:
            yield client
        server.close()


def said(text="Hi", status=200, boot_id="b1", **headers):
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return (
        status,
        {"x-rljob-boot-id": boot_id, **headers},
        json.dumps({"choices": [choice]}).encode(),
    )


def failed(status, kind, message="why"):
    return status, {}, json.dumps({"error": {"message": message, "type": kind}}).encode()


OPENED = (200, {}, b'{"id": "t1-0.0", "token": "secret", "boot_id": "b1"}')


async def opened(client, script) -> Session:
    script.steps.insert(0, OPENED)
    return await client.open_session(SessionSpec(session_id="t1-0.0", turn_seconds=7))


async def test_a_session_is_opened_with_the_job_s_token_and_spoken_to_with_its_own(client, script):
    session = await opened(client, script)
    assert session.base_url == f"{client.data_url}/sessions/t1-0.0/v1"
    script.steps = [said("Hi")]
    reply = await SessionChat(session).complete([{"role": "user", "content": "go"}], [])
    assert (reply.message["content"], reply.finish_reason, reply.context_full) == (
        "Hi",
        "stop",
        False,
    )
    (opening, _), (turn, body) = script.requests
    assert "Bearer job-token" in opening
    assert "Bearer secret" in turn
    assert turn.startswith("POST /sessions/t1-0.0/v1/chat/completions ")
    assert json.loads(body) == {"messages": [{"role": "user", "content": "go"}]}


async def test_a_chat_without_a_shared_pool_makes_its_own(client, script):
    session = await opened(client, script)
    session.pool = None
    script.steps = [said("Hi")]
    chat = SessionChat(session)
    assert (await chat.complete([{"role": "user", "content": "go"}], [])).message["content"] == "Hi"
    await chat._pool.aclose()


async def test_tools_and_a_full_context_cross_the_wire(client, script):
    chat = SessionChat(await opened(client, script))
    script.steps = [said("", **{"x-rljob-context-full": "1", "x-rljob-engine-wait-seconds": "2.5"})]
    reply = await chat.complete([{"role": "user", "content": "go"}], [{"type": "function"}])
    assert reply.context_full
    assert chat.engine_wait_seconds == 2.5
    assert json.loads(script.requests[-1][1])["tools"] == [{"type": "function"}]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (failed(502, "EngineError"), EngineError),
        (failed(504, "DeadlineError"), DeadlineError),
        (failed(404, "GatewayError"), GatewayError),
        (failed(400, "invalid_request_error"), TaskError),
        ((500, {}, b"Internal Server Error"), GatewayError),
        ((200, {"x-rljob-boot-id": "b1"}, b"[]"), GatewayError),
        ((200, {"x-rljob-boot-id": "b1"}, b'{"choices": []}'), GatewayError),
        (said(boot_id="b2"), GatewayError),
    ],
)
async def test_every_failure_is_an_error_by_name(client, script, answer, error):
    chat = SessionChat(await opened(client, script))
    script.steps = [answer]
    with pytest.raises(error):
        await chat.complete([{"role": "user", "content": "go"}], [])


async def test_a_turn_whose_connection_breaks_is_asked_again_under_the_same_key(client, script):
    chat = SessionChat(await opened(client, script))
    script.steps = [None, None, said("Hi")]
    assert (await chat.complete([{"role": "user", "content": "go"}], [])).message["content"] == "Hi"
    keys = {
        line
        for head, _ in script.requests[1:]
        for line in head.split("\r\n")
        if "idempotency" in line
    }
    assert len(script.requests) == 4
    assert len(keys) == 1


async def test_a_closed_session_gives_its_chains(client, script):
    headers = {"x-rljob-turns": "3", "x-rljob-boot-id": "b1", "x-rljob-engine-wait-seconds": "1.5"}
    script.steps = [(200, headers, pack_chains([]))]
    closed = await client.close_session("t1-0.0")
    assert (closed.chains, closed.turns, closed.boot_id, closed.engine_wait_seconds) == (
        [],
        3,
        "b1",
        1.5,
    )


@pytest.mark.parametrize("body", [b"", b"nonsense"])
async def test_chains_that_do_not_decode_are_a_gateway_error(client, script, body):
    headers = {"x-rljob-turns": "3", "x-rljob-boot-id": "b1", "x-rljob-engine-wait-seconds": "1.5"}
    script.steps = [(200, headers, body)]
    with pytest.raises(GatewayError, match="protocol"):
        await client.close_session("t1-0.0")


async def test_a_gateway_that_cannot_be_reached_is_an_error_after_a_bounded_time(
    free_port, monkeypatch
):
    monkeypatch.setattr(gateway_module, "RETRY_SECONDS", 0.3)
    url = f"http://127.0.0.1:{free_port()}"
    async with GatewayClient(url, url, "t") as client:
        with pytest.raises(GatewayError, match="unreachable"):
            await client.open_session(SessionSpec(session_id="a"))


async def test_a_gateway_that_does_not_answer_is_an_error(client, script, monkeypatch):
    monkeypatch.setattr(gateway_module, "CONTROL_SECONDS", 0.1)

    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, GatewayClient(url, url, "t") as lonely:
        with pytest.raises(GatewayError, match="did not answer"):
            await lonely.abort_session("a")
        server.close()
