"""A CPU platform and a CPU engine for verl, which ships neither; both through its public registries.

Import this before any other module of verl, on a machine without an accelerator only: verl picks its
platform at import.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from inspect import signature
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VERL_PLATFORM", "cpu")

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_base import PlatformBase

_CPU = torch.device("cpu")
_DEVICE_MODULE = SimpleNamespace(
    current_device=lambda: _CPU,
    current_stream=lambda *_: None,
    device_count=lambda: 1,
    empty_cache=lambda: None,
    get_device_name=lambda *_: "cpu",
    get_rng_state=torch.get_rng_state,
    ipc_collect=lambda: None,
    is_available=lambda: True,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (0, 0),
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    reset_peak_memory_stats=lambda *_: None,
    set_device=lambda *_: None,
    set_rng_state=torch.set_rng_state,
    synchronize=lambda *_: None,
)
"""What verl asks of `torch.<device>`."""


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One CPU, seen as one device; gloo between processes."""

    @property
    def device_name(self) -> str:
        """As torch names it."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """Chooses among engines of one device."""
        return "cpu"

    @property
    def device_module(self) -> Any:
        """Stands for `torch.cpu`, which lacks most of this."""
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        """A CPU always is."""
        return True

    def current_device(self) -> Any:
        """verl hands this to `.to(…)`."""
        return _CPU

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to choose."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is asynchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The CPU allocator has none."""

    def empty_cache(self) -> None:
        """There is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """CPUs have no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """What `torch.distributed` uses."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Read by verl, without effect on a CPU."""
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        """No profiler."""
        return nullcontext()

    def profiler_start(self) -> None:
        """No profiler."""

    def profiler_stop(self) -> None:
        """No profiler."""

    def ray_resource_name(self) -> str:
        """The resource that a Ray actor would ask for."""
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        """Ray hides no CPUs."""
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        """Options of a Ray actor."""
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        """No device memory to share."""
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""


def register_cpu_engine() -> None:
    """Make `EngineRegistry.new` build `CpuEngine` for fsdp2 on a CPU."""
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    registered = EngineRegistry._engines  # pyright: ignore[reportPrivateUsage] - it has no other way to ask
    if "cpu" in registered["language_model"]["fsdp2"]:
        return
    base: Any = FSDPEngineWithLMHead  # a decorator without annotations hides its type

    @EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
    class CpuEngine(base):
        """verl's engine; logits and log probabilities only where the loss looks, and in one call.

        Without flash-attn verl takes the logsumexp of one token at a time: seconds a step, not milliseconds.
        """

        def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            """See verl. Where the model can, it computes no logits for the tokens of the shortest prompt."""
            inputs, arguments = super().prepare_model_inputs(micro_batch)
            if "logits_to_keep" in signature(self.module.forward).parameters:
                unread = int(micro_batch["prompts"].offsets().diff().min()) - 1
                inputs["logits_to_keep"] = inputs["input_ids"].shape[1] - unread
            return inputs, arguments

        def prepare_model_outputs(
            self,
            output: Any,
            output_args: dict[str, Any],
            micro_batch: Any,
            logits_processor_func: Any,
        ) -> dict[str, torch.Tensor]:
            """See verl. `log_probs` is jagged [B, T]; at t, of token t + 1; 0 where `response_mask` is."""
            ids = micro_batch["input_ids"]
            source, target, labels = counted_positions(micro_batch, output.logits.shape[1])
            logits = output.logits.flatten(0, 1)[source]  # [K, V]
            temperature = output_args["temperature"].repeat_interleave(_counts(micro_batch))
            scores = torch.log_softmax(logits / temperature[:, None], -1)
            picked = scores.gather(-1, labels[:, None])[:, 0]
            flat = picked.new_zeros(ids.values().shape[0]).scatter(0, target, picked)
            return {"log_probs": torch.nested.nested_tensor_from_jagged(flat, ids.offsets())}


def _counts(micro_batch: Any) -> torch.Tensor:
    return torch.stack([mask.sum() for mask in micro_batch["response_mask"].unbind()])


def counted_positions(
    micro_batch: Any, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the K counted tokens are.

    Args:
        micro_batch: With jagged `input_ids` [B, T], `prompts` [B, P] and `response_mask` [B, R].
        width: Logits per row: those of the last `width` of its padded tokens.

    Returns:
        [K] the row of each one's logits in the padded [B * width] logits, [K] the same place among the jagged values,
        [K] the token itself.
    """
    ids, starts = micro_batch["input_ids"].values(), micro_batch["input_ids"].offsets()
    unread = int(starts.diff().max()) - width
    prompts = micro_batch["prompts"].offsets().diff()
    source, target = [], []
    for row, mask in enumerate(micro_batch["response_mask"].unbind()):
        place = mask.nonzero()[:, 0] + prompts[row] - 1  # the position before the token predicts it
        source.append(place - unread + row * width)
        target.append(place + starts[row])
    flat = torch.cat(target)
    return torch.cat(source), flat, ids[flat + 1]
