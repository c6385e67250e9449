"""Counts as a picture: lines over windows of time, or bars; PNG, SVG and PDF by matplotlib, HTML by plotly."""

from __future__ import annotations

import datetime
import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import BadRequestError, ConfigurationError
from mqproc.quantities import counted as quantity
from mqproc.spark.jobs.targets import check_target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

GROUPS_MAX: Final = 10
POINTS_MAX: Final = 20_000
"""What the driver takes of a result, however large that is."""

PICTURES: Final = (".png", ".svg", ".pdf")
PAGES: Final = (".html",)
_OTHERS: Final = "others"
# Both libraries have as many colours for lines as there are largest groups; then the first one comes again.
_OTHERS_COLOR: Final = "black"
_INCHES: Final = (11.0, 5.5)
_EPOCH: Final = datetime.datetime.fromtimestamp(0, datetime.UTC)
# The first and the last moment that a picture can have: as a fraction of days the last µs would be the next year.
_DATES: Final = (datetime.datetime.min, datetime.datetime.max.replace(microsecond=0))


@dataclass(slots=True)
class Series:
    """One line, or one bar: messages by window, of which the times (datetime) are UTC; without windows one number."""

    name: str
    times: list[Any] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)


def check_plot(to: Path) -> None:
    """Raise BadRequestError for a file that is no plot by its suffix, or lies in no folder or in a store."""
    if to.suffix not in PICTURES + PAGES:
        raise BadRequestError(f"{to}: a plot is one of {', '.join(PICTURES + PAGES)}")
    if not to.parent.is_dir():
        raise BadRequestError(f"{to}: no such folder: {to.parent}")
    check_target(to, [])


def plot_counts(counted: DataFrame, by: Sequence[str], to: Path, *, slide_s: float | None = None) -> None:
    """Draw the messages of `counts`: the GROUPS_MAX largest groups and the others together.

    `slide_s`: how far windows lie apart, if not by their length. Raises BadRequestError for a file that `check_plot`
    refuses, more windows than POINTS_MAX points are for, one that no calendar has, or messages without one;
    ConfigurationError without the library.
    """
    check_plot(to)
    series = series_of(counted, by, slide_s)
    draw = _draw_page if to.suffix in PAGES else _draw_picture
    try:
        draw(series, " and ".join(by), to)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is not installed: pip install 'mqproc[plot]'") from None


def series_of(counted: DataFrame, by: Sequence[str], slide_s: float | None = None) -> list[Series]:
    """The groups' messages by window, largest group first; what is collected is bounded.

    Windows without messages have 0 where a line would run over them otherwise.
    """
    from pyspark.sql import functions as F

    has_windows = "window_start" in counted.columns
    named = counted.withColumn(
        "name", F.concat_ws(" ", *(F.coalesce(F.col(name).cast("string"), F.lit("none")) for name in by))
    )
    largest = named.groupBy("name").agg(F.sum("messages").alias("total")).orderBy(F.desc("total"), "name")
    top = [row.name for row in largest.limit(GROUPS_MAX).collect()]
    others = _OTHERS
    while others in top:
        others = f"all {others}"
    shown = F.when(F.col("name").isin(top), F.col("name")).otherwise(F.lit(others))
    at = F.unix_millis("window_start") if has_windows else F.lit(0).cast("bigint")
    length = F.max(F.unix_millis("window_end")) - at if has_windows else F.lit(0)
    grouped = named.groupBy(shown.alias("name"), at.alias("at"))
    points = grouped.agg(F.sum("messages").alias("messages"), length.alias("length"))
    rows = points.orderBy("at").limit(POINTS_MAX + 1).collect()
    if len(rows) > POINTS_MAX:
        raise BadRequestError(f"more than {POINTS_MAX:,} points to draw: take longer windows or less time")
    if not has_windows:
        return _bars(rows, [*top, others])
    _check_windows(rows)
    step_ms = round(slide_s * 1000) if slide_s else max((row["length"] for row in rows), default=0)
    return _lines(rows, [*top, others], step_ms)


def _bars(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    messages = {row.name: int(row.messages) for row in rows}
    return [Series(name, [], [messages[name]]) for name in names if name in messages]


def _check_windows(rows: Sequence[Row]) -> None:
    """Raise BadRequestError for messages without a window."""
    without = sum(int(row.messages) for row in rows if row["at"] is None)
    if without:
        raise BadRequestError(
            f"{quantity(without, 'message')} born at a time that Spark has no timestamp for: without a window they "
            "cannot be drawn; windows by the store time can"
        )


def _lines(rows: Sequence[Row], names: Sequence[str], step_ms: int) -> list[Series]:
    """Rows come in the order of time."""
    lines = []
    for name in names:
        points = {row["at"]: int(row.messages) for row in rows if row.name == name}
        if points:
            whole = _with_zeros(points, rows[0]["at"], rows[-1]["at"], step_ms)
            lines.append(Series(name, [_moment(at) for at in whole], list(whole.values())))
    return lines


def _moment(at_ms: int) -> datetime.datetime:
    """Raises BadRequestError beyond the years 1 to 9999: a producer may have given µs for ms."""
    try:
        return _EPOCH + datetime.timedelta(milliseconds=at_ms)
    except OverflowError:
        raise BadRequestError(
            f"a window begins at {at_ms:,} ms, which is in none of the years 1 to 9999: it cannot be drawn; windows by "
            "the store time can"
        ) from None


def _with_zeros(points: dict[int, int], first: int, last: int, step: int) -> dict[int, int]:
    """Points in their order, with a 0 at both ends of each gap between `first` and `last`: enough for a line."""
    zeros: set[int] = set()
    for before, behind in itertools.pairwise([first - step, *points, last + step]):
        zeros |= {before + step, behind - step} if behind - before > step else set()
    return {at: points.get(at, 0) for at in sorted(points.keys() | zeros)}


def _colors(series: Sequence[Series]) -> list[str | None]:
    """That of each line; None: the library's next one."""
    return [None if number < GROUPS_MAX else _OTHERS_COLOR for number in range(len(series))]


def _draw_picture(series: Sequence[Series], by: str, to: Path) -> None:
    from matplotlib import rc_context

    # Tags and keys may have dollars, which are no formulas.
    with rc_context({"text.parse_math": False}):
        _draw(series, by, to)


def _draw(series: Sequence[Series], by: str, to: Path) -> None:
    from matplotlib import dates
    from matplotlib.figure import Figure

    # Which has no types.
    to_number: Any = dates.date2num
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    if any(each.times for each in series):
        for each, color in zip(series, _colors(series), strict=True):
            # A legend leaves out what begins with an underscore.
            label = f" {each.name}" if each.name.startswith("_") else each.name
            axes.plot(each.times, each.messages, label=label, color=color, marker="." if len(each.times) < 50 else "")
        axes.legend(loc="best", fontsize="small")
        axes.set_xlabel("UTC")
        # The margins beside the first and the last window may lie beyond the years that a date can have.
        low, high = axes.get_xlim()
        first, last = to_number(_DATES)
        axes.set_xlim(max(low, first), min(high, last))
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
    for each, color in zip(series, _colors(series), strict=True):
        # Names are no markup.
        name = html.escape(each.name, quote=False)
        if each.times:
            marks.append(
                go.Scatter(x=each.times, y=each.messages, name=name, mode="lines+markers", marker={"color": color})
            )
        else:
            marks.append(go.Bar(x=each.messages, y=[name], name=name, orientation="h", marker={"color": color}))
    figure = go.Figure(marks)
    figure.update_layout(title=f"Messages by {by}", template="plotly_white", hovermode="x unified")
    # The library goes into the page, so that it opens without a network.
    figure.write_html(to, include_plotlyjs=True)
