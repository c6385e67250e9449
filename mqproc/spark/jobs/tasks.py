"""Run a job's tasks on executors, with rows as results, for jobs that are not queries.

    tasks, planned from names and positions ──▶ one Spark task each ──▶ rows of a DataFrame

Spark repeats a failed task, so a task must be idempotent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from mqproc.errors import BadRequestError
from mqproc.spark.options import PathArgument, path_texts
from mqproc.spark.survey import find_stores

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
Row = Mapping[str, Any]

TIME: Final = pa.timestamp("us", "UTC")
_ROWS_PER_BATCH: Final = 8192
# Spreads groups over tasks.
_PARTITIONS_PER_GROUP: Final = 4
_PARTITIONS_MAX: Final = 200
_LARGE_TYPES: Final = "spark.sql.execution.arrow.useLargeVarTypes"


def batches_of(schema: pa.Schema, rows: Iterable[Row]) -> Iterator[pa.RecordBatch]:
    """A small number of rows as Arrow batches; missing columns are null."""
    waiting = iter(rows)
    while some := list(itertools.islice(waiting, _ROWS_PER_BATCH)):
        yield pa.RecordBatch.from_pylist(some, schema)


def rows_of_tasks(
    spark: SparkSession, tasks: Sequence[T], do: Callable[[T], Iterable[Row]], schema: pa.Schema
) -> DataFrame:
    """The rows that `do` returns for each task, each run by one Spark task.

    All tasks travel to every executor with the function: they are small, and read their data where they run.
    """
    all_tasks = list(tasks)
    # One row per partition: the task's number.
    numbers = spark.range(0, len(all_tasks), 1, max(1, len(all_tasks)))
    return rows_of_each(numbers, lambda row: do(all_tasks[row["id"]]), schema)


def rows_of_each(frame: DataFrame, do: Callable[[Row], Iterable[Row]], schema: pa.Schema) -> DataFrame:
    """The rows that `do` returns for each row of a frame, in the frame's partitions."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                yield from batches_of(schema, do(row))

    return frame.mapInArrow(run, from_arrow_schema(schema))


def rows_of_groups(
    frame: DataFrame, by: Sequence[str], do: Callable[[pa.Table], Iterable[Row]], schema: pa.Schema, *, groups: int
) -> DataFrame:
    """The rows that `do` returns for each of `groups` groups by the columns `by`."""
    # Unlike elsewhere, Spark accepts only the session's string and binary types here.
    uses_large = str(frame.sparkSession.conf.get(_LARGE_TYPES, "false")).lower() == "true"
    made = pa.schema([field.with_type(large(field.type)) for field in schema]) if uses_large else schema

    def run(table: pa.Table) -> pa.Table:
        return pa.Table.from_batches(list(batches_of(made, do(table))), made)

    # Otherwise Spark would persist 200 partitions, nearly all empty, and run a task for each at every read.
    partitions = min(_PARTITIONS_PER_GROUP * groups, _PARTITIONS_MAX)
    return frame.repartition(partitions, *by).groupBy(*by).applyInArrow(run, from_arrow_schema(schema))


def large(of: pa.DataType) -> pa.DataType:
    """The type with 64-bit offsets for strings and bytes, also in lists and structs."""
    if pa.types.is_string(of):
        return pa.large_string()
    if pa.types.is_binary(of):
        return pa.large_binary()
    if pa.types.is_list(of):
        return pa.list_(of.value_field.with_type(large(of.value_type)))
    if pa.types.is_struct(of):
        return pa.struct([field.with_type(large(field.type)) for field in of])
    return of


def local_stores(path: PathArgument) -> list[Path]:
    """The store folders at a path, for jobs that need queues, index or settings.

    Raises StoreAccessError for no store, BadRequestError for a URL.
    """
    found = find_stores(path_texts(path))
    for uri in found:
        if "://" in uri:
            raise BadRequestError(f"{uri}: this job needs a store in a folder at the same path on all executors")
    return [Path(uri) for uri in found]
