"""The quick start in small, on real parts: Valkey, vLLM, verl, bubblewrap sandboxes, by the CLI.

Two runs: `async` with weight updates in flight, and `sync`. What they leave behind is checked record by record.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob.codec import unpack
from rljob.trajectory import Trajectory

pytestmark = [pytest.mark.vllm, pytest.mark.verl, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
STEPS = 4


def _manifest(folder: Path, name: str, rollout: dict[str, Any]) -> Path:
    """The quick start's own manifest with fewer steps and rows, keeping every version of the weights."""
    data = yaml.safe_load((ROOT / "examples/quickstart/rljob.yaml").read_text())
    data["metadata"]["name"] = name
    spec = data["spec"]
    spec["rollout"].pop("maxStaleness", None)
    spec["rollout"] |= {"groupSize": 4, "maxConcurrentEpisodes": 24, **rollout}
    spec["data"]["validation"] |= {"maxRows": 20, "everySteps": 100}
    spec["trainer"] |= {"steps": STEPS, "groupsPerStep": 8}
    spec["trainer"]["weights"] = {"keep": 100}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def _run(folder: Path, name: str, rollout: dict[str, Any]) -> Path:
    manifest = _manifest(folder, name, rollout)
    command = [sys.executable, "-m", "rljob.cli.main", "run", str(manifest)]
    command += ["--runs-dir", str(folder / "runs")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=800, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "runs" / name


@pytest.fixture(scope="module")
def async_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(tmp_path_factory.mktemp("async"), "small-async", {"schedule": "async"})


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(tmp_path_factory.mktemp("sync"), "small-sync", {"schedule": "sync"})


def _trained(run: Path) -> Iterator[tuple[int, Trajectory]]:
    for folder in sorted((run / "artifacts" / "batches").glob("step-*")):
        manifest = json.loads((folder / "manifest.json").read_text())
        data = (folder / "groups.bin").read_bytes()
        for group in manifest["groups"]:
            for episode in group["episodes"]:
                start = episode["offset"]
                yield manifest["step"], unpack(data[start : start + episode["length"]])


def _tokens_and_versions(trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    for chain in trajectory.chains:
        for span in chain.version_spans:
            yield from (
                (span.n, position) for position in range(span.start, span.start + span.length)
            )


@pytest.mark.parametrize("fixture", ["async_run", "sync_run"])
def test_the_run_succeeds_and_loses_nothing(fixture: str, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(fixture)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["phase"] == "Succeeded"
    assert (summary["steps"], summary["lost"], summary["trained_twice"]) == (STEPS, 0, 0)
    assert summary["max_staleness"] <= (2 if fixture == "async_run" else 0)
    assert (run / "artifacts" / "metrics" / "steps.jsonl").read_text().count("\n") == STEPS
    assert len(list(_trained(run))) == STEPS * 8 * 4


def test_every_sampled_token_rescores_under_the_version_it_names(async_run: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    newest = [trajectory for _, trajectory in _trained(async_run)][-20:]
    models: dict[str, Any] = {}
    versions = set()
    for chain in (chain for trajectory in newest for chain in trajectory.chains):
        logprobs = iter(chain.logprobs)
        for span in chain.version_spans:
            version = f"{span.incarnation}-{span.n}"
            versions.add(version)
            if version not in models:
                folder = async_run / "artifacts" / "weights" / version
                models[version] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            with torch.no_grad():
                logits = models[version](input_ids=torch.tensor([chain.tokens])).logits[0]
            scores = logits.log_softmax(-1)
            for position in range(span.start, span.start + span.length):
                expected = float(scores[position - 1, chain.tokens[position]])
                assert next(logprobs) == pytest.approx(expected, abs=1e-3)
    assert len(newest) == 20
    assert versions - {"1-0"}, "no trajectory of the last step knows a newer version"


def test_async_stays_within_its_staleness_bound(async_run: Path) -> None:
    for step, trajectory in _trained(async_run):
        assert trajectory.version_range[0] >= step - 1 - 2


def test_in_sync_every_trained_token_carries_the_version_being_trained(sync_run: Path) -> None:
    count = 0
    for step, trajectory in _trained(sync_run):
        for n, _ in _tokens_and_versions(trajectory):
            assert n == step - 1
            count += 1
    assert count > 1000


@pytest.mark.parametrize("fixture", ["async_run", "sync_run"])
def test_no_process_of_the_run_is_left(fixture: str, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(fixture)
    left = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(run).encode() in environ.read_bytes():
                left.append((environ.parent / "cmdline").read_bytes())
        except OSError:
            continue
    assert left == []


def test_an_eval_scores_the_model_that_the_engine_serves_without_a_trainer(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rljob.cli.main",
        "run",
        str(ROOT / "examples/eval/rljob.yaml"),
    ]
    command += ["--set", "data.validation.maxRows=8", "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    run = tmp_path / "quickstart-eval"
    result = json.loads((run / "artifacts" / "result.json").read_text())
    assert (result["n"], result["returned"], result["versions"]) == (32, 32, [0, 0])
    assert result["pass_at"]["4"] >= result["pass_at"]["1"] == result["score"]
    worker = (run / "logs" / "worker-0.log").read_text()
    assert "event=switched version=1-0 verdict=indistinguishable" in worker
