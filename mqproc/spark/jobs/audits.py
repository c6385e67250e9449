"""Audits of stores: parallel verify, duplicate messages, lag of consumer groups.

    store ──snapshot──▶ shares of the log, groups of queues, index files ──▶ one task each ──▶ results
                                                                   by store ──compare──▶ one row per store

`mqproc.store.verify` defines the tasks and their meaning; Spark runs them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.spark.batch_read import messages
from mqproc.spark.jobs.tasks import TIME, Row, local_stores, rows_of_groups, rows_of_tasks
from mqproc.spark.options import PathArgument
from mqproc.store.access import check_is_store
from mqproc.store.offsets.offset_store import load
from mqproc.store.read.reader import StoreReader, settings_of
from mqproc.store.verify.snapshot import IndexFile, Share, Snapshot
from mqproc.store.verify.verifier import QueueBatch, Task, VerifyResult, Worker, compare, take_snapshot, tasks_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHARE_BYTES: Final = 256 << 20
"""Bytes of log per task."""

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


def verify(spark: SparkSession, path: PathArgument, *, share_bytes: int = SHARE_BYTES) -> DataFrame:
    """A row of `VERIFIED` for each store: whether it is clean, totals, and findings.

    At most 1,000 findings of a kind are listed, all are counted. All executors need the stores at the same path. Raises
    StoreAccessError when there is no store.
    """
    stores = local_stores(path)
    snapshots = [_snapshot(store, share_bytes) for store in stores]
    # Task −1 ensures a row for a store without tasks.
    parts = [(number, task) for number, each in enumerate(snapshots) for task in range(-1, len(tasks_of(each)))]

    def run_part(part: tuple[int, int]) -> Iterator[Row]:
        number, task = part
        with closing(Worker(StoreIO(), snapshots[number], lambda size: None)) as worker:
            result = None if task < 0 else worker.run(tasks_of(snapshots[number])[task])
        yield {"store": number, "task": task, "result": pickle.dumps(result)}

    def combine(table: pa.Table) -> Iterator[Row]:
        number = table.column("store")[0].as_py()
        rows = sorted(zip(table.column("task").to_pylist(), table.column("result").to_pylist(), strict=True))
        results = [pickle.loads(result) for task, result in rows if task >= 0]
        found = _compare(stores[number], snapshots[number], results)
        yield found.figures() | {"findings": [finding.to_json() for finding in found.findings.in_order()]}

    results = rows_of_tasks(spark, parts, run_part, _RESULTS)
    return rows_of_groups(results, ["store"], combine, VERIFIED, groups=len(stores))


def _snapshot(store: Path, share_bytes: int) -> Snapshot:
    io, paths = StoreIO(), StorePaths(store)
    check_is_store(io, paths)
    return take_snapshot(io, paths, settings_of(io, paths), share_bytes=share_bytes)


def _compare(store: Path, snapshot: Snapshot, results: list[Any]) -> VerifyResult:
    io, paths = StoreIO(), StorePaths(store)
    with closing(Worker(io, snapshot, lambda size: None)) as worker:
        return compare(io, paths, settings_of(io, paths), snapshot, _KnownResults(snapshot, results, worker))


class _KnownResults:
    """Results of a snapshot's tasks, and a worker for follow-up tasks."""

    def __init__(self, snapshot: Snapshot, results: list[Any], worker: Worker) -> None:
        self._known = {_task_identity(task): result for task, result in zip(tasks_of(snapshot), results, strict=True)}
        self._worker = worker

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Yield each task with its result."""
        for task in tasks:
            known = self._known.get(_task_identity(task))
            yield task, self._worker.run(task) if known is None else known


def _task_identity(task: Task) -> tuple[str, Any]:
    """Identity of a task within a snapshot, which follow-up tasks do not have."""
    match task:
        case Share():
            key: Any = task.number
        case IndexFile():
            key = task.name
        case QueueBatch():
            key = task.queues[0]
        case _:
            key = None
    return type(task).__name__, key


def duplicates(spark: SparkSession, path: PathArgument, **selection: Any) -> DataFrame:
    """Messages of a topic that are stored several times, in one store or several.

    Rows of `topic, unique_id, copies, stores, first_stored, last_stored`, and `first` and `last`: store and log
    position of two copies. A producer that sends again after a lost answer makes copies.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    columns = ["store", "topic", "properties", "physical_offset", "store_timestamp"]
    found = messages(spark, path, columns=columns, **selection)
    named = found.withColumn("unique_id", F.col("properties")["UNIQ_KEY"]).where("unique_id is not null")
    place = F.struct("store", "physical_offset").alias("place")
    of_id = F.xxhash64("topic", "unique_id").alias("hash")
    # Nearly all messages are unique, and comparing hashes takes less than half the time of comparing strings.
    of_hash = F.count(F.lit(1)).over(Window.partitionBy("hash"))
    rows = named.select("topic", "unique_id", place, "store_timestamp", of_id).withColumn("of_hash", of_hash)
    # Grouping by the hash too avoids a second shuffle.
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


LAG: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("store", "group", "topic")),
        ("queue_id", pa.int32()),
        *((name, pa.int64()) for name in ("offset", "min_offset", "max_offset", "behind", "expired")),
        ("oldest_stored", TIME),
    ]
)


def lag(spark: SparkSession, path: PathArgument) -> DataFrame:
    """A row of `LAG` for each store, group and queue with a committed offset, and `seen_at`.

    `offset` is consumed next; `behind` messages from there on are stored; `expired` messages were deleted unconsumed;
    `oldest_stored` is the store time of the oldest message that is behind. All rows of a call have the same `seen_at`,
    so appending them to a table shows lag over time. Positions of a running store are those it has published.
    """
    from pyspark.sql import functions as F

    found = rows_of_tasks(spark, local_stores(path), _lag_of_store, LAG)
    return found.withColumn("seen_at", F.current_timestamp())


def _lag_of_store(store: Path) -> Iterator[Row]:
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


def backlog(spark: SparkSession, path: PathArgument, *, window: str = "1 hour", **selection: Any) -> DataFrame:
    """Unconsumed messages by store, group, topic and window of store time: when lag arose.

    `window` is a length in Spark's syntax, `selection` arguments of `messages`. Rows have `window_start`, `window_end`,
    `messages` and `bytes`.
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
