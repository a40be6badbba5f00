"""The engine component: turns the manifest into the command line of `vllm serve` and becomes it.

    python -m rljob_rollout_worker.engine_process     Settings + manifest ─► argv, environment ─► exec

What rljob must decide itself (ports, names, lengths, the plugin, log probabilities) cannot be given in `engine.args`.
On a machine without an accelerator the small defaults of `_cpu_args` come first, so that `engine.args` may override them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rljob.api.rljob_types import RLJob
from rljob.engine import MODEL_NAME
from rljob.errors import MachineError, ManifestError, UserError
from rljob.settings import Settings

PLUGIN = "rljob_rollout_worker.vllm_plugin"
KV_CACHE_BYTES = 128 * 1024 * 1024
"""KV cache on a CPU: 65,536 tokens of a two-layer model, and cheap to allocate."""

RESERVED_ARGS = frozenset({
    "--model", "--served-model-name", "--host", "--port", "--api-key", "--middleware", "--worker-extension-cls",
    "--max-model-len", "--logprobs-mode", "--generation-config", "--tokenizer", "--uds", "--root-path", "--headless",
    "--api-server-count", "--config", "--ssl-keyfile", "--ssl-certfile", "--no-enable-prefix-caching", "--lora-modules",
})  # fmt: skip
"""Arguments that rljob sets itself, or that would break what it relies on."""


def engine_argv(job: RLJob, settings: Settings, *, has_accelerator: bool) -> list[str]:
    """The command line of `vllm serve`, without the program itself.

    Raises:
        ManifestError: `engine.args` holds an argument that rljob sets itself.
    """
    _refuse_reserved(job.spec.rollout.engine.args)
    address = urlsplit(settings.engine_url)
    return [
        "serve", str(Path(settings.artifacts) / "prepared" / "model"),
        "--served-model-name", MODEL_NAME,
        "--host", settings.bind_host, "--port", str(address.port),
        "--max-model-len", str(job.spec.model.max_context_length),
        "--max-num-seqs", str(job.spec.rollout.max_concurrent_episodes),
        "--logprobs-mode", "processed_logprobs",  # of the tempered distribution: what was sampled from
        "--generation-config", "vllm",  # the model's own sampling defaults must not leak into requests
        "--worker-extension-cls", f"{PLUGIN}.WorkerExtension",
        "--middleware", f"{PLUGIN}.Middleware",
        "--disable-uvicorn-access-log", "--disable-fastapi-docs",
        *([] if has_accelerator else _cpu_args()),
        *job.spec.rollout.engine.args,
    ]  # fmt: skip


def _cpu_args() -> list[str]:
    return ["--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]


def _refuse_reserved(args: Sequence[str]) -> None:
    for index, arg in enumerate(args):
        name = arg.split("=", 1)[0].replace("_", "-")
        if name in RESERVED_ARGS:
            raise ManifestError(f"spec.rollout.engine.args[{index}]", f"{name} is set by rljob itself", "remove it")


def engine_env(job: RLJob, settings: Settings, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the engine: `base`, what rljob needs, then `engine.env`."""
    env = dict(base)
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override --kv-cache-memory-bytes
    return env | {"RLJOB_TOKEN": settings.token} | job.spec.rollout.engine.env


def main() -> None:
    """Become the engine. Exit code 2 on bad input, with one line."""
    settings = Settings.from_env()
    job = settings.job()
    env = engine_env(job, settings, os.environ)
    address = urlsplit(settings.engine_url)
    if address.port is None:
        raise MachineError("RLJOB_ENGINE_URL", f"{settings.engine_url!r} names no port")
    if job.spec.rollout.engine.kind == "simulated":
        from rljob.testing import engine_server  # noqa: PLC0415 - only this kind needs it

        model_dir = Path(settings.artifacts) / "prepared" / "model"
        engine_server.serve(settings.bind_host, address.port, token=settings.token, model_dir=model_dir, env=env)
        return
    argv = engine_argv(job, settings, has_accelerator=Path("/dev/nvidia0").exists())
    os.execve(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *argv], env)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the driver shows the last line of a component that refused
        sys.exit(error.exit_code)
