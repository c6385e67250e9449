"""How far consumer groups are behind their queues: now, and by when the messages they have not consumed were stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from mqproc.io import StoreIO
from mqproc.spark.api import messages
from mqproc.spark.jobs.folders import local_stores
from mqproc.spark.jobs.tasks import TIME, Row, rows_of_tasks
from mqproc.store.groups.progress import load
from mqproc.store.reads.reader import StoreReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LAG: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("store", "group", "topic")),
        ("queue_id", pa.int32()),
        *((name, pa.int64()) for name in ("offset", "min_offset", "max_offset", "behind", "expired")),
        ("oldest_stored", TIME),
    ]
)


def lag(spark: SparkSession, path: str | Path | Sequence[str | Path]) -> DataFrame:
    """A row of `LAG` for each store, group and queue that the group has progress in, and `seen_at`.

    `offset` is consumed next; `behind` messages from there on are stored, `expired` ones before the queue's beginning
    went unconsumed; `oldest_stored` is the store time of the first one that is behind. Rows of one call have one
    `seen_at`: append them to a table again and again to see lag over time. A running store is as it has published.
    """
    from pyspark.sql import functions as F

    found = rows_of_tasks(spark, local_stores(path), _of_store, LAG)
    return found.withColumn("seen_at", F.current_timestamp())


def _of_store(store: Path) -> Iterator[Row]:
    io = StoreIO()
    with closing(StoreReader(store)) as reader:
        for at in load(io, reader.paths).progress:
            low, high = reader.min_offset(at.topic, at.queue_id), reader.max_offset(at.topic, at.queue_id)
            behind = max(0, high - max(low, at.offset))
            stored_ms = reader.store_time_ms(at.topic, at.queue_id, max(low, at.offset)) if behind else -1
            yield {
                "store": str(store),
                "group": at.group,
                "topic": at.topic,
                "queue_id": at.queue_id,
                "offset": at.offset,
                "min_offset": low,
                "max_offset": high,
                "behind": behind,
                "expired": max(0, low - at.offset),
                "oldest_stored": 1000 * stored_ms if stored_ms >= 0 else None,
            }


def backlog(
    spark: SparkSession, path: str | Path | Sequence[str | Path], *, window: str = "1 hour", **selection: Any
) -> DataFrame:
    """Messages that groups have not consumed, by store, group, topic and window of store time: when lag arose.

    `window` is a length as Spark writes it, `selection` arguments of `messages`. Rows have `window_start`,
    `window_end`, `messages` and `bytes`.
    """
    from pyspark.sql import functions as F

    progress = lag(spark, path).select("store", "group", "topic", "queue_id", "offset")
    columns = ["store", "topic", "queue_id", "queue_offset", "store_timestamp", "size"]
    stored = messages(spark, path, columns=columns, **selection)
    left = stored.join(F.broadcast(progress), ["store", "topic", "queue_id"]).where("queue_offset >= offset")
    windows = left.groupBy("store", "group", "topic", F.window("store_timestamp", window).alias("window"))
    counted = windows.agg(F.count(F.lit(1)).alias("messages"), F.sum("size").alias("bytes"))
    start, end = F.col("window.start").alias("window_start"), F.col("window.end").alias("window_end")
    return counted.select("store", "group", "topic", start, end, "messages", "bytes")
