"""What a panel of ours looks like: one unit, one sentence of explanation, queries that know the variables."""

from __future__ import annotations

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
JOB = 'namespace="$namespace",job="$job"'
"""Every series of a job carries its namespace and its name: PodMonitors add them, the operator knows them."""
POOLS = 'namespace="$namespace",pool=~"$pool"'
"""Series of sandbox pools, those without a job among them."""
WINDOW = "$__rate_interval"

Target = tuple[str, str]
"""Query and legend."""


def series(metric: str, scope: str = JOB, **labels: str) -> str:
    """The series of a metric in a scope: the chosen job, or pools; `~` before a value is a pattern, `!` is "not"."""
    signs = {"~": "=~", "!": "!="}
    own = (
        f'{label}{signs[value[0]]}"{value[1:]}"' if value[0] in signs else f'{label}="{value}"'
        for label, value in labels.items()
    )
    return f"{metric}{{{','.join((scope, *own))}}}"


def last(metric: str, by: str = "", **labels: str) -> str:
    """A gauge of which one component is right: the highest."""
    return f"max{_by(by)} ({series(metric, **labels)})"


def total(metric: str, by: str = "", **labels: str) -> str:
    """A gauge over all components."""
    return f"sum{_by(by)} ({series(metric, **labels)})"


def per_second(counter: str, by: str = "", **labels: str) -> str:
    """How fast a counter goes up over all components."""
    return f"sum{_by(by)} (rate({series(counter, **labels)}[{WINDOW}]))"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def mean(histogram: str, by: str = "", **labels: str) -> str:
    """Mean of what a histogram saw."""
    total_seconds, number = (
        per_second(f"{histogram}_{part}", by, **labels) for part in ("sum", "count")
    )
    return f"{total_seconds} / ({number} > 0)"


def quantile(share: float, histogram: str, by: str = "", **labels: str) -> str:
    """A quantile of what a histogram saw."""
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {per_second(f'{histogram}_bucket', groups, **labels)})"


def or_zero(query: str) -> str:
    """Zero where a counter of failures has never counted: nothing failed is an answer too."""
    return f"{query} or vector(0)"


def graph(
    title: str,
    about: str,
    unit: str,
    *targets: Target,
    stacked: bool = False,
    share: bool = False,
) -> timeseries.Panel:
    """Lines over time; `share`: between 0 and 1."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .height(8)
        .span(8)
        .line_width(1)
        .fill_opacity(30 if stacked else 5)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if share:
        panel.max(1)
    for number, (query, legend) in enumerate(targets):
        panel.with_target(_target(number, query, legend))
    return panel


def number(
    title: str, about: str, unit: str, query: str, bad_below: float | None = None
) -> stat.Panel:
    """One number as it is now; red below `bad_below`."""
    panel = (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(DATASOURCE)
        .unit(unit)
        .height(4)
        .span(4)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(0, query, ""))
    )
    if bad_below is not None:
        steps = [
            models.Threshold(value=None, color="red"),
            models.Threshold(value=bad_below, color="green"),
        ]
        panel.thresholds(
            grafana.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
        )
    return panel


def board(title: str, uid: str, about: str, *variables: grafana.QueryVariable) -> grafana.Dashboard:
    """An empty dashboard with its variables."""
    made = (
        grafana.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["rljob"])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            grafana.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for one in variables:
        made.with_variable(one)
    return made


def variable(label: str, title: str, metric: str) -> grafana.QueryVariable:
    """The values of a label of a metric, to choose among."""
    return (
        grafana.QueryVariable(label)
        .label(title)
        .datasource(DATASOURCE)
        .query({"query": f"label_values({metric}, {label})", "refId": "A"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _target(number: int, query: str, legend: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id("ABCDEFGH"[number])
        .datasource(DATASOURCE)
        .expr(query)
        .legend_format(legend or "__auto")
        .range()
    )
