"""verl's own FSDP2 engine, losses and advantage estimators in this process: no Ray, one rank, gloo on a CPU.

    rows ─► sorted by length ─► micro-batches of ≤ micro_batch_tokens padded tokens ─► engine.forward_backward_batch
                                                                                       (grads add up) ─► optimizer_step

Rows with advantage 0 are left out of the forward pass: under each of the three losses they add exactly
nothing to loss and gradient. The denominators still count them.

Importing verl takes ten seconds and 800 MB, so nothing of it is imported before `start`.

Legend: B rows of a micro-batch, N rows, T tokens of a row, P of them before the first action, R = T - P.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rljob.api.rljob_types import Algorithm, Optimizer
from rljob.errors import CorruptError, MachineError
from rljob_trainer.backends.base import TrainBatch, TrainRow
from rljob_trainer.backends.verl_engine import build_engine, loss_function, tensor_dtypes
from rljob_trainer.backends.verl_rows import (
    corrections,
    jagged,
    micro_batches,
    rows_that_matter,
    shares,
    tensordict,
)

T = TypeVar("T", bound=Callable[..., Any])

SHARE_OF_CPUS = 2
"""One thread per so many CPUs: engine, worker and sandboxes have the rest. Threads that wait for a busy CPU spin, and a
step with two of them on two busy CPUs takes several times as long as with one. OMP_NUM_THREADS overrides it."""
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

    return cast("T", quiet)


class VerlBackend:
    """See the module."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._model = Path()
        self._micro_batch_tokens = 0
        self._optimizer: Any = None

    @_quietly
    def start(
        self, model: Path, mesh: int, optimizer: Optimizer, micro_batch_tokens: int, seed: int
    ) -> None:
        """See `Backend.start`."""
        if mesh != 1:
            raise MachineError(
                "spec.trainer.replicas", f"the verl backend runs on one process, not {mesh}"
            )
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        import torch
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        logging.getLogger("torch.fx").setLevel(logging.ERROR)
        default = max(1, (os.cpu_count() or 1) // SHARE_OF_CPUS)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", default)))
        torch.manual_seed(seed)
        self._model, self._micro_batch_tokens = model, micro_batch_tokens
        self._engine, self._optimizer = build_engine(model, optimizer)

    @_quietly
    def advantages(
        self, rewards: Sequence[float], groups: Sequence[str], algorithm: Algorithm
    ) -> list[float]:
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
            data = tensordict([rows[index] for index in part], temperature, len(rows))
            with self._engine.eval_mode():
                output = self._engine.infer_batch(data)["model_output"]["log_probs"]
            for index, row_values in zip(part, output.unbind(), strict=True):
                found[index] = row_values[rows[index].prompt_length - 1 : -1].float().cpu().numpy()
        return found

    @_quietly
    def train_step(self, batch: TrainBatch, algorithm: Algorithm) -> dict[str, float]:
        """See `Backend.train_step`."""
        rows = rows_that_matter(batch.rows)
        numbers: dict[str, float] = {}
        old = [row.logprobs for row in rows]
        weights = shares(rows, algorithm)
        if algorithm.old_logprobs == "recompute":
            rollout, old = old, self.logprobs(rows, batch.temperature)
            if algorithm.correction is not None:
                factors, numbers = corrections(rows, old, rollout, algorithm)
                weights = [a * b for a, b in zip(weights, factors, strict=True)]
        loss, means = self._accumulate(batch, rows, old, weights, algorithm)
        rate = float(self._engine.optimizer.param_groups[0]["lr"])
        grad_norm = float(self._engine.optimizer_step())
        self._engine.lr_scheduler_step()
        self._engine.optimizer_zero_grad()
        return {"loss": loss, "grad_norm": grad_norm, "learning_rate": rate, **means, **numbers}

    def _accumulate(
        self,
        batch: TrainBatch,
        rows: Sequence[TrainRow],
        old: Sequence[NDArray[np.float32]],
        weights: Sequence[NDArray[np.float32]],
        algorithm: Algorithm,
    ) -> tuple[float, dict[str, float]]:
        """Add up the gradient of the whole batch. Gives the loss and token-weighted means of verl's metrics."""
        loss_of = loss_function(algorithm, batch, self._optimizer)
        loss, sums = 0.0, dict.fromkeys(("ppo_kl", "pg_clipfrac"), 0.0)
        self._engine.optimizer_zero_grad()
        for part in micro_batches(rows, self._micro_batch_tokens):
            chosen = [rows[index] for index in part]
            data = tensordict(chosen, batch.temperature, batch.num_episodes)
            data["old_log_probs"] = jagged([old[index] for index in part])
            data["advantages"] = jagged(
                [np.full(len(row.mask), row.advantage, np.float32) for row in chosen]
            )
            data["rollout_is_weights"] = jagged([weights[index] for index in part])
            with self._engine.train_mode(zero_grad_on_exit=False):
                output = self._engine.forward_backward_batch(data, loss_of)
            loss += sum(output["loss"])
            counted = sum(int(row.mask.sum()) for row in chosen)
            for name in sums:
                sums[name] += counted * float(output["metrics"][f"actor/{name}"].aggregate())
        tokens = sum(int(row.mask.sum()) for row in rows)
        return loss, {name: value / tokens for name, value in sums.items()}

    @_quietly
    def export_weights(self, directory: Path) -> None:
        """See `Backend.export_weights`: the names and dtypes of the prepared model's own tensors."""
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        for file in self._model.iterdir():
            is_weights = file.name.endswith((".safetensors", ".safetensors.index.json"))
            if file.is_file() and not is_weights:
                shutil.copy2(file, directory / file.name)
        dtypes = tensor_dtypes(self._model)
        parameters, _ = self._engine.get_per_tensor_param()
        # A tied head is in verl's state dict but not in the model's files; vLLM would refuse it.
        tensors = {
            name: tensor.detach().to("cpu", dtypes[name]).contiguous().clone()
            for name, tensor in parameters
            if name in dtypes
        }
        if missing := dtypes.keys() - tensors.keys():
            raise CorruptError(
                f"the engine has no tensor {sorted(missing)[0]} of the prepared model"
            )
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
