"""Compact definitions of panels and dashboards, built with Grafana's SDK.

In a query, `$S` is replaced by the selector of the chosen job and instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    GridPos,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SELECTOR: Final = 'job=~"$job",instance=~"$instance"'
DATASOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")

COLUMNS: Final = 24
TIME_SERIES, STAT, TABLE, HEATMAP = "timeseries", "stat", "table", "heatmap"
MOMENT: Final = "dateTimeAsIso"
"""The unit of Unix times in ms."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its legend; `unit` is that of its column in a table, if not the panel's."""

    expr: str
    legend: str = "{{instance}}"
    unit: str = ""

    @property
    def text(self) -> str:
        return self.expr.replace("$S", SELECTOR)


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. From `warn` on a stat is yellow, from `bad` on red."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: str = TIME_SERIES
    width: int = 8
    height: int = 8
    warn: float | None = None
    bad: float | None = None
    maximum: float | None = None

    def build(self, x: int, y: int) -> Any:
        """Build the panel at a grid position."""
        made: Any = _BUILDERS[self.kind](self)
        made = made.title(self.title).description(self.description).unit(self.unit).datasource(DATASOURCE)
        made = made.grid_pos(GridPos(h=self.height, w=self.width, x=x, y=y))
        if self.maximum is not None:
            made = made.max(self.maximum)
        for place, query in enumerate(self.queries):
            made = made.with_target(self._target(query, _ref_id(place)))
        return made

    def _target(self, query: Query, ref_id: str) -> prometheus.Dataquery:
        target = prometheus.Dataquery().expr(query.text).legend_format(query.legend).ref_id(ref_id)
        target = target.datasource(DATASOURCE)
        if self.kind == TABLE:
            return target.instant().format(PromQueryFormat.TABLE)
        if self.kind == HEATMAP:
            return target.range().format(PromQueryFormat.HEATMAP)
        return target.range()

    @property
    def thresholds(self) -> dashboards.ThresholdsConfig:
        steps = [Threshold(value=None, color="green")]
        if self.warn is not None:
            steps.append(Threshold(value=self.warn, color="yellow"))
        if self.bad is not None:
            steps.append(Threshold(value=self.bad, color="red"))
        return dashboards.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _time_series(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.TABLE).placement(LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
    made = timeseries.Panel().legend(legend.calcs(["lastNotNull", "max"]).show_legend(True))
    return made.tooltip(tooltip).fill_opacity(10).min(0)


def _stat(panel: Panel) -> stat.Panel:
    reduce = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().reduce_options(reduce).thresholds(panel.thresholds)


def _ref_id(place: int) -> str:
    return chr(ord("A") + place)


def _table(panel: Panel) -> table.Panel:
    """Merge rows with the same labels and name columns by the queries' legends."""
    names = {f"Value #{_ref_id(place)}": query.legend for place, query in enumerate(panel.queries)}
    organized = {"excludeByName": {"Time": True}, "renameByName": names}
    made = table.Panel().with_transformation(DataTransformerConfig(id_val="merge", options={}))
    made = made.with_transformation(DataTransformerConfig(id_val="organize", options=organized))
    for query in panel.queries:
        if query.unit:
            made = made.override_by_name(query.legend, [DynamicConfigValue(id_val="unit", value=query.unit)])
    return made


def _heatmap(panel: Panel) -> heatmap.Panel:
    return heatmap.Panel().color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges"))


_BUILDERS = {TIME_SERIES: _time_series, STAT: _stat, TABLE: _table, HEATMAP: _heatmap}


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading; all rows except the first are collapsed."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A dashboard variable: values of a label of a metric."""

    name: str
    label: str
    metric: str

    @property
    def query(self) -> str:
        where = "" if self.name == "job" else '{job=~"$job"}'
        return f"label_values({self.metric}{where}, {self.name})"


VARIABLES: Final = (
    Variable("job", "job", "mqproc_build_info"),
    Variable("instance", "instance", "mqproc_build_info"),
    Variable("topic", "topic", "mqproc_messages_appended_total"),
)


def make_dashboard(uid: str, title: str, description: str, rows: Sequence[Row]) -> dashboards.Dashboard:
    """Build a dashboard from rows, with variables, laid out from left to right."""
    made = dashboards.Dashboard(title).uid(uid).description(description).tags(["mqproc"])
    made = made.refresh("30s").time("now-1h", "now").timezone("browser").readonly()
    made = made.tooltip(DashboardCursorSync.CROSSHAIR)
    made = made.with_variable(dashboards.DatasourceVariable("datasource").label("data source").type("prometheus"))
    for variable in VARIABLES:
        made = made.with_variable(_variable(variable))
    y = 0
    for number, row in enumerate(rows):
        builder = dashboards.Row(row.title).grid_pos(GridPos(h=1, w=COLUMNS, x=0, y=y))
        y += 1
        placed = list(_placed(row.panels, y))
        if number == 0:
            made = made.with_row(builder)
            for panel, x, at in placed:
                made = made.with_panel(panel.build(x, at))
            y = max((at + panel.height for panel, _, at in placed), default=y)
        else:
            for panel, x, at in placed:
                builder = builder.with_panel(panel.build(x, at))
            made = made.with_row(builder.collapsed(True))
    return made


def _variable(variable: Variable) -> dashboards.QueryVariable:
    return (
        dashboards.QueryVariable(variable.name)
        .label(variable.label)
        .query(variable.query)
        .datasource(DATASOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
    )


def _placed(panels: Sequence[Panel], y: int) -> list[tuple[Panel, int, int]]:
    """Each panel with its position, from left to right and line by line."""
    found = []
    x = line = 0
    for panel in panels:
        if x + panel.width > COLUMNS:
            x, y, line = 0, y + line, 0
        found.append((panel, x, y))
        x, line = x + panel.width, max(line, panel.height)
    return found
