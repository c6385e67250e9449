"""Stores verified in parallel, and messages that are there twice: audits of one store or hundreds.

    store ──pictured──▶ shares of the log, groups of queues, index files ──▶ one task each ──▶ results
                                                                     by store ──compared──▶ a row a store

What is looked at and what it means is `mqproc.store.verify`'s; here its tasks are Spark's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.spark.batch_read import messages
from mqproc.spark.jobs.tasks import TIME, Row, local_stores, rows_of_groups, rows_of_tasks
from mqproc.store.offsets.offset_store import load
from mqproc.store.read.reader import StoreReader, settings_of
from mqproc.store.store_check import check_is_store
from mqproc.store.verify.snapshot import IndexFile, Share, Snapshot
from mqproc.store.verify.verifier import VerifyResult, compare, take_snapshot, tasks_of
from mqproc.store.verify.workers import QueueBatch, Task, Worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHARE_BYTES: Final = 256 << 20
"""A task looks at so much of a log."""

_RESULTS: Final = pa.schema([("store", pa.int32()), ("task", pa.int32()), ("result", pa.binary())])
_NUMBERS: Final = ("offset", "physical_offset", "size", "count")
_TEXTS: Final = ("severity", "kind", "file", "text", "means", "do")
_FINDING: Final = pa.struct([(name, pa.string()) for name in _TEXTS] + [(name, pa.int64()) for name in _NUMBERS])
VERIFIED: Final = pa.schema(
    [
        ("store", pa.string()),
        ("clean", pa.bool_()),
        ("running", pa.bool_()),
        *((name, pa.int64()) for name in ("log_begin", "log_end", "records", "units", "index_entries", "queues")),
        *((name, pa.int64()) for name in ("bytes", "damage", "notes", "omitted")),
        ("findings", pa.list_(_FINDING)),
    ]
)


@dataclass(frozen=True, slots=True)
class _Part:
    """One task of one store's verify; −1: none, so that a store without any has a row too."""

    store: int
    task: int


def verify(
    spark: SparkSession, path: str | Path | Sequence[str | Path], *, share_bytes: int = SHARE_BYTES
) -> DataFrame:
    """A row of `VERIFIED` for each store: whether it is clean, how much was looked at, and what was found.

    Of each kind of finding 1,000 are listed and all are counted, as `mqproc store verify` does. Stores lie in folders
    that all executors have at the same path. Raises StoreAccessError where there is no store.
    """
    stores = local_stores(path)
    pictures = [_snapshot(store, share_bytes) for store in stores]
    parts = [_Part(number, task) for number, each in enumerate(pictures) for task in range(-1, len(tasks_of(each)))]

    def look(part: _Part) -> Iterator[Row]:
        found = None if part.task < 0 else _look(pictures[part.store], part.task)
        yield {"store": part.store, "task": part.task, "result": pickle.dumps(found)}

    def put_together(table: pa.Table) -> Iterator[Row]:
        number = table.column("store")[0].as_py()
        rows = sorted(zip(table.column("task").to_pylist(), table.column("result").to_pylist(), strict=True))
        results = [pickle.loads(result) for task, result in rows if task >= 0]
        yield _row(_compared(stores[number], pictures[number], results))

    found = rows_of_tasks(spark, parts, look, _RESULTS)
    return rows_of_groups(found, ["store"], put_together, VERIFIED, groups=len(stores))


def _snapshot(store: Path, share_bytes: int) -> Snapshot:
    io, paths = StoreIO(), StorePaths(store)
    check_is_store(io, paths)
    return take_snapshot(io, paths, settings_of(io, paths), share_bytes=share_bytes)


def _look(snapshot: Snapshot, task: int) -> Any:
    with closing(Worker(StoreIO(), snapshot, lambda size: None)) as worker:
        return worker.run(tasks_of(snapshot)[task])


def _compared(store: Path, snapshot: Snapshot, results: list[Any]) -> VerifyResult:
    io, paths = StoreIO(), StorePaths(store)
    options: Options = settings_of(io, paths)
    with closing(Worker(io, snapshot, lambda size: None)) as worker:
        return compare(io, paths, options, snapshot, _Answers(snapshot, results, worker))


class _Answers:
    """Results that are there already, and a worker for the questions that follow from them."""

    def __init__(self, snapshot: Snapshot, results: list[Any], worker: Worker) -> None:
        self._known = {_name(task): result for task, result in zip(tasks_of(snapshot), results, strict=True)}
        self._worker = worker

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Each task with its result."""
        for task in tasks:
            known = self._known.get(_name(task))
            yield task, self._worker.run(task) if known is None else known


def _name(task: Task) -> tuple[str, Any]:
    """What tells a picture's tasks from each other, and from questions."""
    of: Any = None
    if isinstance(task, Share):
        of = task.number
    elif isinstance(task, IndexFile):
        of = task.name
    elif isinstance(task, QueueBatch):
        of = task.queues[0]
    return type(task).__name__, of


def _row(found: VerifyResult) -> Row:
    return found.figures() | {"findings": [finding.to_json() for finding in found.findings.in_order()]}


def duplicates(spark: SparkSession, path: str | Path | Sequence[str | Path], **selection: Any) -> DataFrame:
    """Messages of one topic with one unique id that are stored more than once, in one store or in several.

    Rows of `topic, unique_id, copies, stores, first_stored, last_stored`, and `first` and `last`: store and position
    in the log of two of them. A producer that sends again after a lost answer makes such copies.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    columns = ["store", "topic", "properties", "physical_offset", "store_timestamp"]
    found = messages(spark, path, columns=columns, **selection)
    named = found.withColumn("unique_id", F.col("properties")["UNIQ_KEY"]).where("unique_id is not null")
    place = F.struct("store", "physical_offset").alias("place")
    of_id = F.xxhash64("topic", "unique_id").alias("hash")
    # Nearly all messages are there once: numbers tell so in less than half the time that texts take.
    of_hash = F.count(F.lit(1)).over(Window.partitionBy("hash"))
    rows = named.select("topic", "unique_id", place, "store_timestamp", of_id).withColumn("of_hash", of_hash)
    # By the hash, too, since rows already lie by it: these are not shuffled again.
    groups = rows.where("of_hash > 1").groupBy("hash", "topic", "unique_id")
    counted = groups.agg(
        F.count(F.lit(1)).alias("copies"),
        F.count_distinct("place.store").alias("stores"),
        F.min("store_timestamp").alias("first_stored"),
        F.max("store_timestamp").alias("last_stored"),
        F.min("place").alias("first"),
        F.max("place").alias("last"),
    )
    return counted.where("copies > 1").drop("hash")


# --- group_lag ---
# How far consumer groups are behind their queues: now, and by when the messages they have not consumed were stored.


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
