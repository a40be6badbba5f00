import json
import pickle

import httpx
import pytest

from rljob.engine import EngineClient, GenerateRequest, OldWeightsError
from rljob.errors import CorruptError, DeadlineError, EngineError, EngineNotReadyError
from rljob.ids import PolicyVersion
from rljob.testing.clock import ScaledClock
from rljob.testing.engine_server import SimulatedEngine

TURN = GenerateRequest(prompt_ids=[1], max_tokens=4, temperature=0.7, top_p=0.9, stop_token_ids=[2])
STAMP = {"x-rljob-boot-id": "b", "x-rljob-incarnation": "1", "x-rljob-n": "2"}


def client_of(status, body, headers=None):
    seen = []

    def handle(request):
        seen.append(request)
        return httpx.Response(status, json=body, headers=headers)

    return EngineClient("http://engine", "secret", transport=httpx.MockTransport(handle)), seen


def choice(tokens, logprobs, reason="stop"):
    return {
        "choices": [
            {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
        ]
    }


async def test_a_turn_is_asked_for_by_token_ids_without_a_seed():
    client, seen = client_of(200, choice([3, 2], [-1.0, -0.5]), STAMP)
    async with client:
        answer = await client.generate(TURN)
    assert (answer.token_ids, answer.version, answer.boot_id) == ([3, 2], PolicyVersion(1, 2), "b")
    body = json.loads(seen[0].content)
    assert body["prompt"] == [1]
    assert body["logprobs"] == 0
    assert "seed" not in body
    assert seen[0].headers["authorization"] == "Bearer secret"


async def test_a_turn_aborted_before_its_first_token_is_an_empty_generation():
    client, _ = client_of(200, {"choices": [{"finish_reason": "abort", "logprobs": None}]}, STAMP)
    async with client:
        answer = await client.generate(TURN)
    assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([], [], "abort")


@pytest.mark.parametrize(
    ("status", "body", "headers", "error"),
    [
        (200, choice([3, 2], [-1.0]), STAMP, "2 tokens but 1 logprobs"),
        (200, choice([3], [-1.0]), {}, "is vllm_plugin loaded"),
        (200, choice([3], [-1.0]), STAMP | {"x-rljob-n": "x"}, "is vllm_plugin loaded"),
        (200, choice([3], [-1.0], "odd"), STAMP, "protocol"),
        (200, {"choices": "none"}, STAMP, "protocol"),
        (400, {"error": "too long"}, {}, "400.*too long"),
        (503, {"error": "dead"}, {"x-rljob-state": "failed"}, "503"),
    ],
)
async def test_an_answer_that_the_protocol_does_not_allow_is_an_engine_error(
    status, body, headers, error
):
    client, _ = client_of(status, body, headers)
    async with client:
        with pytest.raises(EngineError, match=error) as caught:
            await client.generate(TURN)
    assert not isinstance(caught.value, EngineNotReadyError)


@pytest.mark.parametrize("state", ["empty", "switching", "starting"])
async def test_an_engine_without_a_version_says_when_to_ask_again(state):
    client, _ = client_of(503, {}, {"x-rljob-state": state, "retry-after": "2"})
    async with client:
        with pytest.raises(EngineNotReadyError) as caught:
            await client.generate(TURN)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.state, again.retry_after_seconds) == (state, 2.0)


async def test_refused_weights_and_old_weights_are_told_apart():
    for status, headers, kind in (
        (422, {}, CorruptError),
        (500, {"x-rljob-verdict": "old"}, OldWeightsError),
    ):
        client, _ = client_of(status, {"error": "why"}, headers)
        async with client:
            with pytest.raises(kind, match="why"):
                await client.switch(PolicyVersion(1, 1), "/weights")


async def test_an_engine_that_is_not_there_is_an_engine_error(free_port):
    async with EngineClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(EngineError, match="unreachable"):
            await client.status()


async def test_waiting_for_a_version_has_a_deadline_that_says_what_it_waited_for():
    async with EngineClient(
        "http://engine", clock=ScaledClock(100), transport=httpx.ASGITransport(SimulatedEngine())
    ) as client:
        with pytest.raises(DeadlineError, match=r"within 5 s \(empty\)"):
            await client.wait_ready(5.0)
