"""The short forms of the benchmarks of sandboxes measure what they say. Timings are read by people, not by tests."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = ["name", "value", "unit", "comparator", "comparator_value", "ratio", "goal", "holds", "seed"]

Figures = dict[tuple[str, str], dict[str, float]]


def short(name: str) -> Figures:
    """The figures of a benchmark by name and comparator."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--short", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(list(line) == KEYS for line in lines)
    return {(line["name"], line["comparator"]): line for line in lines}


def test_claims_stand_beside_echoes_and_cold_starts() -> None:
    figures = short("claims")
    times = {key: line for key, line in figures.items() if line["unit"] == "ms"}
    assert {comparator for _, comparator in times} == {"bare asyncio echo", "cold start"}
    assert {name for name, _ in times} == {
        *("claim_p50", "claim_p99", "claim_burst_p50", "claim_burst_p99")
    }
    assert all(line["value"] > 0 < line["comparator_value"] for line in times.values())
    assert times["claim_p50", "cold start"]["ratio"] < 1


def test_an_exec_takes_longer_than_the_bare_command() -> None:
    figures = short("exec_round_trip")
    ways, commands, shares = ("exec", "shell"), ("true", "python"), ("p50", "p99")
    assert {name for name, _ in figures} == {
        "_".join(each) for each in itertools.product(ways, commands, shares)
    }
    assert figures["exec_true_p50", "subprocess"]["ratio"] > 1
    assert figures["exec_python_p50", "subprocess"]["value"] > 1


def test_recycling_by_reset_starts_as_many_sandboxes_as_work_at_once() -> None:
    figures = short("recycling")
    sandboxes = figures["recycling_sandboxes", "recreate"]
    assert sandboxes["value"] == 2
    assert 12 <= sandboxes["comparator_value"] <= 14
    assert figures["recycling_not_verified", "rollouts"]["value"] == 0


def test_the_soak_reads_broker_and_guests_at_each_quarter() -> None:
    figures = short("soak")
    assert figures.pop(("soak_sandboxes_replaced", "sandboxes"))["value"] == 0
    assert figures.pop(("soak_guest_children_execs", "at a quarter"))["value"] == 0
    assert len(figures) == 14
    assert all(line["value"] > 1 < line["comparator_value"] for line in figures.values())
    for name in ("broker_descriptors_end", "guest_descriptors_end", "guest_descriptors_execs"):
        assert figures[f"soak_{name}", "at a quarter"]["holds"], name


def test_a_soak_that_leaks_misses_its_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.soak import Reading, compare, compare_execs

    flat, leaks = Reading(50.0, 16, 20.0, 8, 0), Reading(60.0, 25, 20.0, 8, 9)
    held = {figure.name: figure.holds for figure in compare([flat, flat, flat, leaks])}
    assert (held["soak_broker_rss_end"], held["soak_broker_descriptors_end"]) == (False, False)
    assert (held["soak_guest_rss_end"], held["soak_guest_descriptors_end"]) == (True, True)
    assert held["soak_broker_rss_half"] is None
    held = {figure.name: figure.holds for figure in compare_execs(flat, leaks)}
    assert (held["soak_guest_rss_execs"], held["soak_guest_children_execs"]) == (True, False)


def test_the_local_pool_reads_its_metrics_by_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.local_pool import percentile, sum_of

    text = '# TYPE n counter\nn_total{pool="a",result="x"} 2\nn_total{pool="b",result="x"} 3\n'
    assert sum_of(text, "n_total", {"result": "x"}) == 5
    assert sum_of(text, "n_total", {"pool": "a"}) == 2
    assert sum_of(text, "n_total", {"pool": "c"}) == 0
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]


def test_claims_and_commands_in_pods_stand_beside_what_a_cluster_offers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.claims import Measured
    from benchmarks.cluster_claims import Exec, compare, compare_exec

    slow = list(compare(Measured([5.0, 5.0, 70.0], [100.0]), [2.0], [4000.0]))
    assert [figure.holds for figure in slow] == [True, False, None, None]
    assert {figure.comparator_value for figure in slow} == {2.0, 4000.0}
    execs = list(compare_exec(Exec([5.0], [99.0], [101.0])))
    assert [figure.holds for figure in execs] == [False, True]
