"""verl's engine and loss, built from our manifest's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljob.api.rljob_types import Algorithm, Optimizer
from rljob_trainer.backends.base import TrainBatch

AGGREGATION = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
}
"""Our names of the loss aggregations → verl's."""


def loss_function(algorithm: Algorithm, batch: TrainBatch, optimizer: Any) -> Callable[..., Any]:
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

    def loss(
        model_output: dict[str, Any], data: Any, dp_group: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        tu.assign_non_tensor(data, batch_num_tokens=num_tokens)
        return ppo_loss(config, model_output, data, dp_group)

    return loss


def build_engine(model: Path, optimizer: Optimizer) -> tuple[Any, Any]:
    """An initialised engine and the optimizer configuration it was built with."""
    import torch
    import torch.distributed as dist

    if on_cpu := not torch.cuda.is_available():
        from rljob_trainer.backends.verl_cpu_platform import register_cpu_engine

        register_cpu_engine()
    # Only now: verl picks its platform when it is imported.
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - one process needs no port
    dist.init_process_group("gloo" if on_cpu else "nccl", store=store, rank=0, world_size=1)
    optimizer_config, warmed_up = _optimizer_config(optimizer)
    full = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=str(model),
            load_tokenizer=False,
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
    if warmed_up:
        engine.lr_scheduler_step()
    return engine, optimizer_config


def _optimizer_config(optimizer: Optimizer) -> tuple[Any, bool]:
    """verl's words for our AdamW, and whether its schedule must be put one step ahead."""
    from verl.workers.config import FSDPOptimizerConfig

    # The schedule is linear from 0 at its step 0; one step ahead of it, the first update is not spent on a rate of 0.
    warmup = optimizer.warmup_steps + 1 if optimizer.warmup_steps else 0
    config = FSDPOptimizerConfig(
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.gradient_clip,
        lr_warmup_steps=warmup,
        total_training_steps=1,  # without effect on a constant schedule
    )
    return config, warmup > 0


def tensor_dtypes(model: Path) -> dict[str, Any]:
    """Name → torch dtype of every tensor in a directory of safetensors."""
    import torch

    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    dtypes: dict[str, Any] = {}
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        dtypes.update({name: known[entry["dtype"]] for name, entry in header.items()})
    return dtypes
