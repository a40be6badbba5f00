"""What people see: lines, the live panel, the summary, a trajectory turn by turn."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rljob.ledger import ReportView
from rljob.trajectory import Chain, Trajectory, VersionSpan
from rljob_operator.policies.verdict import Verdict
from rljob_operator.summary import AuditNumbers, build, rows
from rljob_operator.view.facts import Facts, Score, StepPace, apply_snapshot, seconds_text
from rljob_operator.view.live import panel, sparkline
from rljob_operator.view.plain import PlainView, line
from rljob_operator.view.trajectory import render, segments
from tests.unit.rljob_operator.conftest import snapshot


def facts(**fields: Any) -> Facts:
    base: dict[str, Any] = {
        "name": "quickstart",
        "phase": "Running",
        "started_at": 0.0,
        "elapsed_seconds": 83.0,
        "step": 4,
        "steps": 16,
        "eta_seconds": 130.0,
        "reward_mean": 0.625,
        "validation": [Score(0, 0.31, 0.2, 0.4), Score(4, 0.52, 0.4, 0.6)],
        "running": 32,
        "completed": 512,
        "failed": 1,
        "staleness_mean": 0.8,
        "staleness_max": 2,
        "tokens_per_second": 812.0,
        "components": {"store": "ready", "engine-0": "starting"},
        "restarts": {"engine-0": 1},
        "waiting": {"trainer": "groups: 3 of 16 ready"},
    }
    return Facts(**(base | fields))


def text_of(renderable: Any, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_one_line_says_everything() -> None:
    assert line(facts()) == (
        "[1:23] running | step 4/16 | eta 2:10 | reward 0.62 | validation 0.31 → 0.52 (step 4) | "
        "episodes 32 running 512 completed 1 failed | staleness 0.8 (max 2) | 812 tokens/s | engine-0 starting | "
        "trainer waits for groups: 3 of 16 ready"
    )


def test_lines_come_on_every_step_and_every_ten_seconds() -> None:
    written: list[str] = []
    view = PlainView(written.append)
    for elapsed, step in [
        (0, 0),
        (1, 0),
        (9, 0),
        (10, 0),
        (11, 1),
        (12, 1),
        (13, 2),
        (22, 2),
        (23, 2),
    ]:
        view.update(facts(elapsed_seconds=float(elapsed), step=step))
    assert [text.split("]")[0] for text in written] == ["[0:00", "[0:10", "[0:11", "[0:13", "[0:23"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_live_panel_shows_what_each_side_waits_for_at_every_width(width: int) -> None:
    text = text_of(panel(facts(message="no progress for 900 s: trainer waits"), [0.3, 0.6]), width)
    for word in (
        "step 4 of 16",
        "2:10 to go",
        "0.31",
        "engine-0",
        "restarted",
        "no progress for 900 s",
    ):
        assert word in " ".join(text.split()), word


def test_a_job_that_has_not_begun_can_be_shown() -> None:
    bare = Facts(name="x", phase="Pending", started_at=0, steps=3)
    assert "reward –" in line(bare)
    assert "x · Pending" in text_of(panel(bare, []))


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([]) == ""
    assert sparkline([-1.0, 3.0]) == "▁█"


def test_seconds_read_as_a_clock() -> None:
    assert [seconds_text(value) for value in (None, 5, 65.4, 7384)] == [
        "–",
        "0:05",
        "1:05",
        "2:03:04",
    ]


def test_the_eta_follows_the_pace_and_does_not_melt_while_a_step_is_slow() -> None:
    pace = StepPace()
    assert pace.eta_seconds(0, 0, 4) is None
    assert pace.eta_seconds(10, 1, 4) == 30
    assert pace.eta_seconds(15, 1, 4) == 25
    assert pace.eta_seconds(500, 1, 4) == 20
    assert pace.eta_seconds(501, 4, 4) == 0


def test_facts_take_over_what_the_ledger_knows() -> None:
    seen = facts()
    worker = ReportView(waiting_for="sandboxes", facts={"tokens_per_second": 5.0})
    old = ReportView(facts={"tokens_per_second": 7.0}, age_seconds=60)
    apply_snapshot(
        seen,
        snapshot(
            step=2, reports={"worker-0": worker, "worker-1": old}, staleness={"mean": 1.5, "max": 2}
        ),
    )
    assert (seen.step, seen.tokens_per_second, seen.staleness_mean) == (2, 5.0, 1.5)
    assert seen.waiting == {"worker-0": "sandboxes"}


def summary(tmp_path: Path, **fields: Any) -> Any:
    metrics = tmp_path / "metrics"
    metrics.mkdir(exist_ok=True)
    step = {"episodes": 8, "reward_mean": 0.25, "turns_mean": 2.0, "staleness_max": 1}
    steps = [
        {**step, "step": 1},
        {
            **step,
            "step": 2,
            "reward_mean": 0.75,
            "turns_mean": 3.0,
            "episodes": 24,
            "staleness_max": 2,
        },
    ]
    (metrics / "steps.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in steps) + '{"step": 3, "rew'
    )
    scores = [
        {"step": 0, "score": 0.3, "ci_low": 0.2, "ci_high": 0.4},
        {"step": 2, "score": 0.8, "ci_low": 0.7, "ci_high": 0.9},
    ]
    (metrics / "validation.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in scores)
    )
    trainer = ReportView(
        facts={"seconds_training": 3.0, "seconds_publishing": 1.0, "seconds_waiting": 9.0}
    )
    arguments: dict[str, Any] = {
        "name": "q",
        "mode": "train",
        "steps_wanted": 2,
        "folder": tmp_path,
        "artifacts": tmp_path,
        "snapshot": snapshot(
            step=2, counts={"completed": 30, "failed": 10}, reports={"trainer": trainer}
        ),
        "audit": AuditNumbers(lost=0, trained_twice=0),
        "wall_seconds": 60.04,
        "starting_seconds": 20.0,
        "restarts": {},
    }
    return build(Verdict("Succeeded", "StepsDone", "", 0), **(arguments | fields))


def test_the_summary_is_made_of_ledger_metrics_and_audit(tmp_path: Path) -> None:
    made = summary(tmp_path)
    assert (made.validation_first, made.validation_last, made.validation_last_interval) == (
        0.3,
        0.8,
        (0.7, 0.9),
    )
    assert (made.reward_first, made.reward_last, made.mean_turns) == (0.25, 0.75, 2.75)
    assert (made.completion_rate, made.max_staleness, made.wall_seconds) == (0.75, 2, 60.0)
    assert (made.trainer_seconds, made.waiting_for_rollouts_seconds) == (4.0, 9.0)
    assert dict(rows(made))["lost / trained twice"] == "0 / 0"


def test_a_run_that_never_got_anywhere_has_a_summary_too(tmp_path: Path) -> None:
    made = summary(
        tmp_path, snapshot=None, audit=None, artifacts=tmp_path / "nothing", restarts={"trainer": 3}
    )
    assert (made.steps, made.validation_first, made.lost, made.mean_turns) == (0, None, None, None)
    shown = dict(rows(made))
    assert shown["lost / trained twice"] == "not audited / not audited"
    assert shown["restarts"] == "trainer 3"


CHAIN = Chain(
    tokens=[1, 2, 3, 4, 5, 6, 7],
    prompt_length=2,
    action_mask=[False, False, True, True, False, True, True],
    logprobs=[-0.1, -0.2, -0.3, -0.4],
    version_spans=[VersionSpan(2, 2, 1, 4), VersionSpan(5, 1, 1, 4), VersionSpan(6, 1, 1, 5)],
    finish_reason="stop",
)


def test_a_chain_is_cut_where_the_mask_or_the_version_changes() -> None:
    cut = [(s.start, s.length, s.version, s.logprobs) for s in segments(CHAIN)]
    assert cut == [
        (0, 2, None, []),
        (2, 2, "1-4", [-0.1, -0.2]),
        (4, 1, None, []),
        (5, 1, "1-4", [-0.3]),
        (6, 1, "1-5", [-0.4]),
    ]


def test_a_trajectory_without_a_tokenizer_is_shown_as_ids(tmp_path: Path) -> None:
    record = Trajectory(
        job="j", episode="t1-0.0", attempt=1, task="shell", reward=1.0, outcome="completed", chains=[CHAIN], turns=2,
        tool_calls=1, started_at=0, worker="w", sandbox="s", model="m", row_index=1,
    )  # fmt: skip
    text = text_of(render(record, tmp_path, trained_at=6))
    for part in (
        "t1-0.0",
        "by version 1-5",
        "mean logprob -0.400",
        "2 tokens of context (mask 0) at 0",
        "n = 4 to 5",
    ):
        assert part in text, part


def test_a_wrong_name_among_thousands_is_told_in_one_short_line() -> None:
    from rljob_operator.show.runs import unknown

    error = str(unknown("trajectory", "?", [f"t{index}-0.0" for index in range(5000)]))
    assert error.endswith("t6-0.0 … t4999-0.0 (5000 in all)")
    assert len(error) < 200
