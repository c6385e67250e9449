"""Count messages, bytes and latencies by columns and windows of time; plot the counts."""

from __future__ import annotations

import datetime
import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import BadRequestError, ConfigurationError
from mqproc.spark.batch_read import messages
from mqproc.spark.jobs.output import check_target
from mqproc.spark.options import PathArgument
from mqproc.util.units import counted as quantity

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

BY: Final = ("store", "topic", "queue_id", "tag", "key")
TIMES: Final = ("store_timestamp", "born_timestamp")
QUANTILES: Final = (0.5, 0.99)
WINDOWS_MAX: Final = 1500
"""Limit on windows per message, each of which is a row: windows of a day, one a minute, are 1,440."""
# Lengths must be the same from both times: months and years differ after February of a leap year. The timestamps have
# no time zone, since the session's may change its offset.
_MEASURED_FROM: Final = ("TIMESTAMP_NTZ '1970-01-01 00:00:00'", "TIMESTAMP_NTZ '1972-02-01 00:00:00'")
# Range of Spark's timestamps, within which windows lie.
_TIME_MIN_US: Final = -(1 << 63)
_TIME_MAX_US: Final = (1 << 63) - 1
# Quantiles are exact to 1/1000 of a group's rows.
_ACCURACY: Final = 1000


def counts(
    spark: SparkSession,
    path: PathArgument,
    *,
    by: str | Sequence[str] = ("topic",),
    window: str = "",
    slide: str = "",
    time: str = "store_timestamp",
    latencies: bool = True,
    **selection: Any,
) -> DataFrame:
    """Rows of the columns `by`, the window's bounds if there is one, and the counts.

    `by` are some of BY. `window` is a length in Spark's syntax (`1 hour`), `slide` the distance of window starts
    (default: the length), `time` one of TIMES. A message with several keys counts for each, one without keys for a
    null. A message whose born time is not a timestamp of Spark's, or too close to the limits, has a null window.
    `selection` are arguments of `messages`: topic, begin, end, tag, key and so on.

    Counts are `messages`, `bytes` of their records, and `latency_ms` from born to stored: mean, p50, p99 and max. A
    latency may be negative, as clocks of producers and store differ.

    Raises BadRequestError for an unknown column, a slide without a window, and lengths that `check_windows` rejects.
    """
    by = (by,) if isinstance(by, str) else tuple(dict.fromkeys(by))
    if unknown := sorted(set(by) - set(BY), key=by.index):
        raise BadRequestError(f"cannot count by {unknown[0]!r}; columns are {', '.join(BY)}")
    if time not in TIMES:
        raise BadRequestError(f"no windows by {time!r}; times are {', '.join(TIMES)}")
    if slide and not window:
        raise BadRequestError(f"slide = {slide!r} needs a window")
    window_s = _seconds(spark, window) if window else 0.0
    slide_s = _seconds(spark, slide) if slide else None
    columns = {"size", *("keys" if name == "key" else name for name in by)}
    columns |= {"store_timestamp", "born_timestamp"} if latencies else set()
    if window:
        check_windows(window_s, slide_s)
        columns.add(time)
    found = messages(spark, path, columns=sorted(columns), **selection)
    if window:
        found = _in_windows(found, time, round(window_s * 1e6), round((slide_s or window_s) * 1e6))
    return _count(found, by, has_windows=bool(window), latencies=latencies)


def check_windows(window_s: float, slide_s: float | None) -> None:
    """Raise BadRequestError for invalid lengths and for too many windows per message."""
    if window_s <= 0:
        raise BadRequestError(f"window = {window_s:g} s; it must be longer than 0")
    if slide_s is None:
        return
    if not 0 < slide_s <= window_s:
        raise BadRequestError(
            f"slide = {slide_s:g} s; it must be longer than 0, and no longer than the window, {window_s:g} s"
        )
    windows = window_s / slide_s
    if windows > WINDOWS_MAX:
        raise BadRequestError(
            f"window = {window_s:g} s, slide = {slide_s:g} s: each message would be in {windows:,.0f} windows; "
            f"the limit is {WINDOWS_MAX:,}"
        )


def _seconds(spark: SparkSession, length: str) -> float:
    """Seconds of a length in Spark's syntax.

    Raises BadRequestError for a length that varies, such as a month.
    """
    ends = ", ".join(f"({start} + CAST(:length AS INTERVAL)) - {start}" for start in _MEASURED_FROM)
    row = spark.sql(f"SELECT {ends}", args={"length": length}).first()
    if row is None or row[0] is None or row[0] != row[1]:
        raise BadRequestError(f"{length!r} is not a length of time, or not a constant one; write it like '1 hour'")
    measured: datetime.timedelta = row[0]
    return measured.total_seconds()


def _in_windows(found: DataFrame, time: str, window_us: int, slide_us: int) -> DataFrame:
    """A row for each message and window that contains it, with a column `window`.

    Spark's own function makes an expression for each window of a message, and takes minutes to compile hundreds.
    """
    from pyspark.sql import functions as F

    at = F.unix_micros(time)
    at = F.when(at.between(_TIME_MIN_US + window_us, _TIME_MAX_US - window_us), at)
    starts = at - F.pmod(at, F.lit(slide_us))
    if slide_us < window_us:
        # The start of the first window that contains the message.
        first_end = at - F.lit(window_us - 1)
        starts = F.explode_outer(F.sequence(first_end + F.pmod(-first_end, F.lit(slide_us)), starts, F.lit(slide_us)))
    started = found.withColumn("start_us", starts)
    end_us = F.col("start_us") + F.lit(window_us)
    window = F.struct(F.timestamp_micros("start_us").alias("start"), F.timestamp_micros(end_us).alias("end"))
    return started.withColumn("window", window).drop("start_us")


def _count(found: DataFrame, by: Sequence[str], *, has_windows: bool, latencies: bool) -> DataFrame:
    from pyspark.sql import functions as F

    if "key" in by:
        found = found.withColumn("key", F.explode_outer(F.array_distinct("keys")))
    measures: list[Column] = [F.count(F.lit(1)).alias("messages"), F.sum("size").alias("bytes")]
    groups, shown = [*by], [F.col(name) for name in by]
    if has_windows:
        groups.append("window")
        shown += [F.col("window.start").alias("window_start"), F.col("window.end").alias("window_end")]
    shown += [F.col("messages"), F.col("bytes")]
    if latencies:
        found = found.withColumn("latency_ms", F.unix_millis("store_timestamp") - F.unix_millis("born_timestamp"))
        quantiles = F.percentile_approx("latency_ms", list(QUANTILES), _ACCURACY).alias("quantiles")
        measures += [F.avg("latency_ms").alias("latency_ms_mean"), quantiles]
        measures.append(F.max("latency_ms").alias("latency_ms_max"))
        shown.append(F.col("latency_ms_mean"))
        shown += [F.col("quantiles")[at].alias(f"latency_ms_p{100 * of:.0f}") for at, of in enumerate(QUANTILES)]
        shown.append(F.col("latency_ms_max"))
    return found.groupBy(*groups).agg(*measures).select(*shown)


# Plots: lines over windows of time, or bars; PNG, SVG and PDF by matplotlib, HTML by plotly


GROUPS_MAX: Final = 10
POINTS_MAX: Final = 20_000
"""Limit on the rows that the driver collects."""

PICTURES: Final = (".png", ".svg", ".pdf")
PAGES: Final = (".html",)
# Both libraries have GROUPS_MAX colours for lines, so the first would be used again.
_OTHERS_COLOR: Final = "black"
_INCHES: Final = (11.0, 5.5)
_EPOCH: Final = datetime.datetime.fromtimestamp(0, datetime.UTC)
# Range of times in a picture: matplotlib would round the last µs of year 9999 up.
_DATES: Final = (datetime.datetime.min, datetime.datetime.max.replace(microsecond=0))


@dataclass(slots=True)
class Series:
    """One line, or one bar: messages by window start (UTC), or one number."""

    name: str
    times: list[Any] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)


def check_plot(to: Path) -> None:
    """Raise BadRequestError for an unknown suffix, a missing folder, and a file in a store."""
    if to.suffix not in PICTURES + PAGES:
        raise BadRequestError(f"{to}: a plot is one of {', '.join(PICTURES + PAGES)}")
    if not to.parent.is_dir():
        raise BadRequestError(f"{to}: no such folder: {to.parent}")
    check_target(to, [])


def plot_counts(counted: DataFrame, by: Sequence[str], to: Path, *, slide_s: float | None = None) -> None:
    """Draw the messages of `counts`: the GROUPS_MAX largest groups and the sum of the others.

    `slide_s` is the distance of window starts, if not their length. Raises BadRequestError as `check_plot`, for more
    than POINTS_MAX points, for windows outside the calendar and for messages without a window; ConfigurationError when
    the library is missing.
    """
    check_plot(to)
    series = series_of(counted, by, slide_s)
    draw = _draw_page if to.suffix in PAGES else _draw_picture
    try:
        draw(series, " and ".join(by), to)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is not installed: pip install 'mqproc[plot]'") from None


def series_of(counted: DataFrame, by: Sequence[str], slide_s: float | None = None) -> list[Series]:
    """The groups' messages by window, largest group first, from at most POINTS_MAX rows.

    Gaps between windows become 0, so that no line runs across them.
    """
    from pyspark.sql import functions as F

    has_windows = "window_start" in counted.columns
    named = counted.withColumn(
        "name", F.concat_ws(" ", *(F.coalesce(F.col(name).cast("string"), F.lit("none")) for name in by))
    )
    largest = named.groupBy("name").agg(F.sum("messages").alias("total")).orderBy(F.desc("total"), "name")
    top = [row.name for row in largest.limit(GROUPS_MAX).collect()]
    others = "others"
    while others in top:
        others = f"all {others}"
    shown = F.when(F.col("name").isin(top), F.col("name")).otherwise(F.lit(others))
    at = F.unix_millis("window_start") if has_windows else F.lit(0).cast("bigint")
    length = F.max(F.unix_millis("window_end")) - at if has_windows else F.lit(0)
    grouped = named.groupBy(shown.alias("name"), at.alias("at"))
    points = grouped.agg(F.sum("messages").alias("messages"), length.alias("length"))
    rows = points.orderBy("at").limit(POINTS_MAX + 1).collect()
    if len(rows) > POINTS_MAX:
        raise BadRequestError(f"more than {POINTS_MAX:,} points to draw: use longer windows or less time")
    if not has_windows:
        messages = {row.name: int(row.messages) for row in rows}
        return [Series(name, [], [messages[name]]) for name in (*top, others) if name in messages]
    step_ms = round(slide_s * 1000) if slide_s else max((row["length"] or 0 for row in rows), default=0)
    return _lines(rows, [*top, others], step_ms)


def _lines(rows: Sequence[Row], names: Sequence[str], step_ms: int) -> list[Series]:
    """Lines of rows ordered by time. Raises BadRequestError for messages without a window."""
    if without := sum(int(row.messages) for row in rows if row["at"] is None):
        raise BadRequestError(
            f"{quantity(without, 'message')} born at a time that Spark has no timestamp for: without a window they "
            "cannot be drawn; windows by the store time can"
        )
    lines = []
    for name in names:
        points = {row["at"]: int(row.messages) for row in rows if row.name == name}
        if points:
            filled = _with_zeros(points, rows[0]["at"], rows[-1]["at"], step_ms)
            lines.append(Series(name, [_moment(at) for at in filled], list(filled.values())))
    return lines


def _moment(at_ms: int) -> datetime.datetime:
    """Raises BadRequestError outside the years 1 to 9999: a producer may have passed µs for ms."""
    try:
        return _EPOCH + datetime.timedelta(milliseconds=at_ms)
    except OverflowError:
        raise BadRequestError(
            f"a window begins at {at_ms:,} ms, which is not in the years 1 to 9999: it cannot be drawn; windows by "
            "the store time can"
        ) from None


def _with_zeros(points: dict[int, int], first: int, last: int, step: int) -> dict[int, int]:
    """Points in order, with zeros at both ends of each gap between `first` and `last`."""
    zeros: set[int] = set()
    for before, first_end in itertools.pairwise([first - step, *points, last + step]):
        zeros |= {before + step, first_end - step} if first_end - before > step else set()
    return {at: points.get(at, 0) for at in sorted(points.keys() | zeros)}


def _colors(series: Sequence[Series]) -> list[str | None]:
    """Colour of each line; None for the library's next colour."""
    return [None if number < GROUPS_MAX else _OTHERS_COLOR for number in range(len(series))]


def _draw_picture(series: Sequence[Series], by: str, to: Path) -> None:
    from matplotlib import dates, rc_context
    from matplotlib.figure import Figure

    # Dollars in tags and keys are not formulas.
    with rc_context({"text.parse_math": False}):
        # matplotlib has no types.
        to_number: Any = dates.date2num
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.subplots()
        if any(each.times for each in series):
            for each, color in zip(series, _colors(series), strict=True):
                # A legend omits labels that begin with an underscore.
                label = f" {each.name}" if each.name.startswith("_") else each.name
                axes.plot(
                    each.times, each.messages, label=label, color=color, marker="." if len(each.times) < 50 else ""
                )
            axes.legend(loc="best", fontsize="small")
            axes.set_xlabel("UTC")
            # The margins beside the first and last window may be outside the range of dates.
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
        # plotly interprets HTML in names.
        name = html.escape(each.name, quote=False)
        if each.times:
            marks.append(
                go.Scatter(x=each.times, y=each.messages, name=name, mode="lines+markers", marker={"color": color})
            )
        else:
            marks.append(go.Bar(x=each.messages, y=[name], name=name, orientation="h", marker={"color": color}))
    figure = go.Figure(marks)
    figure.update_layout(title=f"Messages by {by}", template="plotly_white", hovermode="x unified")
    # The page includes the library, so that it opens without a network.
    figure.write_html(to, include_plotlyjs=True)
