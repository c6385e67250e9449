"""How many messages, of how many bytes, how long on their way: by topic, tag, key, store and window of time."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import BadRequestError
from mqproc.spark.api import messages

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

BY: Final = ("store", "topic", "queue_id", "tag", "key")
TIMES: Final = ("store_timestamp", "born_timestamp")
QUANTILES: Final = (0.5, 0.99)
WINDOWS_MAX: Final = 1500
"""In so many windows a message may be, of each of which Spark has a row: those of a day, one a minute, are 1,440."""
# Where lengths are measured: months and years from a February of a leap year on differ from those from the epoch on.
# Without a zone, since the clocks of the session's may change in between.
_MEASURED_FROM: Final = ("TIMESTAMP_NTZ '1970-01-01 00:00:00'", "TIMESTAMP_NTZ '1972-02-01 00:00:00'")
# Spark's timestamps. No window begins before them or ends behind them.
_TIME_MIN_US: Final = -(1 << 63)
_TIME_MAX_US: Final = (1 << 63) - 1
# How exact quantiles are: to 1/1000 of the rows of a group.
_ACCURACY: Final = 1000


def counts(
    spark: SparkSession,
    path: str | Path | Sequence[str | Path],
    *,
    by: str | Sequence[str] = ("topic",),
    window: str = "",
    slide: str = "",
    time: str = "store_timestamp",
    latencies: bool = True,
    **selection: Any,
) -> DataFrame:
    """Rows of the columns `by`, `window_start` and `window_end` when a window is given, and of what was counted.

    `by` are some of BY. `window` is a length as Spark writes it (`1 hour`), `slide` how far one begins behind the one
    before, if not where that ends; `time` says by which of TIMES. A message with several keys counts for each of them,
    one without for a null. One born at a time that Spark has no timestamp for, or by less than a window's length from
    the first or last such time, is in no window: where windows go by that it counts for a null, too. `selection` are
    arguments of `messages`: topic, begin, end, tag, key and so on.

    Counted are `messages`, `bytes` of their records, and `latency_ms` from born to stored: mean, p50, p99 and max.
    Clocks of producers may differ from the store's: a latency may be below 0.

    Raises BadRequestError for a column that is none of these, a slide without a window, and lengths that
    `check_windows` refuses.
    """
    by = (by,) if isinstance(by, str) else tuple(dict.fromkeys(by))
    _check(by, window, slide, time)
    window_s = _seconds(spark, window) if window else 0.0
    slide_s = _seconds(spark, slide) if slide else None
    if window:
        check_windows(window_s, slide_s)
    columns = dict.fromkeys(
        ["size", *(["store_timestamp", "born_timestamp"] if latencies else []), time if window else "size"]
    )
    columns |= dict.fromkeys("keys" if name == "key" else name for name in by)
    found = messages(spark, path, columns=list(columns), **selection)
    if window:
        found = _in_windows(found, time, round(window_s * 1e6), round((slide_s or window_s) * 1e6))
    return _counted(found, by, has_windows=bool(window), latencies=latencies)


def _check(by: Sequence[str], window: str, slide: str, time: str) -> None:
    for name in by:
        if name not in BY:
            raise BadRequestError(f"counts by {name!r}; there are {', '.join(BY)}")
    if time not in TIMES:
        raise BadRequestError(f"windows of {time!r}; there are {', '.join(TIMES)}")
    if slide and not window:
        raise BadRequestError(f"slide = {slide!r} needs a window")


def check_windows(window_s: float, slide_s: float | None) -> None:
    """Raise BadRequestError for lengths that make no windows, or put a message into more than WINDOWS_MAX of them."""
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
    """What Spark takes a length for. Raises BadRequestError for one that is longer at some times than at others."""
    ends = ", ".join(f"({start} + CAST(:length AS INTERVAL)) - {start}" for start in _MEASURED_FROM)
    row = spark.sql(f"SELECT {ends}", args={"length": length}).first()
    if row is None or row[0] is None or row[0] != row[1]:
        raise BadRequestError(
            f"{length!r} is no length of time, or none that is always the same; write it like '1 hour'"
        )
    measured: datetime.timedelta = row[0]
    return measured.total_seconds()


def _in_windows(found: DataFrame, time: str, window_us: int, slide_us: int) -> DataFrame:
    """A row of each message for each window that it is in, with a column `window`.

    Spark's own function has an expression for each window of a message, and takes minutes to compile hundreds.
    """
    from pyspark.sql import functions as F

    at = F.unix_micros(time)
    at = F.when(at.between(_TIME_MIN_US + window_us, _TIME_MAX_US - window_us), at)
    starts = at - F.pmod(at, F.lit(slide_us))
    if slide_us < window_us:
        # The first multiple of a slide behind which a message lies by less than a window.
        behind = at - F.lit(window_us - 1)
        starts = F.explode_outer(F.sequence(behind + F.pmod(-behind, F.lit(slide_us)), starts, F.lit(slide_us)))
    started = found.withColumn("start_us", starts)
    end_us = F.col("start_us") + F.lit(window_us)
    window = F.struct(F.timestamp_micros("start_us").alias("start"), F.timestamp_micros(end_us).alias("end"))
    return started.withColumn("window", window).drop("start_us")


def _counted(found: DataFrame, by: Sequence[str], *, has_windows: bool, latencies: bool) -> DataFrame:
    from pyspark.sql import functions as F

    if "key" in by:
        found = found.withColumn("key", F.explode_outer(F.array_distinct("keys")))
    groups: list[Column] = [F.col(name) for name in by]
    if has_windows:
        groups.append(F.col("window"))
    if latencies:
        taken = F.unix_millis("store_timestamp") - F.unix_millis("born_timestamp")
        found = found.withColumn("latency_ms", taken)
    measures = [F.count(F.lit(1)).alias("messages"), F.sum("size").alias("bytes")]
    if latencies:
        measures.append(F.avg("latency_ms").alias("latency_ms_mean"))
        quantiles = F.percentile_approx("latency_ms", list(QUANTILES), _ACCURACY)
        measures += [quantiles.alias("quantiles"), F.max("latency_ms").alias("latency_ms_max")]
    counted = found.groupBy(*groups).agg(*measures)
    shown: list[Column] = [F.col(name) for name in by]
    if has_windows:
        shown += [F.col("window.start").alias("window_start"), F.col("window.end").alias("window_end")]
    shown += [F.col("messages"), F.col("bytes")]
    if latencies:
        shown.append(F.col("latency_ms_mean"))
        shown += [F.col("quantiles")[at].alias(f"latency_ms_p{100 * of:.0f}") for at, of in enumerate(QUANTILES)]
        shown.append(F.col("latency_ms_max"))
    return counted.select(*shown)
