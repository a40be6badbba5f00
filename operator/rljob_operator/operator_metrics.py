"""Metrics of the operator itself, and of each job as the operator sees it in the ledger.

The jobs' gauges are made at each scrape from what is known then, so a job that is gone leaves no series behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rljob.ledger.types import LedgerSnapshot
from rljob.telemetry import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

RECONCILES = Counter(
    "rljob_operator_reconciles_total",
    "Passes by result: ok, retry (the API server or a store did not answer), error (a fault of the operator).",
    ["result"],
)
RECONCILE_SECONDS = Histogram(
    "rljob_operator_reconcile_seconds",
    "Seconds per pass.",
    [],
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
API_REQUESTS = Counter(
    "rljob_operator_api_requests_total",
    "Calls to the API server by method and code; code 0: no answer. Lease renewals are not in here.",
    ["method", "code"],
)
WATCH_AGE_SECONDS = Gauge(
    "rljob_operator_watch_age_seconds",
    "Seconds since the watch of a kind was heard, not even a bookmark; RLJob: since kopf was seen to be up to date.",
    ["kind"],
)
LEADER = Gauge("rljob_operator_leader", "1 where this replica leads.")

JobFacts = tuple[Mapping[str, Any], LedgerSnapshot | None]
"""An RLJob and its ledger as last seen."""


class JobCollector:
    """The gauges of all jobs, made when they are asked for.

    Args:
        facts: Gives every job with its ledger; called in the thread that serves metrics.
    """

    def __init__(self, facts: Callable[[], Iterable[JobFacts]]) -> None:
        self._facts = facts

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry must not ask before the first job is known."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        phases: dict[str, int] = {}
        families: dict[str, GaugeMetricFamily] = {}
        for job, ledger in list(self._facts()):
            phase = str((job.get("status") or {}).get("phase") or "Unknown")
            phases[phase] = phases.get(phase, 0) + 1
            where = [str(job["metadata"].get("namespace", "")), str(job["metadata"]["name"])]
            for name, value in _values(ledger):
                if name not in families:
                    labels = ["namespace", "job"]
                    families[name] = GaugeMetricFamily(name, JOB_GAUGES[name], labels=labels)
                families[name].add_metric(where, value)
        by_phase = GaugeMetricFamily("rljob_operator_jobs", "RLJobs by phase.", labels=["phase"])
        for phase, count in sorted(phases.items()):
            by_phase.add_metric([phase], count)
        yield by_phase
        yield from families.values()


JOB_GAUGES = {
    "rljob_job_step": "Steps trained.",
    "rljob_job_steps": "Steps to train.",
    "rljob_job_episodes_completed": "Episodes whose completion was accepted.",
    "rljob_job_episodes_failed": "Attempts that failed, those tried again included.",
    "rljob_job_episodes_running": "Episodes that are leased now.",
    "rljob_job_groups_dead": "Groups that were given up.",
    "rljob_job_groups_evicted": "Groups evicted for staleness.",
    "rljob_job_completion_rate": "Accepted completions / (accepted + failed attempts).",
    "rljob_job_staleness_mean": "Policy versions, mean over the last batch.",
    "rljob_job_staleness_max": "Policy versions, maximum over the last batch.",
    "rljob_job_reward_mean": "Mean reward of the last batch; before the first, of recent completions.",
    "rljob_job_turns_mean": "Turns of recent episodes.",
    "rljob_job_backlog_groups": "Complete groups that wait for the trainer.",
    "rljob_job_validation_score": "Score of the newest closed validation.",
    "rljob_job_policy_version": "n of the newest committed weights.",
    "rljob_job_store_memory_bytes": "Memory that the store says it uses.",
}
"""Name → what it is."""


def _values(ledger: LedgerSnapshot | None) -> Iterator[tuple[str, float]]:
    if ledger is None:
        return
    counts = ledger.counts
    completed, failed = counts.get("completed", 0), counts.get("failed", 0)
    yield "rljob_job_step", ledger.step
    yield "rljob_job_steps", ledger.steps
    yield "rljob_job_episodes_completed", completed
    yield "rljob_job_episodes_failed", failed
    yield "rljob_job_episodes_running", counts.get("running", 0)
    yield "rljob_job_groups_dead", counts.get("dead", 0)
    yield "rljob_job_groups_evicted", counts.get("evicted", 0)
    yield "rljob_job_backlog_groups", counts.get("ready_groups", 0)
    yield "rljob_job_store_memory_bytes", ledger.memory_bytes
    if completed + failed:
        yield "rljob_job_completion_rate", completed / (completed + failed)
    for stat, value in ledger.staleness.items():
        yield f"rljob_job_staleness_{stat}", value
    if ledger.reward_mean is not None:
        yield "rljob_job_reward_mean", ledger.reward_mean
    if ledger.turns_recent is not None:
        yield "rljob_job_turns_mean", ledger.turns_recent
    if ledger.validation:
        yield "rljob_job_validation_score", ledger.validation[max(ledger.validation)]
    if ledger.policy.version is not None:
        yield "rljob_job_policy_version", ledger.policy.version.n
