"""Counts by topic, key and windows of time, against what the engine's own reader finds; and plots of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqproc.errors import BadRequestError
from mqproc.spark.jobs import counts
from mqproc.spark.jobs.plotting import plot_counts, series_of
from tests.spark.rows import messages_of
from tests.store.stopped_store import FIRST_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def test_by_topic_and_queue_with_latencies(spark: SparkSession, rolled_store: Path) -> None:
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


def test_windows_that_follow_one_another_and_such_that_overlap(spark: SparkSession, rolled_store: Path) -> None:
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


def test_by_key_and_over_several_stores(spark: SparkSession, rolled_store: Path) -> None:
    found = counts(spark, rolled_store, by=("key", "tag"), latencies=False, topic="Second")
    rows = found.orderBy("key").collect()
    assert {(row.key, row.tag): row.messages for row in rows} == {
        (message.keys[0], None): 1 for message in messages_of(rolled_store, topic="Second")
    }
    twice = counts(spark, [rolled_store, rolled_store.parent / "*"], by=("store",), latencies=False)
    assert [tuple(row) for row in twice.select("store", "messages").collect()] == [(str(rolled_store), 640)]


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_a_plot(spark: SparkSession, rolled_store: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib" if suffix == ".png" else "plotly")
    counted = counts(spark, rolled_store, window="100 milliseconds", latencies=False).persist()
    series = series_of(counted, ["topic"])
    assert {each.name: sum(each.messages) for each in series} == {"First": 224, "Second": 208, "Third": 208}
    assert all(each.times == sorted(each.times) for each in series)
    plot_counts(counted, ["topic"], tmp_path / f"out{suffix}")
    data = (tmp_path / f"out{suffix}").read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == ".png" else b"Messages by topic" in data
    counted.unpersist()


def test_mistakes_are_told(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="counts by 'body'; there are store, topic"):
        counts(spark, rolled_store, by=("body",))
    with pytest.raises(BadRequestError, match="slide = '1 hour' needs a window"):
        counts(spark, rolled_store, slide="1 hour")
    with pytest.raises(BadRequestError, match="a plot is one of"):
        plot_counts(counts(spark, rolled_store), ["topic"], tmp_path / "out.bmp")
