"""Counts as a picture: lines over windows of time, or bars; PNG, SVG and PDF by matplotlib, HTML by plotly."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import BadRequestError, ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

GROUPS_MAX: Final = 10
POINTS_MAX: Final = 20_000
"""What the driver takes of a result, however large that is."""

PICTURES: Final = (".png", ".svg", ".pdf")
PAGES: Final = (".html",)
_OTHERS: Final = "others"
_INCHES: Final = (11.0, 5.5)


@dataclass(slots=True)
class Series:
    """One line, or one bar: messages by window, of which the times (datetime) are UTC; without windows one number."""

    name: str
    times: list[Any] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)


def plot_counts(counted: DataFrame, by: Sequence[str], to: Path) -> None:
    """Draw the messages of `counts`: the GROUPS_MAX largest groups and the others together.

    Raises BadRequestError for a suffix that is none of PICTURES and PAGES, or more windows than POINTS_MAX points are
    for; ConfigurationError without the library.
    """
    if to.suffix not in PICTURES + PAGES:
        raise BadRequestError(f"{to}: a plot is one of {', '.join(PICTURES + PAGES)}")
    series = series_of(counted, by)
    draw = _draw_page if to.suffix in PAGES else _draw_picture
    try:
        draw(series, " and ".join(by), to)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is not installed: pip install 'mqproc[plot]'") from None


def series_of(counted: DataFrame, by: Sequence[str]) -> list[Series]:
    """The groups' messages by window, largest group first; what is collected is bounded."""
    from pyspark.sql import functions as F

    has_windows = "window_start" in counted.columns
    named = counted.withColumn(
        "name", F.concat_ws(" ", *(F.coalesce(F.col(name).cast("string"), F.lit("none")) for name in by))
    )
    largest = named.groupBy("name").agg(F.sum("messages").alias("total")).orderBy(F.desc("total"), "name")
    top = [row.name for row in largest.limit(GROUPS_MAX).collect()]
    shown = F.when(F.col("name").isin(top), F.col("name")).otherwise(F.lit(_OTHERS))
    at = F.unix_millis("window_start") if has_windows else F.lit(0).cast("bigint")
    points = named.groupBy(shown.alias("name"), at.alias("at")).agg(F.sum("messages").alias("messages"))
    rows = points.orderBy("at").limit(POINTS_MAX + 1).collect()
    if len(rows) > POINTS_MAX:
        raise BadRequestError(f"more than {POINTS_MAX:,} points to draw: take longer windows or less time")
    series = {name: Series(name) for name in [*top, _OTHERS]}
    for row in rows:
        series[row.name].messages.append(int(row.messages))
        if has_windows:
            series[row.name].times.append(datetime.datetime.fromtimestamp(row["at"] / 1000, datetime.UTC))
    return [each for each in series.values() if each.messages]


def _draw_picture(series: Sequence[Series], by: str, to: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    if any(each.times for each in series):
        for each in series:
            axes.plot(each.times, each.messages, label=each.name, marker="." if len(each.times) < 50 else "")
        axes.legend(loc="best", fontsize="small")
        axes.set_xlabel("UTC")
        figure.autofmt_xdate()
    else:
        axes.barh([each.name for each in series][::-1], [sum(each.messages) for each in series][::-1])
        axes.set_xlabel("messages")
    axes.set_title(f"Messages by {by}")
    axes.grid(alpha=0.3)
    figure.savefig(to)


def _draw_page(series: Sequence[Series], by: str, to: Path) -> None:
    import plotly.graph_objects as go

    marks: list[Any] = []
    for each in series:
        if each.times:
            marks.append(go.Scatter(x=each.times, y=each.messages, name=each.name, mode="lines+markers"))
        else:
            marks.append(go.Bar(x=each.messages, y=[each.name], name=each.name, orientation="h"))
    figure = go.Figure(marks)
    figure.update_layout(title=f"Messages by {by}", template="plotly_white", hovermode="x unified")
    # The library goes into the page, so that it opens without a network.
    figure.write_html(to, include_plotlyjs=True)
