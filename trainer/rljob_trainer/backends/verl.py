"""verl's own FSDP2 engine, losses and advantage estimators in this process: no Ray, one rank, gloo on a CPU.

    rows ─► sorted by length ─► micro-batches of ≤ micro_batch_tokens padded tokens ─► engine.forward_backward_batch
                                                                                       (grads add up) ─► optimizer_step

Rows with advantage 0 are left out of the forward pass: under each of the three losses they add exactly nothing to loss and
gradient. The denominators still count them.

Importing verl takes ten seconds and 800 MB, so nothing of it is imported before `start`.

Legend: B rows of a micro-batch, N rows, T tokens of a row, P of them before the first action, R = T - P.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rljob.api.rljob_types import Algorithm, Optimizer
from rljob.errors import CorruptError, MachineError
from rljob_trainer.backends.base import TrainBatch, TrainRow

T = TypeVar("T", bound=Callable[..., Any])

AGGREGATION = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
}
"""Our names of the loss aggregations → verl's."""
CORRECTION = {"token_is": "token", "sequence_is": "sequence"}
"""`correction.type` → verl's `rollout_is`."""
MAX_THREADS = 2
"""Small models lose with more: on a busy machine two idle-spinning threads are several times slower than one."""
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "VERL_LOGGING_LEVEL": "ERROR",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    "GLOO_SOCKET_IFNAME": "lo",
}


def _quietly(call: T) -> T:
    """verl prints to stdout and warns about prototypes; neither is news to anyone who trains."""

    @functools.wraps(call)
    def quiet(*arguments: Any, **keywords: Any) -> Any:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return call(*arguments, **keywords)

    return quiet  # type: ignore[return-value]


class VerlBackend:
    """See the module."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._model = Path()
        self._micro_batch_tokens = 0
        self._optimizer: Any = None

    @_quietly
    def start(self, model: Path, mesh: int, optimizer: Optimizer, micro_batch_tokens: int, seed: int) -> None:
        """See `Backend.start`."""
        if mesh != 1:
            raise MachineError("spec.trainer.replicas", f"the verl backend runs on one process, not {mesh}")
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        import torch
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        logging.getLogger("torch.fx").setLevel(logging.ERROR)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(MAX_THREADS, os.cpu_count() or 1))))
        torch.manual_seed(seed)
        self._model, self._micro_batch_tokens = model, micro_batch_tokens
        self._engine, self._optimizer = _build_engine(model, optimizer)

    @_quietly
    def advantages(self, rewards: Sequence[float], groups: Sequence[str], algorithm: Algorithm) -> list[float]:
        """See `Backend.advantages`: verl's estimators, on one token per episode."""
        import torch
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        options: dict[str, Any] = {}
        if algorithm.advantage == "grpo":
            options["norm_adv_by_std_in_grpo"] = algorithm.normalize_by_std is not False
        values, _ = get_adv_estimator_fn(algorithm.advantage)(
            token_level_rewards=torch.tensor(rewards, dtype=torch.float32)[:, None],
            response_mask=torch.ones(len(rewards), 1),
            index=np.array(groups),
            **options,
        )
        return [float(value) for value in values[:, 0]]

    @_quietly
    def logprobs(self, rows: Sequence[TrainRow], temperature: float) -> list[NDArray[np.float32]]:
        """See `Backend.logprobs`; 0 where a row's mask is."""
        found: list[Any] = [None] * len(rows)
        for part in micro_batches(rows, self._micro_batch_tokens):
            data = self._data([rows[index] for index in part], temperature, len(rows))
            with self._engine.eval_mode():
                output = self._engine.infer_batch(data)["model_output"]["log_probs"]
            for index, row_values in zip(part, output.unbind(), strict=True):
                found[index] = row_values[rows[index].prompt_length - 1 : -1].float().cpu().numpy()
        return found

    @_quietly
    def train_step(self, batch: TrainBatch, algorithm: Algorithm) -> dict[str, float]:
        """See `Backend.train_step`."""
        rows = _rows_that_matter(batch.rows)
        numbers: dict[str, float] = {}
        old = [row.logprobs for row in rows]
        weights = _shares(rows, algorithm)
        if algorithm.old_logprobs == "recompute":
            rollout, old = old, self.logprobs(rows, batch.temperature)
            if algorithm.correction is not None:
                corrections, numbers = _corrections(rows, old, rollout, algorithm)
                weights = [weight * correction for weight, correction in zip(weights, corrections, strict=True)]
        loss, means = self._accumulate(batch, rows, old, weights, algorithm)
        rate = float(self._engine.optimizer.param_groups[0]["lr"])
        grad_norm = float(self._engine.optimizer_step())
        self._engine.lr_scheduler_step()
        self._engine.optimizer_zero_grad()
        return {"loss": loss, "grad_norm": grad_norm, "lr": rate, **means, **numbers}

    def _accumulate(
        self,
        batch: TrainBatch,
        rows: Sequence[TrainRow],
        old: Sequence[NDArray[np.float32]],
        weights: Sequence[NDArray[np.float32]],
        algorithm: Algorithm,
    ) -> tuple[float, dict[str, float]]:
        """Add up the gradient of the whole batch. Gives the loss and token-weighted means of verl's metrics."""
        loss_function = _loss_function(algorithm, batch, self._optimizer)
        loss, sums, tokens = 0.0, dict.fromkeys(("ppo_kl", "pg_clipfrac"), 0.0), 0
        self._engine.optimizer_zero_grad()
        for part in micro_batches(rows, self._micro_batch_tokens):
            chosen = [rows[index] for index in part]
            data = self._data(chosen, batch.temperature, batch.num_episodes)
            data["old_log_probs"] = _jagged([old[index] for index in part])
            data["advantages"] = _jagged([np.full(len(row.mask), row.advantage, np.float32) for row in chosen])
            data["rollout_is_weights"] = _jagged([weights[index] for index in part])
            with self._engine.train_mode(zero_grad_on_exit=False):
                output = self._engine.forward_backward_batch(data, loss_function)
            loss += sum(output["loss"])
            counted = sum(int(row.mask.sum()) for row in chosen)
            tokens += counted
            for name in sums:
                sums[name] += counted * float(output["metrics"][f"actor/{name}"].aggregate())
        return loss, {name: value / max(1, tokens) for name, value in sums.items()}

    def _data(self, rows: Sequence[TrainRow], temperature: float, num_episodes: int) -> Any:
        """One micro-batch as verl wants it: jagged tensors [B, …] and settings beside them."""
        from verl.utils import tensordict_utils as tu

        mask = _jagged([row.mask.astype(np.int64) for row in rows])
        tensors = {
            "input_ids": _jagged([row.tokens.astype(np.int64) for row in rows]),
            "position_ids": _jagged([np.arange(len(row.tokens)) for row in rows]),
            "prompts": _jagged([row.tokens[: row.prompt_length].astype(np.int64) for row in rows]),
            "responses": _jagged([row.tokens[row.prompt_length :].astype(np.int64) for row in rows]),
            "response_mask": mask,
            "loss_mask": mask,
        }
        settings = {
            "temperature": temperature,
            "use_remove_padding": False,
            "pad_token_id": 0,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": len(rows),
            "calculate_entropy": False,
            "global_batch_size": num_episodes,
        }
        return tu.get_tensordict(tensors, non_tensor_dict=settings)

    @_quietly
    def export_weights(self, directory: Path) -> None:
        """See `Backend.export_weights`: the names and dtypes of the prepared model's own tensors."""
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        for file in self._model.iterdir():
            if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
                shutil.copy2(file, directory / file.name)
        dtypes = _tensor_dtypes(self._model)
        parameters, _ = self._engine.get_per_tensor_param()
        # A tied head is in verl's state dict but not in the model's files; vLLM would refuse it.
        tensors = {
            name: tensor.detach().to("cpu", dtypes[name]).contiguous().clone()
            for name, tensor in parameters
            if name in dtypes
        }
        if missing := dtypes.keys() - tensors.keys():
            raise CorruptError(f"the engine has no tensor {sorted(missing)[0]} of the prepared model")
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    @_quietly
    def save(self, directory: Path) -> None:
        """See `Backend.save`: verl's checkpoint (model, optimizer, scheduler, random state)."""
        self._engine.save_checkpoint(str(directory / "verl"), global_step=0)

    @_quietly
    def load(self, directory: Path) -> None:
        """See `Backend.load`."""
        try:
            self._engine.load_checkpoint(str(directory / "verl"), del_local_after_load=False)
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise CorruptError(f"{directory}: {error}") from None

    def close(self) -> None:
        """See `Backend.close`."""
        if self._engine is None:
            return
        import torch.distributed

        self._engine = None
        torch.distributed.destroy_process_group()


def micro_batches(rows: Sequence[TrainRow], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows, shortest first, so that each part has at most `max_tokens` tokens with its padding (or one row)."""
    part: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index].tokens)):
        if part and (len(part) + 1) * len(rows[index].tokens) > max_tokens:
            yield part
            part = []
        part.append(index)
    if part:
        yield part


def _rows_that_matter(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Rows with an advantage; one row without where none has, since AdamW's momentum moves the weights all the same."""
    return [row for row in rows if row.advantage != 0.0] or [min(rows, key=lambda row: len(row.tokens))]


def _shares(rows: Sequence[TrainRow], algorithm: Algorithm) -> list[NDArray[np.float32]]:
    """N arrays [R]: a chain's weight in its episode's token mean; 1 for the other aggregations."""
    by_token = algorithm.loss_aggregation == "seq_mean_token_mean"
    return [np.full(len(row.mask), row.share if by_token else 1.0, np.float32) for row in rows]


def _corrections(
    rows: Sequence[TrainRow], old: Sequence[Any], rollout: Sequence[Any], algorithm: Algorithm
) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
    """N arrays [R] of importance weights between trainer and rollout, and verl's account of them."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    assert algorithm.correction is not None
    pad = functools.partial(pad_sequence, batch_first=True)
    proto, _, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=pad([torch.from_numpy(values) for values in old]),
        rollout_log_prob=pad([torch.from_numpy(values) for values in rollout]),
        response_mask=pad([torch.from_numpy(row.mask) for row in rows]).float(),
        rollout_is=CORRECTION[algorithm.correction.type],
        rollout_is_threshold=algorithm.correction.threshold,
    )
    weights = proto.batch["rollout_is_weights"].numpy()
    told = {name.replace("rollout_corr/", ""): float(value) for name, value in metrics.items()}
    kept = {name: told[name] for name in ("rollout_is_mean", "rollout_is_max", "kl") if name in told}
    return [weights[index, : len(row.mask)] for index, row in enumerate(rows)], kept


def _loss_function(algorithm: Algorithm, batch: TrainBatch, optimizer: Any) -> Callable[..., Any]:
    """verl's `ppo_loss`, normalised over the whole batch instead of the rows that are in the forward pass."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        optim=optimizer,
        policy_loss=PolicyLossConfig(loss_mode=algorithm.loss),
        loss_agg_mode=AGGREGATION[algorithm.loss_aggregation],
        clip_ratio_low=algorithm.clip_ratio_low,
        clip_ratio_high=algorithm.clip_ratio_high,
    )
    num_tokens = batch.num_tokens

    def loss(model_output: dict[str, Any], data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
        tu.assign_non_tensor(data, batch_num_tokens=num_tokens)
        return ppo_loss(config, model_output, data, dp_group)

    return loss


def _build_engine(model: Path, optimizer: Optimizer) -> tuple[Any, Any]:
    """An initialised engine and the optimizer configuration it was built with."""
    import torch.distributed as dist

    on_cpu = not _has_accelerator()
    if on_cpu:
        from rljob_trainer.backends import verl_cpu_platform  # before any other module of verl
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    if on_cpu:
        verl_cpu_platform.register_cpu_engine()
    if not dist.is_initialized():
        dist.init_process_group("gloo" if on_cpu else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    # The schedule is linear from 0 at its step 0; one step ahead of it, the first update is not spent on a rate of 0.
    warmup = optimizer.warmup_steps + 1 if optimizer.warmup_steps else 0
    optimizer_config = FSDPOptimizerConfig(
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.gradient_clip,
        lr_warmup_steps=warmup,
        total_training_steps=1,  # without effect on a constant schedule
    )
    full = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=str(model),
            use_remove_padding=False,
            enable_gradient_checkpointing=not on_cpu,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_remove_padding=False,
            use_torch_compile=False,
            model_dtype="fp32",
            mixed_precision=full if on_cpu else None,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
        ),
        optimizer_config=optimizer_config,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    if warmup:
        engine.lr_scheduler_step()
    return engine, optimizer_config


def _has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available()


def _jagged(arrays: Sequence[NDArray[Any]]) -> Any:
    """Arrays [·] of different lengths as one jagged tensor [B, ·]."""
    import torch

    return torch.nested.as_nested_tensor([torch.from_numpy(array) for array in arrays], layout=torch.jagged)


def _tensor_dtypes(model: Path) -> dict[str, Any]:
    """Name → torch dtype of every tensor in a directory of safetensors."""
    import torch

    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    dtypes: dict[str, Any] = {}
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        dtypes.update({name: known[entry["dtype"]] for name, entry in header.items() if name != "__metadata__"})
    return dtypes
