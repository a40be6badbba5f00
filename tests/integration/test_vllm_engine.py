"""What rljob promises about a real vLLM: which weights sampled a token, and that nothing else can be served."""

import asyncio
import json
import os
import shutil
import signal

import httpx
import pytest

from rljob.engine import EngineClient, GenerateRequest, OldWeightsError
from rljob.errors import CorruptError, DeadlineError, EngineError, EngineNotReadyError
from rljob.ids import PolicyVersion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

V = PolicyVersion
TOLERANCE = 1e-3
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}},
    }
]


async def serve(engine, policies, version):
    return await engine.switch(version, policies.publish(version))


async def sample_turn(engine, prompt, max_tokens, temperature=1.0):
    """A whole turn as a gateway asks for it: after an abort, prompt and tokens again. [(token, logprob, version)]"""
    sampled = []
    while len(sampled) < max_tokens:
        request = GenerateRequest(
            prompt_ids=[*prompt, *(token for token, _, _ in sampled)],
            max_tokens=max_tokens - len(sampled),
            temperature=temperature,
        )
        try:
            answer = await engine.generate(request)
        except EngineNotReadyError:
            await asyncio.sleep(0.01)
            continue
        sampled += [
            (token, p, answer.version)
            for token, p in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        if answer.finish_reason == "stop":
            break
    return sampled


def largest_error(policies, prompt, sampled, temperature=1.0, pretend=None):
    """Largest |Δ logprob| of the sampled tokens against the version each names (or against version `pretend`)."""
    ids = [*prompt, *(token for token, _, _ in sampled)]
    scores = {}
    worst = 0.0
    for at, (_, logprob, version) in enumerate(sampled):
        n = version.n if pretend is None else pretend
        if n not in scores:
            scores[n] = policies.score(n, ids, len(prompt), temperature)
        worst = max(worst, abs(scores[n][at] - logprob))
    return worst


async def test_every_token_names_the_weights_that_sampled_it_across_switches_in_flight(
    engine, policies
):
    await serve(engine, policies, V(1, 0))
    for n in range(1, 5):
        policies.publish(V(1, n))
    prompts = [[100 + at, 20, 30, 40 + at] for at in range(6)]
    temperatures = [1.0, 0.7, 1.3, 1.0, 1.0, 1.0]
    turns = [
        asyncio.create_task(sample_turn(engine, prompt, 700, temperature))
        for prompt, temperature in zip(prompts, temperatures, strict=True)
    ]
    for n in range(1, 5):
        await asyncio.sleep(0.3)
        assert (await serve(engine, policies, V(1, n))).verdict == "new"
    sampled = await asyncio.gather(*turns)
    assert {version.n for turn in sampled for _, _, version in turn} == {0, 1, 2, 3, 4}
    for prompt, temperature, turn in zip(prompts, temperatures, sampled, strict=True):
        assert largest_error(policies, prompt, turn, temperature) < TOLERANCE
        if any(version.n for _, _, version in turn):  # a turn may end before the first switch
            assert largest_error(policies, prompt, turn, temperature, pretend=0) > 100 * TOLERANCE


async def test_a_prefix_seen_under_old_weights_is_computed_anew_under_new_ones(engine, policies):
    prompt = [3 + (11 * at) % 1000 for at in range(400)]  # several cache blocks
    for version in (V(1, 1), V(1, 2), V(2, 1)):
        await serve(engine, policies, version)
        for _ in range(2):
            turn = await sample_turn(engine, prompt, 8)
            assert {named for _, _, named in turn} == {version}
            assert largest_error(policies, prompt, turn) < TOLERANCE


async def test_a_switch_to_the_version_being_served_does_nothing(engine, policies):
    await serve(engine, policies, V(1, 3))
    again = await serve(engine, policies, V(1, 3))
    assert again.already
    assert again.pause_seconds == 0


async def test_the_same_weights_under_a_new_name_are_indistinguishable(engine, policies):
    await serve(engine, policies, V(1, 3))
    result = await serve(engine, policies, V(3, 3))
    assert result.verdict == "indistinguishable"
    assert (await engine.status()).version == V(3, 3)


async def test_an_updater_that_dies_in_mid_switch_leaves_the_engine_serving(
    engine, policies, real_engine
):
    await serve(engine, policies, V(1, 0))
    running = asyncio.create_task(sample_turn(engine, [9, 8, 7], 300))
    await asyncio.sleep(0.1)
    order = {
        "incarnation": 1,
        "n": 4,
        "path": str(policies.publish(V(1, 4))),
        "timeout_seconds": 60,
    }
    body = json.dumps(order).encode()
    _, writer = await asyncio.open_connection(*real_engine.url.removeprefix("http://").split(":"))
    writer.write(
        b"POST /rljob/v1/switch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer only-for-tests\r\n"
    )
    writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    await writer.drain()
    writer.transport.abort()
    turn = await running
    assert turn[-1][2] == V(1, 4)
    assert largest_error(policies, [9, 8, 7], turn) < TOLERANCE


async def test_weights_with_one_wrong_tensor_are_refused_and_the_old_version_goes_on(
    engine, policies, tmp_path
):
    await serve(engine, policies, V(1, 1))
    bad = tmp_path / "bad"
    shutil.copytree(policies.publish(V(1, 2)), bad)
    weights = bytearray((bad / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (bad / "model.safetensors").write_bytes(weights)
    running = asyncio.create_task(sample_turn(engine, [1, 2, 3], 200))
    await asyncio.sleep(0.05)
    with pytest.raises(CorruptError, match="not the tensor that the manifest names"):
        await engine.switch(V(1, 2), bad)
    turn = await running
    assert {version for _, _, version in turn} == {V(1, 1)}
    assert largest_error(policies, [1, 2, 3], turn) < TOLERANCE


async def test_a_directory_under_another_name_or_digest_is_refused(engine, policies):
    await serve(engine, policies, V(1, 1))
    with pytest.raises(CorruptError, match="holds version 1-2"):
        await engine.switch(V(1, 7), policies.publish(V(1, 2)))
    with pytest.raises(CorruptError, match="digest"):
        await engine.switch(V(1, 2), policies.publish(V(1, 2)), "0" * 64)
    assert (await engine.status()).version == V(1, 1)


async def test_tool_calls_are_taken_apart_by_vllms_own_parser(engine, policies):
    text = 'I look.<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    ids = policies.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids
    by_text, by_ids = await engine.parse(TOOLS, text=text), await engine.parse(TOOLS, token_ids=ids)
    assert by_text == by_ids
    assert by_text.content == "I look."
    assert [(call.name, json.loads(call.arguments)) for call in by_text.tool_calls] == [
        ("bash", {"command": "ls"})
    ]
    assert (await engine.parse([], text="<tool_call>")).content == "<tool_call>"
    assert (await engine.parse(TOOLS, text="<tool_call>{no json")).tool_calls == []


async def test_nothing_but_health_is_answered_without_the_token(real_engine):
    async with EngineClient(real_engine.url, "wrong") as stranger:
        with pytest.raises(EngineError, match="401"):
            await stranger.status()
        with pytest.raises(EngineError, match="401"):
            await stranger.generate(GenerateRequest(prompt_ids=[1], max_tokens=1))
    async with httpx.AsyncClient(base_url=real_engine.url, trust_env=False) as http:
        assert (await http.get("/health")).status_code == 200


async def test_a_turn_past_its_deadline_is_dropped_by_the_engine(engine, policies):
    await serve(engine, policies, V(1, 0))
    with pytest.raises(DeadlineError):
        await engine.generate(
            GenerateRequest(prompt_ids=[1, 2], max_tokens=1000), timeout_seconds=0.2
        )
    prompt = [5, 6, 7]
    assert len(await sample_turn(engine, prompt, 5)) == 5


async def test_stop_tokens_end_a_turn_and_are_part_of_it(engine, policies):
    await serve(engine, policies, V(1, 0))
    request = GenerateRequest(
        prompt_ids=[1, 2], max_tokens=500, stop_token_ids=list(range(0, 1024, 2))
    )
    answer = await engine.generate(request)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] % 2 == 0


async def test_a_canary_that_scores_like_the_old_weights_restarts_the_engine_without_a_version(
    engine, policies, real_engine
):
    await serve(engine, policies, V(1, 1))
    before = await engine.status()
    with pytest.raises(OldWeightsError, match="does not score like version 8-1"):
        # the tensors are those being served already: as if a load had done nothing
        await engine.switch(V(8, 1), policies.publish(V(8, 1), canary_of=2))
    with pytest.raises(EngineError):
        await engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=1))
    assert real_engine.wait_for_exit(20) != 0
    assert real_engine.is_gone(5)
    real_engine.start()
    after = await engine.status()
    assert (after.state, after.version) == ("empty", None)
    assert after.boot_id != before.boot_id
    with pytest.raises(EngineNotReadyError):
        await engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=1))
    await serve(engine, policies, V(1, 1))
    answer = await engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=4))
    assert (answer.version, answer.boot_id) == (V(1, 1), after.boot_id)


async def test_an_engine_whose_core_is_killed_ends_with_a_failure_and_leaves_nothing(
    engine, policies, real_engine
):
    await serve(engine, policies, V(1, 1))
    turn = asyncio.create_task(engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=900)))
    await asyncio.sleep(0.1)
    for pid in real_engine.children():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        await turn
    assert real_engine.wait_for_exit(10) == 1
    assert real_engine.is_gone(5)


async def test_an_engine_whose_core_hangs_ends_with_a_failure_though_health_is_well(
    engine, policies, real_engine
):
    await serve(engine, policies, V(1, 1))
    turn = asyncio.create_task(engine.generate(GenerateRequest(prompt_ids=[1], max_tokens=900)))
    await asyncio.sleep(0.1)
    for pid in real_engine.children():
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineError):
        await turn
    assert real_engine.wait_for_exit(60) != 0
    assert real_engine.is_gone(5)
