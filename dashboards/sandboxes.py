"""*Sandboxes*: is one ready when it is wanted, and what becomes of it afterwards.

    at a glance ─ claims ─ recycling

All pools of a namespace or some of them, those without a job too.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.models import units

from dashboards.panels import (
    POOLS,
    board,
    graph,
    mean,
    number,
    or_zero,
    per_second,
    quantile,
    total,
    variable,
)

Panels = list[timeseries.Panel | stat.Panel]

EACH_POOL = "rljob_sandboxes"
"""Every pool has it from its first second."""
CLAIM = "rljob_sandbox_claim_seconds"


def dashboard() -> grafana.Dashboard:
    """The whole of it."""
    pools = variable("pool", "Pool", f'{EACH_POOL}{{namespace="$namespace"}}')
    made = board(
        "Sandboxes",
        "rljob-sandboxes",
        "Is a sandbox ready when it is wanted, and what becomes of it afterwards?",
        variable("namespace", "Namespace", EACH_POOL),
        pools.multi(True).include_all(True).all_value(".*"),
    )
    for title, panels in ROWS.items():
        made.with_row(grafana.Row(title))
        for panel in panels():
            made.with_panel(panel)
    return made


def _of(state: str) -> str:
    return total("rljob_sandboxes", scope=POOLS, state=state)


def _granted(**labels: str) -> str:
    """Claims per second; each is in the histogram once per phase."""
    return per_second(f"{CLAIM}_count", scope=POOLS, phase="queue", **labels)


def _glance() -> Panels:
    return [
        number("Ready", "Warm, and free to be claimed.", units.Short, _of("ready")),
        number("Claimed", "Held by somebody now.", units.Short, _of("claimed")),
        number(
            "Starting",
            "On their way: many for long means no room or an image that is pulled.",
            units.Short,
            _of("starting"),
        ),
        number(
            "Quarantined",
            "Did not verify after a reset, and are kept for a look: the evidence is in the pool's status.",
            units.Short,
            _of("quarantined"),
        ),
        number("Claims per second", "That were granted.", units.OpsPerSecond, _granted()),
        number(
            "Warm hits",
            "Claims that found a sandbox ready, of all that were granted; red means: raise `warm`.",
            units.PercentUnit,
            f"({or_zero(_granted(result='hit'))}) / ({_granted()} > 0)",
            bad_below=0.9,
        ),
    ]


def _claims() -> Panels:
    return [
        graph(
            "Seconds per claim by phase",
            "queue: until a sandbox was free; accept: until its guest had the claim.",
            units.Seconds,
            *(
                (quantile(share, CLAIM, "phase", scope=POOLS), f"{{{{phase}}}} p{share * 100:g}")
                for share in (0.5, 0.99)
            ),
        ),
        graph(
            "Seconds in the queue",
            "99 of 100 wait no longer, by whether a sandbox was ready (hit) or had to be waited for (miss).",
            units.Seconds,
            (quantile(0.99, CLAIM, "result", scope=POOLS, phase="queue"), "{{result}}"),
        ),
        graph(
            "Claims by image",
            "Granted per second. A pool with one image has no name for it here.",
            units.OpsPerSecond,
            (
                per_second(f"{CLAIM}_count", "pool, image", scope=POOLS, phase="queue"),
                "{{pool}} {{image}}",
            ),
            stacked=True,
        ),
        graph(
            "Sandboxes by state",
            "All that exist; their sum never passes `max`.",
            units.Short,
            (total("rljob_sandboxes", "state", scope=POOLS), "{{state}}"),
            stacked=True,
        ),
        graph(
            "Claims that ended badly",
            "Per second: exhausted (none free in time), at_quota, failed, expired (time to live or idle), forfeited.",
            units.OpsPerSecond,
            (
                or_zero(
                    per_second(
                        "rljob_sandbox_claims_total",
                        "pool, result",
                        scope=POOLS,
                        result="!granted",
                    )
                ),
                "{{pool}} {{result}}",
            ),
            stacked=True,
        ),
        graph(
            "Idle before use",
            "Mean seconds that a sandbox was ready before its claim. Long: `warm` is more than is needed.",
            units.Seconds,
            (mean("rljob_sandbox_idle_seconds", "pool", scope=POOLS), "{{pool}}"),
        ),
    ]


def _recycling() -> Panels:
    failed = per_second("rljob_sandbox_resets_total", scope=POOLS, result="!verified")
    return [
        graph(
            "Resets",
            "Per second, by result: verified ones are used again; quarantined and failed ones are replaced.",
            units.OpsPerSecond,
            (per_second("rljob_sandbox_resets_total", "result", scope=POOLS), "{{result}}"),
            stacked=True,
        ),
        graph(
            "Resets that did not verify",
            "Share of all. Something in the episodes leaves traces: see the evidence of the quarantined ones.",
            units.PercentUnit,
            (
                f"({or_zero(failed)}) / ({per_second('rljob_sandbox_resets_total', scope=POOLS)} > 0)",
                "not verified",
            ),
            share=True,
        ),
        graph(
            "Starts",
            "Per second, by result: ready, adopted from an earlier pool manager, failed.",
            units.OpsPerSecond,
            (
                per_second("rljob_sandbox_starts_total", "pool, result", scope=POOLS),
                "{{pool}} {{result}}",
            ),
            stacked=True,
        ),
    ]


ROWS = {"At a glance": _glance, "Claims": _claims, "Recycling": _recycling}
