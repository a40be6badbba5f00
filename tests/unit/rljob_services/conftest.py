"""A small real model directory and a scripted engine for the gateway's tests."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rljob.engine import EngineStatus, GenerateRequest, Generation, ParsedTurn
from rljob.ids import PolicyVersion
from rljob.testing import simulated_policy
from rljob_services.gateway.session import Service
from rljob_services.gateway.sessions import Sessions
from rljob_services.gateway.template import ChatTemplate, load_template
from rljob_services.gateway.turn import ReadyGate
from rljob_trainer.recipes.quickstart.tokenizer import save_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's tokenizer and chat template, trained on less."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(train_tokenizer(512, 100), folder)
    return folder


@pytest.fixture(scope="session")
def template(model_dir: Path) -> ChatTemplate:
    return load_template(model_dir)


class ManualClock:
    """Time that passes only in `sleep`, and there without waiting."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


Step = Generation | Exception | Callable[[GenerateRequest], Any]


class ScriptedEngine:
    """Answers with what the test wrote down, one step per submission, and remembers what it was asked."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.steps: list[Step] = []
        self.states: list[Any] = []
        self.requests: list[GenerateRequest] = []
        self.parse_error: Exception | None = None

    def says(
        self, text: str, *, n: int = 0, reason: str = "stop", num_tokens: int | None = None
    ) -> Generation:
        """A generation of `text`; the stop token follows where the reason is stop."""
        ids = self.template.vocabulary.encode(text)[:num_tokens]
        ids += [self.template.stop_token_ids[0]] if reason == "stop" else []
        logprobs = [-0.5 - i / 1000 for i in range(len(ids))]
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            version=PolicyVersion(1, n),
            boot_id="b",
        )

    def will_say(self, text: str, **options: Any) -> Generation:
        generation = self.says(text, **options)
        self.steps.append(generation)
        return generation

    async def generate(
        self, request: GenerateRequest, *, timeout_seconds: float = 300.0
    ) -> Generation:
        self.requests.append(request)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return await step(request) if callable(step) else step

    async def parse(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        text: str | None = None,
        timeout_seconds: float = 30.0,
    ) -> ParsedTurn:
        if self.parse_error:
            raise self.parse_error
        found = simulated_policy.parse(text or "", bool(tools))
        import msgspec

        return msgspec.convert(found, ParsedTurn)

    async def status(self, *, timeout_seconds: float = 10.0) -> EngineStatus:
        state = self.states.pop(0) if self.states else "ready"
        if isinstance(state, Exception):
            raise state
        return EngineStatus(boot_id="b", version=PolicyVersion(1, 0), state=state)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def engine(template: ChatTemplate) -> ScriptedEngine:
    return ScriptedEngine(template)


@pytest.fixture
def sessions(template: ChatTemplate, engine: ScriptedEngine, clock: ManualClock) -> Sessions:
    return Sessions(Service(template, engine, ReadyGate(engine, clock), clock))
