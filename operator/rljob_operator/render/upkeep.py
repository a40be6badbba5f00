"""What looks after the pods: budgets for a node's drain, a PodMonitor, the account they run as."""

from __future__ import annotations

from rljob import labels
from rljob_operator.observed import Object
from rljob_operator.render.context import JOB_WIDE, Context

POD_MONITORS = "podmonitors.monitoring.coreos.com"
"""The CRD that must exist."""
SCRAPED = ("metrics", "gateway-metrics")
"""Port names. The engine's own metrics are on the port of its API, which is closed to all but its pod."""


def account(context: Context) -> Object:
    """A ServiceAccount without any right, and without a token."""
    body = {"automountServiceAccountToken": False}
    return context.child("v1", "ServiceAccount", "", JOB_WIDE, body)


def budgets(context: Context) -> list[Object]:
    """One pod at a time; those that are not ready anyway do not hold up a drain."""
    components = ["rollout", *(["store"] if context.own_store else [])]
    return [
        context.child(
            "policy/v1",
            "PodDisruptionBudget",
            component,
            component,
            {
                "spec": {
                    "maxUnavailable": 1,
                    "selector": context.pods_of(component),
                    "unhealthyPodEvictionPolicy": "AlwaysAllow",
                }
            },
        )
        for component in components
    ]


def monitor(context: Context, crds: frozenset[str]) -> list[Object]:
    """Tells a Prometheus operator, where there is one, to scrape the pods."""
    if not context.config.pod_monitors or POD_MONITORS not in crds:
        return []
    spec = {
        "jobLabel": labels.JOB,  # the series' `job` is the RLJob's name, as dashboards and rules expect
        "selector": {"matchLabels": {labels.JOB: context.owner.name}},
        "podMetricsEndpoints": [{"port": port} for port in SCRAPED],
    }
    return [context.child("monitoring.coreos.com/v1", "PodMonitor", "", JOB_WIDE, {"spec": spec})]
