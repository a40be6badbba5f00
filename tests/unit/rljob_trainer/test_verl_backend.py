"""The verl backend against plain torch, against published vectors, and against itself after a checkpoint.

Vectors: four tokens, logπ, logold, logμ below; means of the published formulas. The reference step is the one that verl
and plain torch agreed on when the backend was chosen.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rljob.api.rljob_types import Algorithm, Correction, Optimizer
from rljob_trainer.backends.base import TrainBatch, TrainRow
from rljob_trainer.backends.verl import VerlBackend
from rljob_trainer.backends.verl_engine import loss_function
from rljob_trainer.backends.verl_rows import corrections, jagged, micro_batches, tensordict

pytestmark = [
    pytest.mark.verl,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(
        "ignore"
    ),  # of torch and transformers in the plain-torch halves of the tests
]

ADAMW = Optimizer(learning_rate=1e-3, weight_decay=0.01, betas=(0.9, 0.999))
LOG_NEW = [-0.2, -0.5, -2.0, -0.1]
LOG_OLD = [-1.4, -0.5, -1.5, -0.4]
LOG_ROLLOUT = [-1.5, -1.4, -0.9, -0.05]


def make_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Qwen3; the defaults are those of the reference step."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "head_dim": 64,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768}
    settings = {**sizes, **heads, "tie_word_embeddings": False, "dtype": "float32", **changes}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**settings))
    model.to(getattr(torch, settings["dtype"])).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return make_model(folder, vocab_size=96, hidden_size=32, intermediate_size=64, head_dim=16)


@pytest.fixture
def backend() -> Iterator[VerlBackend]:
    backend = VerlBackend()
    yield backend
    backend.close()


def start(
    backend: VerlBackend, model: Path, optimizer: Optimizer = ADAMW, tokens: int = 2048
) -> VerlBackend:
    backend.start(model, 1, optimizer, tokens, seed=0)
    return backend


def make_rows(count: int, seed: int = 0, vocab: int = 96) -> list[TrainRow]:
    """Rows of different lengths with holes in their masks; every third has advantage 0, two belong to one episode."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        prompt, response = int(rng.integers(1, 9)), int(rng.integers(6, 30))
        mask = rng.random(response) < 0.6
        mask[-1] = True
        rows.append(
            TrainRow(
                episode=f"t{max(0, index - 1)}-0.0",
                tokens=rng.integers(0, vocab, prompt + response).astype(np.int32),
                prompt_length=prompt,
                mask=mask,
                logprobs=np.where(mask, -4.5 + 0.3 * rng.standard_normal(response), 0).astype(
                    np.float32
                ),
                advantage=[0.0, 1.3, -0.8][index % 3],
            )
        )
    pair = int(rows[0].mask.sum()), int(rows[1].mask.sum())
    rows[0] = dataclasses.replace(rows[0], advantage=1.3, share=pair[0] / sum(pair))
    rows[1] = dataclasses.replace(rows[1], advantage=1.3, share=pair[1] / sum(pair))
    return rows


# ── against plain torch ──


def torch_logprobs(net: Any, row: TrainRow, temperature: float) -> Any:
    """[R] under a plain transformers model, one row at a time, so without padding."""
    import torch

    ids = torch.from_numpy(row.tokens.astype(np.int64))
    logits = net(input_ids=ids[None], use_cache=False).logits[0] / temperature
    scores = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[1:, None])[:, 0]
    return scores[row.prompt_length - 1 :]


def torch_step(
    net: Any, rows: Sequence[TrainRow], temperature: float, by_episode: bool
) -> tuple[float, float]:
    """Loss and gradient norm of the clipped objective (0.2, 0.28, dual clip 3), rows of advantage 0 included."""
    import torch

    tokens = sum(int(row.mask.sum()) for row in rows)
    episodes = len({row.episode for row in rows})
    loss = torch.zeros(())
    for row in rows:
        ratio = (torch_logprobs(net, row, temperature) - torch.from_numpy(row.logprobs)).exp()
        objective = -torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.28) * row.advantage)
        if row.advantage < 0:
            objective = objective.clamp(max=-3.0 * row.advantage)
        counted = objective[torch.from_numpy(row.mask)]
        loss = loss + (
            counted.mean() * row.share / episodes if by_episode else counted.sum() / tokens
        )
    loss.backward()
    return float(loss), float(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))


@pytest.mark.parametrize(
    ("aggregation", "temperature"), [("token_mean", 0.7), ("seq_mean_token_mean", 1.0)]
)
def test_a_step_is_that_of_plain_torch(
    backend: VerlBackend, small_model: Path, tmp_path: Path, aggregation: str, temperature: float
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    rows = make_rows(11)
    net = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    loss, norm = torch_step(net, rows, temperature, aggregation == "seq_mean_token_mean")
    adamw.step()

    start(backend, small_model, tokens=96)
    assert len(list(micro_batches(rows, 96))) > 3
    algorithm = Algorithm(clip_ratio_high=0.28, loss_aggregation=aggregation)
    numbers = backend.train_step(TrainBatch(step=1, rows=rows, temperature=temperature), algorithm)
    assert numbers["loss"] == pytest.approx(loss, abs=1e-6)
    assert numbers["grad_norm"] == pytest.approx(norm, rel=1e-5)
    backend.export_weights(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in net.state_dict().items():
        # Adam's first step is the sign of the gradient: where that is about 0, rounding decides it.
        assert (after[name] - tensor).abs().mean() < 2e-6, name


def test_log_probabilities_are_those_of_plain_torch_in_the_order_of_the_rows(
    backend: VerlBackend, small_model: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    rows = make_rows(9, seed=3)
    net = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    with torch.no_grad():
        expected = [torch_logprobs(net, row, 0.8).numpy() for row in rows]
    found = start(backend, small_model, tokens=64).logprobs(rows, 0.8)
    for row, mine, theirs in zip(rows, found, expected, strict=True):
        np.testing.assert_allclose(mine[row.mask], theirs[row.mask], atol=2e-6)


def test_a_batch_without_any_advantage_still_moves_by_momentum_and_decay(
    backend: VerlBackend, small_model: Path, tmp_path: Path
) -> None:
    start(backend, small_model)
    rows = make_rows(5)
    backend.train_step(TrainBatch(step=1, rows=rows, temperature=1.0), Algorithm())
    before = exported(backend, tmp_path / "a")
    flat = [dataclasses.replace(row, advantage=0.0) for row in rows]
    numbers = backend.train_step(TrainBatch(step=2, rows=flat, temperature=1.0), Algorithm())
    assert (numbers["loss"], numbers["grad_norm"]) == (0.0, 0.0)
    assert before != exported(backend, tmp_path / "b")


# ── against published numbers ──


def test_three_steps_give_the_reference_losses(backend: VerlBackend, model: Path) -> None:
    import torch

    start(backend, model, tokens=2048)
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(8):
        lengths = (128 - index, 384 - 3 * index)
        prompt, response = (
            torch.randint(10, 2048, (length,), generator=generator) for length in lengths
        )
        mask = np.ones(len(response), dtype=bool)
        mask[5:9] = False
        tokens = torch.cat([prompt, response]).numpy().astype(np.int32)
        rows.append(
            TrainRow(
                episode=f"t0-0.{index}",
                tokens=tokens,
                prompt_length=len(prompt),
                mask=mask,
                logprobs=mask * 0.0,
            )
        )
    advantages = backend.advantages(
        [float(index % 2) for index in range(8)], ["g"] * 8, Algorithm()
    )
    old = backend.logprobs(rows, 1.0)
    rows = [
        dataclasses.replace(r, advantage=a, logprobs=o)
        for r, a, o in zip(rows, advantages, old, strict=True)
    ]
    steps = [
        backend.train_step(TrainBatch(step=n, rows=rows, temperature=1.0), Algorithm())
        for n in (1, 2, 3)
    ]
    assert [step["loss"] for step in steps] == pytest.approx(
        [0.00380, -0.13404, -0.17914], abs=1e-4
    )
    assert [step["grad_norm"] for step in steps] == pytest.approx(
        [0.4834, 0.4364, 0.1488], abs=1e-3
    )


@pytest.mark.parametrize(
    ("changes", "advantage", "old", "corrected", "expected"),
    [
        ({}, 1, LOG_OLD, False, -1.00163),
        ({}, -1, LOG_OLD, False, 1.53746),  # verl's vanilla is dual-clipped at 3
        ({"clip_ratio_high": 0.28}, 1, LOG_OLD, False, -1.04163),
        ({}, 1, LOG_OLD, True, -1.12618),
        (
            {"loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
            1,
            LOG_OLD,
            False,
            0.62802,
        ),
        (
            {"loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.28},
            1,
            LOG_OLD,
            False,
            0.52427,
        ),
        (
            {"loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
            1,
            LOG_ROLLOUT,
            False,
            0.68113,
        ),
        ({"loss": "gspo"}, 1, LOG_OLD, False, -1.20000),
        ({"loss": "gspo"}, -1, LOG_OLD, False, 1.28403),
    ],
)
def test_losses_give_the_published_means(
    backend: VerlBackend,
    small_model: Path,
    changes: dict[str, Any],
    advantage: int,
    old: Any,
    corrected: bool,
    expected: float,
) -> None:
    import torch
    from verl.utils import tensordict_utils

    start(backend, small_model)
    row = TrainRow(
        episode="t0-0.0",
        tokens=np.arange(6, dtype=np.int32),
        prompt_length=2,
        mask=np.ones(4, dtype=bool),
        logprobs=np.array(old, dtype=np.float32),
        advantage=float(advantage),
    )
    algorithm = Algorithm(correction=Correction(type="token_is", threshold=2.0), **changes)
    weights = np.ones(4, dtype=np.float32)
    if corrected:
        weights = corrections(
            [row], [row.logprobs], [np.array(LOG_ROLLOUT, np.float32)], algorithm
        )[0][0]
    data = tensordict([row], 1.0, 1)
    data["old_log_probs"] = jagged([row.logprobs])
    data["advantages"] = jagged([np.full(4, row.advantage, np.float32)])
    data["rollout_is_weights"] = jagged([weights])
    tensordict_utils.assign_non_tensor(data, dp_size=1)
    new = torch.nested.as_nested_tensor([torch.tensor([0.0, *LOG_NEW, 0.0])], layout=torch.jagged)
    loss_of = loss_function(
        algorithm, TrainBatch(step=1, rows=[row], temperature=1.0), backend._optimizer
    )
    loss, _ = loss_of({"log_probs": new}, data)
    assert float(loss) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("token_is", [1.10517, 2.0, 0.54881, 0.70469]), ("sequence_is", [1.051271] * 4)],
)
def test_corrections_are_truncated_importance_weights(kind: Any, expected: list[float]) -> None:
    mask = np.ones(4, dtype=bool)
    row = TrainRow(
        episode="e",
        tokens=np.arange(5, dtype=np.int32),
        prompt_length=1,
        mask=mask,
        logprobs=mask * 0.0,
    )
    algorithm = Algorithm(correction=Correction(type=kind, threshold=2.0))
    old, rollout = np.array(LOG_OLD, np.float32), np.array(LOG_ROLLOUT, np.float32)
    weights, told = corrections([row], [old], [rollout], algorithm)
    np.testing.assert_allclose(weights[0], expected, atol=1e-5)
    assert "rollout_is_mean" in told


@pytest.mark.parametrize(
    ("changes", "up", "down"),
    [
        ({}, 1.207612, -0.724567),
        ({"normalize_by_std": False}, 0.625, -0.375),
        ({"advantage": "rloo"}, 0.714286, -0.428571),
    ],
)
def test_advantages_give_the_published_numbers(
    changes: dict[str, Any], up: float, down: float
) -> None:
    rewards = [1.0, 0, 0, 1, 1, 0, 0, 0]
    found = VerlBackend().advantages(
        [*rewards, *rewards], ["a"] * 8 + ["b"] * 8, Algorithm(**changes)
    )
    assert found == pytest.approx([up if reward else down for reward in rewards] * 2, abs=1e-5)


# ── against itself ──


def exported(backend: VerlBackend, folder: Path) -> bytes:
    backend.export_weights(folder)
    return (folder / "model.safetensors").read_bytes()


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(
    small_model: Path, tmp_path: Path
) -> None:
    optimizer = Optimizer(learning_rate=1e-3, weight_decay=0.1, warmup_steps=4)
    batches = [TrainBatch(step=n, rows=make_rows(7, seed=n), temperature=1.0) for n in range(1, 5)]
    whole = start(VerlBackend(), small_model, optimizer)
    rates = [whole.train_step(batch, Algorithm())["learning_rate"] for batch in batches[:2]]
    (tmp_path / "checkpoint").mkdir()
    whole.save(tmp_path / "checkpoint")
    rates += [whole.train_step(batch, Algorithm())["learning_rate"] for batch in batches[2:]]
    expected = exported(whole, tmp_path / "whole")
    whole.close()
    second = start(VerlBackend(), small_model, optimizer)
    second.load(tmp_path / "checkpoint")
    assert [
        second.train_step(batch, Algorithm())["learning_rate"] for batch in batches[2:]
    ] == rates[2:]
    assert exported(second, tmp_path / "second") == expected
    second.close()
    assert rates == pytest.approx([1e-3 * n / 5 for n in (1, 2, 3, 4)])


def test_recomputed_logprobs_make_the_first_ratio_one(
    backend: VerlBackend, small_model: Path
) -> None:
    algorithm = Algorithm(
        old_logprobs="recompute", correction=Correction(type="token_is", threshold=2.0)
    )
    start(backend, small_model)
    numbers = backend.train_step(TrainBatch(step=1, rows=make_rows(6), temperature=1.0), algorithm)
    assert numbers["ppo_kl"] == pytest.approx(0.0, abs=1e-7)
    assert numbers["pg_clipfrac"] == 0.0
    assert 0.5 < numbers["rollout_is_mean"] < 2.0


def test_an_export_has_the_names_and_types_of_the_prepared_model(
    backend: VerlBackend, tmp_path: Path
) -> None:
    folder = make_model(
        tmp_path / "tied",
        vocab_size=96,
        hidden_size=32,
        head_dim=16,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    start(backend, folder).export_weights(tmp_path / "out")
    header = [safetensors_header(path / "model.safetensors") for path in (folder, tmp_path / "out")]
    assert header[0] == header[1]
    assert "lm_head.weight" not in header[1]
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def safetensors_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__")
    return {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
