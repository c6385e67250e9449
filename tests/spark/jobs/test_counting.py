"""Counts by topic, key and time window against the engine's own reader; plots of counts."""

from __future__ import annotations

import contextlib
import html
import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqproc.errors import BadRequestError
from mqproc.spark.jobs import counts
from mqproc.spark.jobs.counting import plot_counts, series_of
from tests.spark.support import messages_of
from tests.support.store_builders import FIRST_MS, LiveStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def test_counts_by_topic_and_queue_with_latencies(spark: SparkSession, rolled_store: Path) -> None:
    found = counts(spark, rolled_store, by=("topic", "queue_id"))
    rows = {(row.topic, row.queue_id): row for row in found.collect()}
    stored = messages_of(rolled_store)
    assert {queue: row.messages for queue, row in rows.items()} == Counter((m.topic, m.queue_id) for m in stored)
    for queue, row in rows.items():
        of_queue = [message for message in stored if (message.topic, message.queue_id) == queue]
        taken = sorted(message.store_timestamp_ms - message.born_timestamp_ms for message in of_queue)
        assert row.bytes == sum(message.size for message in of_queue)
        assert row.latency_ms_mean == pytest.approx(sum(taken) / len(taken))
        assert (row.latency_ms_p50, row.latency_ms_max) == (taken[(len(taken) - 1) // 2], taken[-1])


def test_counts_by_tumbling_and_sliding_windows(spark: SparkSession, rolled_store: Path) -> None:
    stored = [message.store_timestamp_ms for message in messages_of(rolled_store, topic="First")]
    tumbling = counts(
        spark, rolled_store, by=(), window="100 milliseconds", latencies=False, topic="First", begin=FIRST_MS
    )
    by_start = {
        row.start: row.messages for row in tumbling.selectExpr("unix_millis(window_start) start", "*").collect()
    }
    assert by_start == Counter(time // 100 * 100 for time in stored)
    sliding = counts(
        spark, rolled_store, by=(), window="100 milliseconds", slide="50 milliseconds", latencies=False, topic="First"
    )
    by_start = {row.start: row.messages for row in sliding.selectExpr("unix_millis(window_start) start", "*").collect()}
    assert by_start == Counter(start for time in stored for start in (time // 50 * 50, time // 50 * 50 - 50))
    # The window length is no multiple of the slide, and a message falls into hundreds of windows.
    for length, slide in ((100, 30), (1200, 2)):
        windows = counts(
            *(spark, rolled_store),
            by=(),
            window=f"{length} milliseconds",
            slide=f"{slide} milliseconds",
            latencies=False,
            topic="First",
        )
        ends = windows.selectExpr("unix_millis(window_start) start", "unix_millis(window_end) end", "messages")
        assert {tuple(row) for row in ends.collect()} == {
            (start, start + length, messages)
            for start, messages in Counter(
                start for time in stored for start in range(time // slide * slide, time - length, -slide)
            ).items()
        }


@pytest.mark.parametrize("slide", ["", "20 minutes"])
def test_counts_times_outside_spark_range_have_no_window(spark: SparkSession, tmp_path: Path, slide: str) -> None:
    store = LiveStore(tmp_path / "store")
    last_ms = (1 << 63) // 1000
    for born_ms in (10_000_000, 10_000_001, 1 << 62, -(1 << 62), last_ms, last_ms - 3_590_000, -last_ms):
        store.append("T", [b"one"], born_timestamp_ms=born_ms)
    store.dispatch()
    store.close()
    found = counts(spark, tmp_path / "store", by=(), window="1 hour", slide=slide, time="born_timestamp")
    rows = {row.at: row.messages for row in found.selectExpr("unix_millis(window_start) at", "messages").collect()}
    begins = [7_200_000, 8_400_000, 9_600_000] if slide else [7_200_000]
    assert rows == dict.fromkeys(begins, 2) | {None: 5}
    with pytest.raises(BadRequestError, match="5 messages born at a time that Spark has no timestamp for"):
        plot_counts(found, (), tmp_path / "plot.html")


def test_counts_windows_at_limits_of_spark_timestamps(spark: SparkSession, tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    born = [sign * ((1 << 63) // 1000 - hours * 3_600_000) for sign in (1, -1) for hours in (1, 2, 1000)]
    for born_ms in born:
        store.append("T", [b"one"], born_timestamp_ms=born_ms)
    store.dispatch()
    store.close()
    for slide in (3_600, 1_200, 7):
        found = counts(
            *(spark, tmp_path / "store"),
            by=(),
            window="1 hour",
            slide=f"{slide} seconds",
            latencies=False,
            time="born_timestamp",
        )
        rows = found.selectExpr(
            "unix_micros(window_start)", "unix_micros(window_end) - unix_micros(window_start)", "messages"
        )
        expected = Counter(
            (start, 3_600_000_000, 1)
            for at in born
            for start in range(1000 * at // (slide * 10**6) * slide * 10**6, 1000 * at - 3_600_000_000, -slide * 10**6)
        )
        assert Counter(map(tuple, rows.collect())) == expected


@pytest.mark.parametrize("kind", ["TIMESTAMP_LTZ", "TIMESTAMP_NTZ"])
def test_counts_window_length_is_equal_in_all_zones(spark: SparkSession, rolled_store: Path, kind: str) -> None:
    """In New York, 120 days from the epoch or 90 days from a February on are an hour shorter."""
    day_us = 86_400_000_000
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    spark.conf.set("spark.sql.timestampType", kind)
    try:
        for length, wanted_us in (
            ("120 days", 120 * day_us),
            ("90 days", 90 * day_us),
            ("1 day 0.000001 seconds", day_us + 1),
        ):
            found = counts(spark, rolled_store, by=(), window=length, latencies=False)
            [row] = found.selectExpr("unix_micros(window_start)", "unix_micros(window_end)", "messages").collect()
            assert (row[1] - row[0], row[0] % wanted_us, row[2]) == (wanted_us, 0, 640)
        with pytest.raises(BadRequestError, match="'1 month' is not a length of time, or not a constant one"):
            counts(spark, rolled_store, window="1 month")
    finally:
        spark.conf.unset("spark.sql.timestampType")
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_counts_by_key_over_several_stores(spark: SparkSession, rolled_store: Path) -> None:
    found = counts(spark, rolled_store, by=("key", "tag"), latencies=False, topic="Second")
    assert counts(spark, rolled_store, by="tag", latencies=False).columns == ["tag", "messages", "bytes"]
    rows = found.orderBy("key").collect()
    assert {(row.key, row.tag): row.messages for row in rows} == {
        (message.keys[0], None): 1 for message in messages_of(rolled_store, topic="Second")
    }
    twice = counts(spark, [rolled_store, rolled_store.parent / "*"], by=("store",), latencies=False)
    assert [tuple(row) for row in twice.select("store", "messages").collect()] == [(str(rolled_store), 640)]


def test_counts_repeated_key_of_message_once(spark: SparkSession, tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    store.append("Topic", [b"1", b"2", b"3"], keys=["a a b", "a", ""])
    store.close()
    rows = counts(spark, tmp_path / "store", by="key", latencies=False).collect()
    assert {row.key: row.messages for row in rows} == {"a": 2, "b": 1, None: 1}


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_plot_is_written(spark: SparkSession, rolled_store: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib" if suffix == ".png" else "plotly")
    counted = counts(spark, rolled_store, window="100 milliseconds", latencies=False).persist()
    series = series_of(counted, ["topic"])
    assert {each.name: sum(each.messages) for each in series} == {"First": 224, "Second": 208, "Third": 208}
    assert all(each.times == sorted(each.times) for each in series)
    plot_counts(counted, ["topic"], tmp_path / f"out{suffix}")
    data = (tmp_path / f"out{suffix}").read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == ".png" else b"Messages by topic" in data
    counted.unpersist()


@pytest.mark.parametrize("suffix", [".svg", ".html"])
@pytest.mark.parametrize("windows", ["", "timestamp_millis(1000)"])
def test_plot_escapes_names(spark: SparkSession, tmp_path: Path, suffix: str, windows: str) -> None:
    matplotlib = pytest.importorskip("matplotlib" if suffix == ".svg" else "plotly")
    names = ["_topic", r"$\x$", "$5 or $6", "<b>&"]
    rows = ", ".join(f"(r'{name}', {windows or 'null'}, 1)" for name in names)
    counted = spark.sql(f"SELECT * FROM VALUES {rows} AS t(topic, window_start, messages)")
    counted = counted.withColumn("window_end", counted.window_start) if windows else counted.drop("window_start")
    with matplotlib.rc_context({"svg.fonttype": "none"}) if suffix == ".svg" else contextlib.nullcontext():
        plot_counts(counted, ["topic"], tmp_path / f"out{suffix}")
    data = (tmp_path / f"out{suffix}").read_text()
    shown = [html.escape(name, quote=False) for name in names]
    if suffix == ".html":
        # The HTML page contains JSON.
        shown = [json.dumps(name)[1:-1].replace("<", r"\u003c").replace(">", r"\u003e") for name in shown]
    assert [name for name in shown if name not in data] == []


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_plot_others_have_own_colour(spark: SparkSession, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib" if suffix == ".svg" else "plotly")
    rows = ", ".join(f"('{number}', timestamp_millis({at}), 1)" for number in range(12) for at in (1000, 2000))
    counted = spark.sql(f"SELECT *, window_start window_end FROM VALUES {rows} AS t(topic, window_start, messages)")
    plot_counts(counted, ["topic"], tmp_path / f"out{suffix}", slide_s=1.0)
    data = (tmp_path / f"out{suffix}").read_text()
    if suffix == ".svg":
        assert len(set(re.findall(r"stroke: (#\w+); stroke-width: 1.5", data))) == 11
    else:
        assert len(re.findall(r'"marker":\{"color":"black"\}', data)) == 1


def test_counts_invalid_arguments_raise(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="cannot count by 'body'; columns are store, topic"):
        counts(spark, rolled_store, by=("body",))
    with pytest.raises(BadRequestError, match="slide = '1 hour' needs a window"):
        counts(spark, rolled_store, slide="1 hour")
    for window, slide, says in (
        (
            "1 hour",
            "1 second",
            "window = 3600 s, slide = 1 s: each message would be in 3,600 windows; the limit is 1,500",
        ),
        ("1 hour", "2 hours", "slide = 7200 s; it must be longer than 0, and no longer than the window, 3600 s"),
        ("0 seconds", "", "window = 0 s; it must be longer than 0"),
        ("an hour", "", "'an hour' is not a length of time"),
        ("1 month", "", "'1 month' is not a length of time, or not a constant one"),
    ):
        with pytest.raises(BadRequestError, match=says):
            counts(spark, rolled_store, window=window, slide=slide)
    for to, says in (("out.bmp", "a plot is one of"), ("missing/out.svg", "no such folder")):
        with pytest.raises(BadRequestError, match=says):
            plot_counts(counts(spark, rolled_store), ["topic"], tmp_path / to)
    with pytest.raises(BadRequestError, match="lies in the store"):
        plot_counts(counts(spark, rolled_store), ["topic"], rolled_store / "commitlog" / "out.svg")


def test_plot_empty_windows_are_0(spark: SparkSession) -> None:
    rows = ", ".join(
        f"('{topic}', timestamp_millis({at}), timestamp_millis({at + 10}), 5L)"
        for topic, at in (("a", 0), ("a", 10), ("a", 60), ("others", 30), ("others", 40))
    )
    counted = spark.sql(f"SELECT * FROM VALUES {rows} AS t(topic, window_start, window_end, messages)")
    of_a, of_others = series_of(counted, ["topic"])
    drawn = [(round(at.timestamp() * 1000), messages) for at, messages in zip(of_a.times, of_a.messages, strict=True)]
    assert drawn == [(0, 5), (10, 5), (20, 0), (50, 0), (60, 5)]
    assert [round(at.timestamp() * 1000) for at in of_others.times] == [0, 20, 30, 40, 50, 60]
    assert of_others.messages == [0, 0, 5, 5, 0, 0]
    # Overlapping windows: the distance between starts is smaller than the length.
    assert [round(at.timestamp() * 1000) for at in series_of(counted, ["topic"], 0.005)[0].times] == [
        *(0, 5, 10, 15, 55, 60),
    ]


@pytest.mark.parametrize("suffix", [".png", ".html"])
@pytest.mark.parametrize("day", ["0001-01-01", "9999-12-31"])
def test_plot_windows_of_first_and_last_year(spark: SparkSession, tmp_path: Path, suffix: str, day: str) -> None:
    pytest.importorskip("matplotlib" if suffix == ".png" else "plotly")
    rows = ", ".join(f"('a', timestamp '{at}', timestamp '{at}' + interval 1 hour, 5L)" for at in ("2026-01-01", day))
    counted = spark.sql(f"SELECT * FROM VALUES {rows} AS t(topic, window_start, window_end, messages)")
    plot_counts(counted, ["topic"], tmp_path / f"out{suffix}")
    assert (tmp_path / f"out{suffix}").stat().st_size


@pytest.mark.parametrize("at", [253_402_300_800_000, -62_135_596_800_001])
def test_plot_windows_beyond_calendar_are_rejected(spark: SparkSession, at: int) -> None:
    counted = spark.sql(
        "SELECT * FROM VALUES "
        f"('a', timestamp_millis({at}), timestamp_millis({at + 10}), 5L) "
        "AS t(topic, window_start, window_end, messages)"
    )
    with pytest.raises(BadRequestError, match=f"begins at {at:,} ms, which is not in the years 1 to 9999"):
        series_of(counted, ["topic"])


def test_plot_topic_named_others_is_separate(spark: SparkSession) -> None:
    rows = ", ".join(f"('{topic}', {100 - at}L)" for at, topic in enumerate(["others", *"abcdefghijk"]))
    counted = spark.sql(f"SELECT * FROM VALUES {rows} AS t(topic, messages)")
    series = {each.name: each.messages for each in series_of(counted, ["topic"])}
    assert (series["others"], series["all others"], len(series)) == ([100], [90 + 89], 11)
