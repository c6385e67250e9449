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

from mqproc.config import Options
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.spark.api import messages
from mqproc.spark.jobs.folders import local_stores
from mqproc.spark.jobs.tasks import Row, rows_of_groups, rows_of_tasks
from mqproc.store.existing import check_is_store
from mqproc.store.reads.reader import settings_of
from mqproc.store.verify.picture import IndexFile, Picture, Share
from mqproc.store.verify.verifier import Verified, compare, picture_of, tasks_of
from mqproc.store.verify.workers import QueueGroup, Task, Worker

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
    pictures = [_picture(store, share_bytes) for store in stores]
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


def _picture(store: Path, share_bytes: int) -> Picture:
    io, paths = StoreIO(), StorePaths(store)
    check_is_store(io, paths)
    return picture_of(io, paths, settings_of(io, paths), share_bytes=share_bytes)


def _look(picture: Picture, task: int) -> Any:
    with closing(Worker(StoreIO(), picture, lambda size: None)) as worker:
        return worker.run(tasks_of(picture)[task])


def _compared(store: Path, picture: Picture, results: list[Any]) -> Verified:
    io, paths = StoreIO(), StorePaths(store)
    options: Options = settings_of(io, paths)
    with closing(Worker(io, picture, lambda size: None)) as worker:
        return compare(io, paths, options, picture, _Answers(picture, results, worker))


class _Answers:
    """Results that are there already, and a worker for the questions that follow from them."""

    def __init__(self, picture: Picture, results: list[Any], worker: Worker) -> None:
        self._known = {_name(task): result for task, result in zip(tasks_of(picture), results, strict=True)}
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
    elif isinstance(task, QueueGroup):
        of = task.queues[0]
    return type(task).__name__, of


def _row(found: Verified) -> Row:
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
