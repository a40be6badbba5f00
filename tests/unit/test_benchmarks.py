"""The benchmarks measure what they say. Their timings are read by people, not by tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = ["name", "value", "unit", "comparator", "comparator_value", "ratio", "goal", "holds", "seed"]


def run(*names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_the_codec_benchmark_prints_its_figures_and_the_size_holds() -> None:
    lines = [json.loads(line) for line in run("codec").stdout.splitlines()]
    assert [list(line) for line in lines] == [KEYS] * 12
    sizes = {line["comparator"]: line for line in lines if line["unit"] == "bytes/token"}
    assert set(sizes) == {"msgpack lists", "orjson", "pickle"}
    assert all(line["holds"] and line["value"] <= 5.1 for line in sizes.values())
    assert all(line["ratio"] < 1 for line in sizes.values())


def test_the_stream_benchmark_hands_over_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import stream

    for name, value in {"ROUNDS": 1, "STEPS": 2, "RECORDS": 128}.items():
        monkeypatch.setattr(stream, name, value)
    (figure,) = stream.figures()
    assert list(json.loads(figure.line())) == KEYS
    assert figure.value > 0 < figure.comparator_value
    assert figure.holds == (figure.ratio >= 0.7)


def test_an_unknown_benchmark_is_named() -> None:
    result = run("nonsense")
    assert (result.returncode, result.stdout) == (2, "")
    assert "unknown benchmark nonsense; there are codec, stream, exec_round_trip," in result.stderr


def test_the_shared_record_is_22_percent_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.workload import mixed_trajectory

    record = mixed_trajectory()
    assert record.num_tokens == 32_768
    assert record.num_action_tokens / record.num_tokens == pytest.approx(0.22, abs=0.001)
    assert max(record.chains[0].tokens) > 140_000
    assert mixed_trajectory() == record
