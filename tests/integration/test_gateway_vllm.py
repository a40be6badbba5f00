"""The gateway on a real vLLM: what a chain records is what the engine saw, sampled and scored."""

import asyncio

import msgspec
import pytest

from rljob.clock import SystemClock
from rljob.codec import unpack_chains
from rljob.engine import EngineClient
from rljob.gateway import SessionSampling, SessionSpec
from rljob.ids import PolicyVersion
from rljob_services.gateway.adapters.openai import read_request
from rljob_services.gateway.session import Service
from rljob_services.gateway.sessions import Sessions
from rljob_services.gateway.template import load_template
from rljob_services.gateway.transport import PoolTransport
from rljob_services.gateway.turn import ReadyGate

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TOKEN = "only-for-tests"
TOLERANCE = 1e-3


@pytest.fixture
async def sessions(real_engine, policies):
    template = load_template(policies.model_dir)
    transport = PoolTransport(real_engine.url)
    async with EngineClient(real_engine.url, TOKEN, transport=transport) as engine:
        clock = SystemClock()
        gate = ReadyGate(engine, clock)
        yield Sessions(Service(template, engine, gate, clock))
        await gate.aclose()


async def episode(sessions, name: str, num_turns: int):
    """A conversation of so many turns; its chains."""
    sampling = SessionSampling(temperature=0.8, max_tokens_per_turn=120)
    session = sessions.open(SessionSpec(session_id=name, max_context_tokens=900, sampling=sampling))
    messages = [{"role": "user", "content": f"Begin {name}"}]
    for turn in range(num_turns):
        request = read_request(msgspec.json.encode({"messages": messages}))
        answer = await session.answer(request, agent_id="main")
        messages += [answer.message, {"role": "user", "content": f"And {turn}? <|im_end|>"}]
    return unpack_chains(await session.close())


async def test_a_whole_episode_across_switches_scores_under_the_versions_that_it_names(
    sessions, engine, policies
):
    versions = [PolicyVersion(7, n) for n in range(4)]
    paths = [policies.publish(version) for version in versions]
    await engine.switch(versions[0], paths[0])
    running = [asyncio.create_task(episode(sessions, f"e{at}", 5)) for at in range(6)]
    for version, path in zip(versions[1:], paths[1:], strict=True):
        await asyncio.sleep(0.3)
        await engine.switch(version, path)
    seen = set()
    for (chain,) in await asyncio.gather(*running):
        at = 0
        for span in chain.version_spans:
            seen.add(span.n)
            end = span.start + span.length
            scored = policies.score(span.n, chain.tokens[:end], span.start, 0.8)
            named = chain.logprobs[at : at + span.length]
            assert max(abs(a - b) for a, b in zip(scored, named, strict=True)) < TOLERANCE
            at += span.length
        assert at == sum(chain.action_mask) == len(chain.logprobs)
        assert sum(chain.action_mask) > 100
    assert len(seen) > 1
