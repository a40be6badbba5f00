"""The engine component: turns the manifest into the command line of vLLM and becomes it.

    python -m rljob_rollout_worker.engine_process     Settings + manifest ─► argv, environment ─► exec

In a cluster this runs in any vLLM image, from a mounted folder that holds `rljob` and this package alone: it imports
nothing that such an image lacks.

What rljob must decide itself (ports, names, lengths, the plugin, log probabilities) cannot be given in `engine.args`.
On a machine without an accelerator small defaults come first, so that `engine.args` and `engine.env` may override
them; a tiny model then serves after 19 s in 1.2 GiB: two processes, the second one forked, one OpenMP thread per two
cores.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rljob.api.engine_args import reserved
from rljob.api.rljob_types import RLJob
from rljob.engine import MODEL_NAME
from rljob.errors import MachineError, ManifestError, UserError
from rljob.settings import Settings

PLUGIN = "rljob_rollout_worker.vllm_plugin"
CPU_SERVER = "rljob_rollout_worker.vllm_cpu"
MIN_KV_CACHE_BYTES, MAX_KV_CACHE_BYTES = 64 * 2**20, 2**30
"""On a CPU: as much as all concurrent episodes need at full length, within these; at least two full sequences."""


def engine_argv(job: RLJob, settings: Settings, *, has_accelerator: bool) -> list[str]:
    """Module and arguments to run with `python -m`.

    Raises:
        ManifestError: `engine.args` holds an argument that rljob sets itself.
    """
    rollout, model = job.spec.rollout, _model_dir(settings)
    _refuse_reserved(rollout.engine.args)
    return [
        *(["vllm.entrypoints.cli.main", "serve"] if has_accelerator else [CPU_SERVER, "--model"]), str(model),
        "--served-model-name", MODEL_NAME,
        "--host", settings.bind_host, "--port", str(urlsplit(settings.engine_url).port),
        "--max-model-len", str(job.spec.model.max_context_length),
        "--max-num-seqs", str(rollout.max_concurrent_episodes),
        "--seed", str(job.spec.trainer.seed),
        "--logprobs-mode", "processed_logprobs",  # of the tempered distribution: what was sampled from
        "--generation-config", "vllm",  # the model's own sampling defaults must not leak into requests
        "--worker-extension-cls", f"{PLUGIN}.WorkerExtension",
        "--middleware", f"{PLUGIN}.Middleware",
        "--api-server-count", "1",  # the gate and the version live in one process
        "--tool-call-parser", "hermes",
        "--disable-uvicorn-access-log", "--disable-fastapi-docs",
        *([] if has_accelerator else _cpu_args(job, model)),
        *rollout.engine.args,
    ]  # fmt: skip


def _model_dir(settings: Settings) -> Path:
    return Path(settings.artifacts) / "prepared" / "model"


def _cpu_args(job: RLJob, model: Path) -> list[str]:
    return [
        "--enforce-eager", "--dtype", "float32", "--distributed-executor-backend", "uni",
        "--kv-cache-memory-bytes", str(_kv_cache_bytes(job, model)),
    ]  # fmt: skip


def _kv_cache_bytes(job: RLJob, model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text())
        heads = config.get("num_key_value_heads", config["num_attention_heads"])
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_token = 2 * config["num_hidden_layers"] * heads * head_dim * 4
    except (OSError, ValueError, KeyError, TypeError):
        return MAX_KV_CACHE_BYTES  # vLLM says what is wrong with the model
    per_episode = per_token * job.spec.model.max_context_length
    wanted = per_episode * job.spec.rollout.max_concurrent_episodes
    return max(2 * per_episode, min(MAX_KV_CACHE_BYTES, max(MIN_KV_CACHE_BYTES, wanted)))


def _refuse_reserved(args: Sequence[str]) -> None:
    for index, name in reserved(args):
        where = f"spec.rollout.engine.args[{index}]"
        raise ManifestError(where, f"{name} is set by rljob itself", "remove it")


def engine_env(
    job: RLJob, settings: Settings, base: Mapping[str, str], *, has_accelerator: bool
) -> dict[str, str]:
    """The environment of the engine: `base`, what rljob needs, then `engine.env`."""
    env = {
        **base,
        "RLJOB_TOKEN": settings.token,
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if not has_accelerator:
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override --kv-cache-memory-bytes
        env |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the CPU platform insists on a third process
            # a pod names its share; on one machine the trainer has the other half of the cores
            "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2))),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    return env | job.spec.rollout.engine.env


def main() -> None:
    """Become the engine. Raises UserError for bad input."""
    settings = Settings.from_env()
    settings.make_folders()
    job = settings.job()
    has_accelerator = any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))
    env = engine_env(job, settings, os.environ, has_accelerator=has_accelerator)
    if urlsplit(settings.engine_url).port is None:
        raise MachineError("RLJOB_ENGINE_URL", f"{settings.engine_url!r} names no port")
    if job.spec.rollout.engine.kind == "simulated":
        _simulate(settings, env)
        return
    argv = engine_argv(job, settings, has_accelerator=has_accelerator)
    if not (_model_dir(settings) / "config.json").exists():
        raise MachineError(
            str(_model_dir(settings)), "holds no model", "run the prepare component first"
        )
    os.execve(sys.executable, [sys.executable, "-m", *argv], env)


def _simulate(settings: Settings, env: Mapping[str, str]) -> None:
    from rljob.testing import engine_server

    port = urlsplit(settings.engine_url).port or 0
    try:
        engine_server.serve(
            settings.bind_host, port, token=settings.token, model_dir=_model_dir(settings), env=env
        )
    except msgspec.ValidationError as error:
        raise ManifestError(
            "spec.rollout.engine.env", str(error), "see SimulatedEngineOptions"
        ) from None


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the driver shows the last line of a component that refused
        sys.exit(error.exit_code)
