"""*Rollout completion*: do episodes finish, what fails, and who waits for whom.

    at a glance ─ episodes ─ stream and staleness ─ sandboxes and engines ─ trainer

One job at a time, chosen by the variables `namespace` and `job`.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.models import units

from dashboards.panels import (
    board,
    graph,
    last,
    mean,
    number,
    or_zero,
    per_second,
    quantile,
    series,
    total,
    variable,
)

Panels = list[timeseries.Panel | stat.Panel]

ENDED = "~accepted|retry|dead"
"""Answers of the ledger that end an attempt for good or ill; whoever comes second is neither."""
EACH_POD = "rljob_episodes_running"
"""Every rollout pod has it from its first second, so it tells which jobs there are."""


def dashboard() -> grafana.Dashboard:
    """The whole of it."""
    made = board(
        "Rollout completion",
        "rljob-rollout-completion",
        "Do episodes of an RLJob finish, what fails, and who waits for whom?",
        variable("namespace", "Namespace", EACH_POD),
        variable("job", "Job", f'{EACH_POD}{{namespace="$namespace"}}'),
    )
    for title, panels in ROWS.items():
        made.with_row(grafana.Row(title))
        for panel in panels():
            made.with_panel(panel)
    return made


def _glance() -> Panels:
    accepted = per_second("rljob_attempts_total", answer="accepted")
    ended = per_second("rljob_attempts_total", answer=ENDED)
    return [
        number(
            "Completion rate",
            "Attempts whose episode was delivered, of all that ended: accepted / (accepted + retry + dead).",
            units.PercentUnit,
            f"{accepted} / ({ended} > 0)",
            bad_below=0.9,
        ),
        number("Step", "Steps trained and committed.", units.Short, last("rljob_trainer_step")),
        number(
            "Completed",
            "Episodes delivered since the job began.",
            units.Short,
            _ledger("completed"),
        ),
        number(
            "Failed attempts",
            "Attempts that the infrastructure failed, since the job began.",
            units.Short,
            _ledger("failed"),
        ),
        number(
            "Running",
            "Episodes that hold a lease now, whatever their stage.",
            units.Short,
            _ledger("running"),
        ),
        number(
            "Mean reward",
            "Of the last trained batch.",
            units.Short,
            last("rljob_reward_mean"),
        ),
    ]


def _ledger(what: str) -> str:
    return last("rljob_ledger_count", what=what)


def _episodes() -> Panels:
    failed_calls = per_second("rljob_tool_calls_total", result="!ok")
    # a reward may be negative, so its histogram has no sum, and no mean
    at_most_zero = per_second("rljob_episode_reward_bucket", "task", le="0.0")
    rewarded = per_second("rljob_episode_reward_count", "task")
    return [
        graph(
            "How attempts end",
            "Per second: accepted is a delivered episode; retry gets another attempt; dead ends its group.",
            units.OpsPerSecond,
            (per_second("rljob_attempts_total", "answer", answer=ENDED), "{{answer}}"),
            stacked=True,
        ),
        graph(
            "Failures by reason",
            "Attempts per second that the infrastructure failed, by the stage they were in and the class of the error.",
            units.OpsPerSecond,
            (
                or_zero(per_second("rljob_failures_total", "stage, error")),
                "{{stage}} {{error}}",
            ),
            stacked=True,
        ),
        graph(
            "Episodes in the pipeline",
            "By stage. Many in acquire: sandboxes are short. Many in run: engines are.",
            units.Short,
            (total("rljob_episodes_running", "stage"), "{{stage}}"),
            stacked=True,
        ),
        graph(
            "Outcomes",
            "Delivered episodes per second by outcome. Much context_full or max_turns: the limits are tight.",
            units.OpsPerSecond,
            (per_second("rljob_episodes_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        graph(
            "Mean turns",
            "Assistant turns per delivered episode.",
            units.Short,
            (mean("rljob_episode_turns", by="task"), "{{task}}"),
        ),
        graph(
            "Reward",
            "Mean of the last trained batch, score of the newest validation, share of episodes above 0.",
            units.Short,
            (last("rljob_reward_mean"), "last batch"),
            (last("rljob_validation_score"), "validation"),
            (f"1 - {at_most_zero} / ({rewarded} > 0)", "{{task}}: above 0"),
        ),
        graph(
            "Seconds per stage",
            "Half of the episodes need no longer.",
            units.Seconds,
            (quantile(0.5, "rljob_stage_seconds", by="stage"), "{{stage}}"),
        ),
        graph(
            "Tokens",
            "Of delivered episodes, per second: prompt (read) and action (sampled, trained on).",
            units.Short,
            (per_second("rljob_tokens_total", "kind"), "{{kind}}"),
        ),
        graph(
            "Tool calls that fail",
            "Share of tool calls that end in an error or time out.",
            units.PercentUnit,
            (
                f"({or_zero(failed_calls)}) / ({per_second('rljob_tool_calls_total')} > 0)",
                "failed",
            ),
            share=True,
        ),
    ]


def _stream() -> Panels:
    waiting = per_second("rljob_rollout_waiting_seconds_total", "reason")
    return [
        graph(
            "Staleness",
            "Version being trained minus that of a group's oldest token, over the last batch.",
            units.Short,
            (last("rljob_staleness_versions", "stat"), "{{stat}}"),
        ),
        graph(
            "Stream",
            "Complete groups that wait for the trainer, trajectories in the stream, and those taken but not archived.",
            units.Short,
            (last("rljob_stream_backlog_groups"), "groups waiting"),
            (last("rljob_stream_entries"), "entries"),
            (last("rljob_stream_pending"), "taken, not archived"),
        ),
        graph(
            "Retries, evictions, dead groups",
            "Totals: attempts tried again, groups evicted for age, groups given up, episodes run again after a loss.",
            units.Short,
            (
                last("rljob_ledger_count", "what", what="~retried|evicted|dead|rerun"),
                "{{what}}",
            ),
        ),
        graph(
            "Why rollouts wait",
            "Share of time in which a worker with free slots started nothing new, by the ledger's reason.",
            units.PercentUnit,
            (
                f"{waiting} / on () group_left () count({total('rljob_episodes_running', 'instance')})",
                "{{reason}}",
            ),
            stacked=True,
        ),
        graph(
            "Memory of the store",
            "What Valkey or Redis says it uses.",
            units.BytesIEC,
            (last("rljob_store_memory_bytes"), "used"),
        ),
    ]


def _sandboxes() -> Panels:
    claims = "rljob_sandbox_claim_seconds"
    failed = per_second("rljob_weight_switches_total", "verdict", verdict="!new")
    return [
        graph(
            "Sandboxes",
            "By pool and state: ready ones are warm and free.",
            units.Short,
            (total("rljob_sandboxes", "pool, state"), "{{pool}} {{state}}"),
            stacked=True,
        ),
        graph(
            "Seconds per claim",
            "Of claims that were granted: queue, until a sandbox was free, and accept, until its guest knew.",
            units.Seconds,
            (quantile(0.5, claims, "phase"), "{{phase}} p50"),
            (quantile(0.95, claims, "phase"), "{{phase}} p95"),
        ),
        graph(
            "Seconds per command",
            "In a sandbox, from asking to its answer, as the workers see it.",
            units.Seconds,
            (quantile(0.5, "rljob_sandbox_exec_seconds"), "p50"),
            (quantile(0.95, "rljob_sandbox_exec_seconds"), "p95"),
        ),
        graph(
            "Claims that got nothing",
            "Per second, by result: exhausted (none was free in time), at_quota, failed, expired, forfeited.",
            units.OpsPerSecond,
            (
                or_zero(
                    per_second("rljob_sandbox_claims_total", "pool, result", result="!granted")
                ),
                "{{pool}} {{result}}",
            ),
        ),
        graph(
            "Engine switch",
            "Seconds from seeing new weights to serving them, and those in which the engine took no request.",
            units.Seconds,
            (mean("rljob_weight_switch_seconds"), "switch"),
            (mean("rljob_weight_pause_seconds"), "pause"),
        ),
        graph(
            "Switches that failed",
            "Per minute, by verdict.",
            units.Short,
            (
                or_zero(f"60 * {failed}"),
                "{{verdict}}",
            ),
        ),
    ]


def _trainer() -> Panels:
    return [
        graph(
            "Trainer waits",
            "Share of time in which the trainer had nothing to train, by reason.",
            units.PercentUnit,
            (per_second("rljob_trainer_waiting_seconds_total", "reason"), "{{reason}}"),
            stacked=True,
            share=True,
        ),
        graph(
            "Where a step's time goes",
            "Seconds per second in each phase.",
            units.PercentUnit,
            (per_second("rljob_trainer_phase_seconds_sum", "phase"), "{{phase}}"),
            stacked=True,
        ),
        graph(
            "Step and policy version",
            "The trainer's step, and the oldest and newest version that any component holds.",
            units.Short,
            (last("rljob_trainer_step"), "step"),
            (f"min({series('rljob_policy_version')})", "oldest version held"),
            (last("rljob_policy_version"), "newest version held"),
        ),
        graph(
            "Groups trained per minute",
            "What came out at the end.",
            units.Short,
            (f"60 * {per_second('rljob_groups_total', fate='trained')}", "trained"),
        ),
    ]


ROWS = {
    "At a glance": _glance,
    "Episodes": _episodes,
    "Stream and staleness": _stream,
    "Sandboxes and engines": _sandboxes,
    "Trainer": _trainer,
}
