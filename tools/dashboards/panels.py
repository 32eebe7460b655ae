"""Building blocks of the dashboards: queries, panels in one style, links between the dashboards.
Needs grafana-foundation-sdk."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grafana_foundation_sdk.builders import (
    barchart,
    common,
    dashboard,
    prometheus,
    stat,
    timeseries,
)
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FLEET_UID = "placement-fleet"
WORKER_UID = "placement-worker"
BYTES = "bytes"  # Grafana's IEC unit: GiB
SHARE = "percentunit"  # 1 is 100 %
SECONDS = "s"
BYTES_A_SECOND = "Bps"  # SI units: GB/s, like link speeds
COUNT = "short"

STALL_STEPS = (("green", None), ("yellow", 0.1), ("red", 0.2))
"""Fractions of the wall time. At the last one `PlacementStallShareHigh` begins."""
BUDGET_STEPS = (("green", None), ("yellow", 0.85), ("red", 0.95))
"""Fractions of the budget. At the last one `PlacementBudgetNearlyFull` begins."""
NONE_STEPS = (("green", None), ("red", 0.5))
"""For counts that should be 0. Not 1, because Prometheus' increase() can turn one event into
0.9."""
UNACCOUNTED_STEPS = (("green", None), ("yellow", 4 * 2.0**30), ("red", 8 * 2.0**30))
"""CUDA contexts and NCCL normally take one to three GiB."""
PLAIN_STEPS = (("text", None),)
Steps = Sequence[tuple[str, float | None]]

DATASOURCE = options.DataSourceRef(type_val="prometheus", uid="${datasource}")
_VALUES = "var-datasource=${datasource}&var-run=${run:percentencode}"


def worker_link(instance: str) -> dashboard.DashboardLink:
    """A link from a value of the fleet dashboard to the dashboard of the worker that `instance`
    expands to, with the same time range."""
    instance = f"var-instance=${{{instance}:percentencode}}"
    url = f"/d/{WORKER_UID}?{_VALUES}&{instance}&${{__url_time_range}}"
    return dashboard.DashboardLink("This worker").url(url).target_blank(False)


def query(
    expr: str, legend: str = "", *, instant: bool = False, table: bool = False
) -> prometheus.Dataquery:
    """One query; `table` is for panels that show rows."""
    made = (
        prometheus.Dataquery()
        .expr(" ".join(expr.split()))
        .datasource(DATASOURCE)
        .legend_format(legend)
    )
    if table:
        made.format(PromQueryFormat.TABLE)
    return made.instant() if instant or table else made.range()


def thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(model.ThresholdsMode.ABSOLUTE)
        .steps([model.Threshold(value=value, color=colour) for colour, value in steps])
    )


def fixed(colour: str) -> model.DynamicConfigValue:
    """An override that sets a fixed colour."""
    return model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


def number(
    title: str,
    text: str,
    expr: str | Mapping[str, str],
    unit: str = COUNT,
    steps: Steps = PLAIN_STEPS,
) -> stat.Panel:
    """One large number, coloured by its thresholds. If `expr` maps legends to expressions, several
    numbers with their names."""
    panel = stat.Panel().title(title).description(text).unit(unit).thresholds(thresholds(steps))
    for legend, asked in (expr if isinstance(expr, Mapping) else {"": expr}).items():
        panel.with_target(query(asked, legend, instant=True))
    panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    mode = (
        options.BigValueTextMode.VALUE_AND_NAME
        if isinstance(expr, Mapping)
        else options.BigValueTextMode.VALUE
    )
    panel.graph_mode(options.BigValueGraphMode.NONE).text_mode(mode)
    return panel.decimals(0) if unit == COUNT else panel


def lines(
    title: str, text: str, unit: str, queries: Iterable[tuple[str, str]], *, stacked: bool = False
) -> timeseries.Panel:
    """Values over time. Each (expression, legend) gives a family of lines, or of stacked areas."""
    panel = timeseries.Panel().title(title).description(text).unit(unit).axis_soft_min(0)
    for expr, legend in queries:
        panel.with_target(query(expr, legend))
    panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    panel.line_width(1).fill_opacity(60 if stacked else 0).show_points(options.VisibilityMode.NEVER)
    panel.stacking(
        common.StackingConfig()
        .mode(options.StackingMode.NORMAL if stacked else options.StackingMode.NONE)
        .group("A")
    )
    panel.tooltip(tooltip())
    return panel.legend(legend_below())


def bars(
    title: str, text: str, unit: str, expr: str, *, rows: str, columns: str, named: str
) -> barchart.Panel:
    """A horizontal bar for each value of the label `rows` (shown as `named`), divided by the values
    of the label `columns`."""
    panel = (
        barchart.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .min(0)
        .with_target(query(expr, table=True))
    )
    matrix = {"rowField": rows, "columnField": columns, "valueField": "Value", "emptyValue": "null"}
    panel.with_transformation(
        model.DataTransformerConfig(id_val="groupingToMatrix", options=matrix)
    )
    # the name that groupingToMatrix gives its first column
    rename = {"renameByName": {f"{rows}\\{columns}": named}}
    panel.with_transformation(model.DataTransformerConfig(id_val="organize", options=rename))
    order = {"fields": {}, "sort": [{"field": named}]}
    panel.with_transformation(model.DataTransformerConfig(id_val="sortBy", options=order))
    panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    panel.orientation(options.VizOrientation.HORIZONTAL).stacking(
        options.StackingMode.NORMAL
    ).show_value(options.VisibilityMode.NEVER)
    panel.fill_opacity(80).line_width(0).group_width(0.8).bar_width(0.9).full_highlight(
        False
    ).x_tick_label_rotation(0)
    return panel.tooltip(tooltip()).legend(legend_below())


def legend_below(*calcs: str) -> common.VizLegendOptions:
    """A legend below the panel, or with `calcs` a table on the right with these calculations."""
    made = common.VizLegendOptions().show_legend(True).calcs(list(calcs))
    if calcs:
        return made.display_mode(options.LegendDisplayMode.TABLE).placement(
            options.LegendPlacement.RIGHT
        )
    return made.display_mode(options.LegendDisplayMode.LIST).placement(
        options.LegendPlacement.BOTTOM
    )


def tooltip(*, zeros: bool = False) -> common.VizTooltipOptions:
    """A tooltip with all values at one moment, largest first."""
    return (
        common.VizTooltipOptions()
        .mode(options.TooltipDisplayMode.MULTI)
        .sort(options.SortOrder.DESCENDING)
        .hide_zeros(not zeros)
    )


def page(
    uid: str, title: str, text: str, *, many: bool, to: tuple[str, str, str]
) -> dashboard.Dashboard:
    """A dashboard with its variables and no panel. `many`: for several workers. `to`: title, uid
    and tooltip of the link to the other."""
    made = dashboard.Dashboard(title).uid(uid).description(text).tags(["placement"]).editable()
    made.timezone("browser").time("now-30m", "now").refresh("10s").tooltip(
        model.DashboardCursorSync.CROSSHAIR
    )
    made.with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    made.with_variable(_values_of("run", "Run", "placement_budget_bytes"))
    instance = _values_of("instance", "Worker", 'placement_budget_bytes{run="$run"}')
    if many:
        instance.multi(True).include_all(True).all_value(".*").current(
            model.VariableOption(text=["All"], value=["$__all"], selected=True)
        )
    made.with_variable(instance)
    other, other_uid, tip = to
    url = f"/d/{other_uid}?{_VALUES}"
    return made.link(
        dashboard.DashboardLink(other)
        .type(model.DashboardLinkType.LINK)
        .icon("dashboard")
        .tooltip(tip)
        .url(url)
        .keep_time(True)
    )


def add_row(to: dashboard.Dashboard, height: int, *panels: tuple[int, Any]) -> None:
    """Add panels side by side, each with its width. Grafana's grid has 24 columns."""
    if (total := sum(width for width, _ in panels)) != 24:
        raise ValueError(f"the panels of a row must be 24 columns wide together, not {total}")
    for width, panel in panels:
        to.with_panel(panel.datasource(DATASOURCE).height(height).span(width))


def finished(made: dashboard.Dashboard) -> model.Dashboard:
    """The finished dashboard, with parts that the SDK leaves out: panel numbers, query letters, and
    visible links."""
    whole = made.build()
    for link in whole.links or []:
        link.placement = None  # type: ignore[assignment] # the SDK's default hides the link in a menu
    for number_of_panel, panel in enumerate(whole.panels or [], start=1):
        assert isinstance(panel, model.Panel)
        panel.id_val = number_of_panel
        for letter, target in zip(string.ascii_uppercase, panel.targets or [], strict=False):
            target.ref_id = letter  # type: ignore[attr-defined]
    return whole


def value_mappings(texts: Mapping[float, tuple[str, str]]) -> list[model.ValueMapping]:
    """Mappings that show a number as a text in a colour."""
    shown = {
        f"{value:g}": model.ValueMappingResult(text=text, color=colour, index=index)
        for index, (value, (text, colour)) in enumerate(texts.items())
    }
    return [model.ValueMap(options=shown)]


def _values_of(name: str, label: str, series: str) -> dashboard.QueryVariable:
    asked = f"label_values({series}, {name})"
    made = dashboard.QueryVariable(name).label(label).datasource(DATASOURCE).definition(asked)
    made.query({"query": asked, "refId": f"PrometheusVariableQueryEditor-{name}", "qryType": 1})
    return made.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
        model.VariableSort.NATURAL_ASC
    )
