"""One real vLLM engine per test run, on a tiny model with random weights and a real tokenizer.

policies   that model in several versions: published into an artifact store, and scored with transformers
engine     a client of the running engine           real_engine   its process: start, kill, log
"""

import contextlib
import ctypes
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob.engine import EngineClient
from rljob.ids import PolicyVersion
from rljob.settings import Settings
from rljob.weights import Canary, WeightStore

START_SECONDS = 240
TOKEN = "only-for-tests"
VOCABULARY = 1024
CONTEXT = 1024
NOISE = 0.15
"""Added to every weight per version: large enough to tell any two apart by one token's log probability."""

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Policies:
    """A tied two-layer Qwen3 in versions: every n has weights of its own, whatever the incarnation."""

    def __init__(self, artifacts: Path) -> None:
        self.artifacts = artifacts
        self.store = WeightStore(artifacts)
        self.model_dir = artifacts / "prepared" / "model"
        self._models: dict[int, Any] = {}
        self._make_tokenizer()
        self.model(0).save_pretrained(self.model_dir)

    def _make_tokenizer(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[
                "<|endoftext|>",
                "<|im_start|>",
                "<|im_end|>",
                "<tool_call>",
                "</tool_call>",
            ],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(
            [inspect.getsource(module) for module in (json, inspect)], trainer
        )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            chat_template=TEMPLATE,
        )
        fast.save_pretrained(self.model_dir)
        self.tokenizer = tokenizer

    def model(self, n: int) -> Any:
        """The transformers model of version n."""
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        if n not in self._models:
            config = Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=CONTEXT,
                tie_word_embeddings=True,
                dtype="float32",
            )
            torch.manual_seed(n)
            model = Qwen3ForCausalLM(config).float().eval()
            for parameter in model.parameters():
                parameter.data += NOISE * torch.randn_like(parameter)
            self._models[n] = model
        return self._models[n]

    def score(self, n: int, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        """Log probabilities of `ids[start:]` under version n."""
        import torch

        with torch.no_grad():
            logits = self.model(n)(torch.tensor([ids])).logits[0]
        logprobs = (logits / temperature).log_softmax(-1)
        return [float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids))]

    def publish(self, version: PolicyVersion, *, canary_of: int | None = None) -> Path:
        """Publish version n's weights as `version`, with the canary of another n if a test wants a liar."""
        if version not in self.store.list():
            source = self.artifacts / f"source-{version}"
            self.model(version.n).save_pretrained(source)
            ids = [5 + (7 * at) % 900 for at in range(48)]
            scored = self.score(version.n if canary_of is None else canary_of, ids, 16)
            canary = Canary(prompt_ids=ids[:16], token_ids=ids[16:], logprobs=scored)
            self.store.publish(version, source, canary)
        return self.store.path(version)


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """Versions 0, 1, 2 … of one tiny model."""
    return Policies(tmp_path_factory.mktemp("policies"))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class RealEngine:
    """The engine component as a process, with the manifest that a user would write."""

    def __init__(self, policies: Policies, folder: Path, port: int) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "engine.log"
        self.process: subprocess.Popen[bytes] | None = None
        job_file = folder / "job.json"
        job_file.write_text(json.dumps(_job()))
        self._env = (
            os.environ
            | Settings(
                component="engine-0",
                job_file=str(job_file),
                artifacts=str(policies.artifacts),
                work_dir=str(folder),
                engine_url=self.url,
                token=TOKEN,
            ).to_env()
        )

    def start(self) -> None:
        """Start it and wait until its routes answer."""
        import httpx

        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rljob_rollout_worker.engine_process"],
                env=self._env,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (one call into libc, no lock)
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError(
            "the engine did not start:\n" + "\n".join(self.log.read_text().splitlines()[-30:])
        )

    @property
    def has_ended(self) -> bool:
        """Whether the process has exited."""
        return self.process is None or self.process.poll() is not None

    def children(self) -> list[int]:
        """Its processes but the first: vLLM's engine core."""
        assert self.process
        return [pid for pid in self._running() if pid != self.process.pid]

    def wait_for_exit(self, seconds: float) -> int:
        """Exit code of a process that ends by itself."""
        assert self.process
        return self.process.wait(seconds)

    def is_gone(self, seconds: float) -> bool:
        """Whether nothing of it is left running within `seconds`."""
        deadline = time.monotonic() + seconds
        while self._running():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _running(self) -> list[int]:
        """Processes of its group, zombies (which only wait for their parent) left out."""
        assert self.process
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.process.pid and state != "Z":
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """`kill -9` of the engine and everything under it."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None


def _job() -> dict[str, Any]:
    task = {"name": "t", "type": "shell_files", "sandbox": {"pool": "p"}}
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "engine-test"},
        "spec": {
            "model": {"source": "file://model", "maxContextLength": CONTEXT},
            "data": {"train": {"source": "file://train.jsonl"}},
            "tasks": [task],
            "rollout": {
                "maxConcurrentEpisodes": 16,
                "engine": {"env": {"RLJOB_ENGINE_STALL_SECONDS": "15"}},
            },
            "trainer": {"steps": 1, "groupsPerStep": 1},
            "sandboxPools": [{"name": "p"}],
        },
    }


@pytest.fixture(scope="session")
def real_engine(
    policies: Policies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEngine]:
    """The one engine of the run."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    engine = RealEngine(policies, tmp_path_factory.mktemp("engine"), port)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
async def engine(real_engine: RealEngine) -> AsyncIterator[EngineClient]:
    """A client of it; a test before may have ended the process."""
    if real_engine.has_ended:
        real_engine.start()
    async with EngineClient(real_engine.url, TOKEN) as client:
        yield client
