"""The two ports: routes, tokens, errors and headers."""

import httpx
import msgspec
import pytest

from rljob.codec import unpack_chains
from rljob.errors import DeadlineError, EngineError
from rljob.gateway import SessionSpec
from rljob_services.gateway import app as app_module
from rljob_services.gateway.app import control_app, data_app
from rljob_services.gateway.turn import EngineGoneError

ASK = {"messages": [{"role": "user", "content": "go"}]}
JOB = {"authorization": "Bearer job-token"}
PATH = "/sessions/e1/v1/chat/completions"


def client(app) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


@pytest.fixture
async def control(sessions):
    async with client(control_app(sessions, "job-token")) as http:
        yield http


@pytest.fixture
async def data(sessions):
    async with client(data_app(sessions, "policy")) as http:
        yield http


@pytest.fixture
async def mine(control):
    """Headers of an open session `e1`."""
    spec = msgspec.json.encode(SessionSpec(session_id="e1", model="tiny"))
    reply = await control.post("/sessions", content=spec, headers=JOB)
    return {"authorization": f"Bearer {reply.json()['token']}"}


async def test_an_episode_over_both_ports(control, data, mine, engine, sessions):
    engine.will_say("Done")
    reply = await data.post(PATH, json=ASK, headers=mine)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "Done"
    assert reply.json()["model"] == "tiny"
    assert reply.headers["x-rljob-boot-id"] == sessions.boot_id
    assert "x-rljob-context-full" not in reply.headers
    closed = await control.post("/sessions/e1/close", headers=JOB)
    (chain,) = unpack_chains(closed.content)
    assert sum(chain.action_mask) == len(chain.logprobs) > 0
    assert closed.headers["x-rljob-turns"] == "1"
    assert float(closed.headers["x-rljob-engine-wait-seconds"]) == 0
    assert (await control.post("/sessions/e1/close", headers=JOB)).content == closed.content
    assert (await control.delete("/sessions/e1", headers=JOB)).status_code == 200
    assert (await control.post("/sessions/e1/close", headers=JOB)).status_code == 404


async def test_streaming_is_synthesised(data, mine, engine):
    engine.will_say("Done")
    reply = await data.post(PATH, json={**ASK, "stream": True}, headers=mine)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("data: [DONE]\n\n")
    assert '"content":"Done"' in reply.text


@pytest.mark.parametrize("key", ["idempotency-key", "x-request-id"])
async def test_a_repeated_request_is_answered_once_sampled_once(data, mine, engine, key):
    engine.will_say("Done")
    replies = [await data.post(PATH, json=ASK, headers={**mine, key: "k"}) for _ in range(3)]
    assert len({reply.content for reply in replies}) == 1
    assert len(engine.requests) == 1


async def test_requests_of_one_trace_are_told_apart_by_their_body(data, mine, engine):
    for text in ("One", "Two"):
        engine.will_say(text)
    headers = {**mine, "x-request-id": "trace"}
    other = {"messages": [{"role": "user", "content": "other"}]}
    replies = [await data.post(PATH, json=body, headers=headers) for body in (ASK, other, ASK)]
    said = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
    assert said == ["One", "Two", "One"]


async def test_a_key_that_is_used_for_another_request_is_refused(data, mine, engine):
    engine.will_say("One")
    headers = {**mine, "idempotency-key": "k"}
    await data.post(PATH, json=ASK, headers=headers)
    other = {"messages": [{"role": "user", "content": "other"}]}
    assert (await data.post(PATH, json=other, headers=headers)).status_code == 400


async def test_a_full_context_is_told_in_a_header(data, control, engine):
    spec = msgspec.json.encode(SessionSpec(session_id="e2", max_context_tokens=2))
    token = (await control.post("/sessions", content=spec, headers=JOB)).json()["token"]
    headers = {"authorization": f"Bearer {token}"}
    reply = await data.post("/sessions/e2/v1/chat/completions", json=ASK, headers=headers)
    assert reply.headers["x-rljob-context-full"] == "1"
    assert reply.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (EngineError("nonsense"), 502, "EngineError"),
        (EngineGoneError("unreachable"), 504, "EngineError"),
        (DeadlineError("late"), 504, "DeadlineError"),
    ],
)
async def test_a_failure_is_told_by_its_class(data, mine, engine, error, status, name):
    engine.steps = [error]
    reply = await data.post(PATH, json=ASK, headers=mine)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == name
    assert reply.headers["x-should-retry"] == "false"
    assert str(error) in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [{"messages": []}, {**ASK, "n": 3}, {"messages": [{"role": "x"}]}])
async def test_a_bad_request_is_openai_s_400(data, mine, body):
    reply = await data.post(PATH, json=body, headers=mine)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_without_end_is_refused(data, mine, monkeypatch):
    monkeypatch.setattr(app_module, "MAX_BODY_BYTES", 10)

    async def chunks():
        for _ in range(5):
            yield b"12345"

    for content in (b"12345678901", chunks()):
        reply = await data.post(PATH, content=content, headers=mine)
        assert reply.status_code == 400


async def test_a_session_is_closed_to_strangers(data, mine, control):
    assert (await data.post(PATH, json=ASK)).status_code == 401
    assert (await data.post(PATH, json=ASK, headers=JOB)).status_code == 401
    assert (await data.get("/sessions/e1/v1/models")).status_code == 401
    for call in (
        control.post("/sessions", content=b"{}"),
        control.post("/sessions/e1/close", headers=mine),
        control.delete("/sessions/e1", headers=mine),
    ):
        assert (await call).status_code == 401


async def test_control_is_not_on_the_data_port(data):
    assert (await data.post("/sessions", headers=JOB)).status_code == 404
    assert (await data.post("/sessions/e1/close", headers=JOB)).status_code == 404


async def test_an_unknown_session_is_a_gateway_error(data):
    reply = await data.post(PATH, json=ASK, headers=JOB)
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "GatewayError")


async def test_a_closed_session_takes_no_turn(data, control, mine):
    await control.post("/sessions/e1/close", headers=JOB)
    reply = await data.post(PATH, json=ASK, headers=mine)
    assert (reply.status_code, reply.json()["error"]["type"]) == (409, "GatewayError")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"session_id": 3}', b'{"session_id": "a/b"}'])
async def test_a_malformed_session_is_refused(control, body):
    reply = await control.post("/sessions", content=body, headers=JOB)
    assert reply.status_code == 400


async def test_a_session_s_id_is_taken(control, mine):
    spec = msgspec.json.encode(SessionSpec(session_id="e1", max_context_tokens=9))
    assert (await control.post("/sessions", content=spec, headers=JOB)).status_code == 409


async def test_models_health_and_metrics(data, control, mine):
    assert (await data.get("/v1/models")).json()["data"][0]["id"] == "policy"
    assert (await data.get("/sessions/e1/v1/models", headers=mine)).json()["data"][0]["id"] == (
        "tiny"
    )
    for port in (data, control):
        assert (await port.get("/healthz")).json()["ok"] is True
    metrics = await data.get("/metrics")
    assert "rljob_gateway_sessions 1.0" in metrics.text
