import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rljob
import rljob_rollout_worker
from rljob.api.rljob_types import RLJob
from rljob.errors import ManifestError
from rljob.settings import Settings
from rljob_rollout_worker import engine_process
from rljob_rollout_worker.engine_process import (
    MAX_KV_CACHE_BYTES,
    MIN_KV_CACHE_BYTES,
    engine_argv,
    engine_env,
)


@pytest.fixture
def model_dir(artifacts):
    folder = artifacts / "prepared" / "model"
    folder.mkdir(parents=True)
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def wiring(artifacts, tmp_path):
    return Settings(
        component="engine-0",
        job_file=str(tmp_path / "job.json"),
        artifacts=str(artifacts),
        work_dir=str(tmp_path),
        engine_url="http://127.0.0.1:4321",
        token="secret",
    )


def job(concurrent=8, context=1024, **engine):
    return RLJob.model_validate({
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "j"},
        "spec": {
            "model": {"source": "file://m", "maxContextLength": context},
            "data": {"train": {"source": "file://t"}},
            "tasks": [{"name": "t", "type": "shell_files", "sandbox": {"pool": "p"}}],
            "rollout": {"maxConcurrentEpisodes": concurrent, "engine": engine},
            "trainer": {"steps": 1, "groupsPerStep": 1, "seed": 7},
            "sandboxPools": [{"name": "p"}],
        },
    })  # fmt: skip


def value(argv, name):
    return argv[argv.index(name) + 1]


def test_the_manifest_decides_lengths_port_and_seed(wiring, model_dir):
    argv = engine_argv(job(), wiring, has_accelerator=False)
    assert value(argv, "--model") == str(model_dir)
    assert value(argv, "--max-model-len") == "1024"
    assert value(argv, "--max-num-seqs") == "8"
    assert value(argv, "--port") == "4321"
    assert value(argv, "--host") == "127.0.0.1"
    assert value(argv, "--seed") == "7"
    assert value(argv, "--logprobs-mode") == "processed_logprobs"


def test_the_users_arguments_come_last_so_that_they_win_over_defaults(wiring, model_dir):
    argv = engine_argv(
        job(args=["--dtype=bfloat16", "--tool-call-parser", "qwen3_xml"]),
        wiring,
        has_accelerator=False,
    )
    assert argv[-3:] == ["--dtype=bfloat16", "--tool-call-parser", "qwen3_xml"]


@pytest.mark.parametrize(
    "arg", ["--port=1", "--model", "--middleware", "--api_server_count=2", "-dp", "--seed"]
)
def test_an_argument_that_rljob_sets_itself_is_refused_with_its_path(wiring, arg):
    with pytest.raises(
        ManifestError, match=r"spec\.rollout\.engine\.args\[1\]: .* is set by rljob itself"
    ):
        engine_argv(job(args=["--enforce-eager", arg]), wiring, has_accelerator=False)


def test_only_a_machine_without_an_accelerator_gets_cpu_settings(wiring, model_dir):
    cpu, gpu = (engine_argv(job(), wiring, has_accelerator=flag) for flag in (False, True))
    assert "--enforce-eager" in cpu
    assert "--enforce-eager" not in gpu
    assert gpu[:3] == ["vllm.entrypoints.cli.main", "serve", str(model_dir)]


@pytest.mark.parametrize(
    ("concurrent", "context", "expected"),
    [
        (8, 1024, MIN_KV_CACHE_BYTES),
        (64, 4096, 64 * 4096 * 2 * 2 * 2 * 64 * 4),
        (10_000, 4096, MAX_KV_CACHE_BYTES),
        (8, 1_048_576, 2 * 1_048_576 * 2 * 2 * 2 * 64 * 4),
    ],
)
def test_the_cache_holds_what_runs_at_once_within_bounds_and_two_episodes_at_least(
    wiring, model_dir, concurrent, context, expected
):
    argv = engine_argv(job(concurrent, context), wiring, has_accelerator=False)
    assert value(argv, "--kv-cache-memory-bytes") == str(expected)


def test_the_environment_carries_the_token_and_what_the_user_adds(wiring):
    base = {"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "40"}
    env = engine_env(job(env={"OMP_NUM_THREADS": "9"}), wiring, base, has_accelerator=False)
    assert env["RLJOB_TOKEN"] == "secret"
    assert env["OMP_NUM_THREADS"] == "9"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env


def test_the_argument_list_never_holds_the_token(wiring, model_dir):
    assert "secret" not in " ".join(engine_argv(job(), wiring, has_accelerator=True))


def test_a_malformed_knob_of_the_simulated_engine_is_a_manifest_error(wiring, monkeypatch):
    spec = job(kind="simulated", env={"RLJOB_SIM_TURNS": "many"})
    with open(wiring.job_file, "w") as file:  # noqa: PTH123
        json.dump(spec.model_dump(by_alias=True, mode="json", exclude_none=True), file)
    for name, text in wiring.to_env().items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ManifestError, match=r"spec\.rollout\.engine\.env"):
        engine_process.main()


def test_an_engine_without_a_prepared_model_says_so(wiring, monkeypatch):
    with open(wiring.job_file, "w") as file:  # noqa: PTH123
        json.dump(job().model_dump(by_alias=True, mode="json", exclude_none=True), file)
    for name, text in wiring.to_env().items():
        monkeypatch.setenv(name, text)
    with pytest.raises(Exception, match="holds no model; run the prepare component first"):
        engine_process.main()


IN_A_VLLM_IMAGE = {
    *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"),
    *("msgspec", "yaml", "httpx", "httpcore", "anyio", "sniffio", "certifi", "idna", "h11"),
}
"""Of what vLLM itself depends on, what we use. There is no structlog, redis, typer, rich or zstandard."""
RUN_WITH_NOTHING_ELSE = """
import importlib.abc, json, os, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if not known and top not in {allowed!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: a vLLM image need not have it")

sys.meta_path.insert(0, Refuse())
os.execve = lambda program, argv, env: print(json.dumps([argv, env["RLJOB_TOKEN"]]))
import rljob_rollout_worker.vllm_plugin, rljob_rollout_worker.vllm_cpu
from rljob_rollout_worker.engine_process import main
main()
"""


def test_the_engine_starts_from_a_mounted_folder_in_an_image_that_has_only_what_vllm_brings(
    wiring, model_dir, tmp_path
):
    extension = tmp_path / "extension"
    for package in (rljob, rljob_rollout_worker):
        folder = Path(package.__file__).parent
        shutil.copytree(folder, extension / folder.name)
    Path(wiring.job_file).write_text(job().model_dump_json(by_alias=True, exclude_none=True))
    allowed = IN_A_VLLM_IMAGE | {"rljob", "rljob_rollout_worker"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN_WITH_NOTHING_ELSE.format(allowed=allowed)],
        env={"PATH": "/bin", "PYTHONPATH": str(extension), **wiring.to_env()},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    argv, token = json.loads(done.stdout)
    assert argv[1:3] == ["-m", "rljob_rollout_worker.vllm_cpu"]
    assert str(model_dir) in argv
    assert token == "secret"


def test_a_pod_s_share_of_the_cores_is_kept(wiring):
    env = engine_env(job(), wiring, {"OMP_NUM_THREADS": "3"}, has_accelerator=False)
    assert env["OMP_NUM_THREADS"] == "3"
