"""Work cut into tasks by the driver, done by executors, with rows as the result: how jobs run that are no query.

    tasks, planned from names and positions ──▶ one task of Spark each ──▶ rows of a DataFrame

A task that failed is done again by Spark, so what a task does must come to the same when it is done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from mqproc.errors import BadRequestError
from mqproc.spark.survey import find_stores

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
Row = Mapping[str, Any]

TIME: Final = pa.timestamp("us", "UTC")
_ROWS_PER_BATCH: Final = 8192
# So that of several groups few are one behind the other in one task.
_PARTITIONS_PER_GROUP: Final = 4
_PARTITIONS_MAX: Final = 200
_LARGE_TYPES: Final = "spark.sql.execution.arrow.useLargeVarTypes"


def batches_of(schema: pa.Schema, rows: Iterable[Row]) -> Iterator[pa.RecordBatch]:
    """Rows, of which there are not many, as Arrow batches; what a row does not name is null."""
    waiting: list[Row] = []
    for row in rows:
        waiting.append(row)
        if len(waiting) >= _ROWS_PER_BATCH:
            yield pa.RecordBatch.from_pylist(waiting, schema)
            waiting = []
    if waiting:
        yield pa.RecordBatch.from_pylist(waiting, schema)


def rows_of_tasks(
    spark: SparkSession, tasks: Sequence[T], do: Callable[[T], Iterable[Row]], schema: pa.Schema
) -> DataFrame:
    """The rows that `do` makes of each task, each done by a task of Spark.

    Tasks travel with the function to every executor: they are small, and what they need is read where they run.
    """
    several = list(tasks)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from batches_of(schema, do(several[number]))

    # One row a partition: its number.
    numbers = spark.range(0, len(several), 1, max(1, len(several)))
    return numbers.mapInArrow(run, from_arrow_schema(schema))


def rows_of_each(frame: DataFrame, do: Callable[[Row], Iterable[Row]], schema: pa.Schema) -> DataFrame:
    """The rows that `do` makes of each row of a frame, in the frame's partitions."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for row in batch.to_pylist():
                yield from batches_of(schema, do(row))

    return frame.mapInArrow(run, from_arrow_schema(schema))


def rows_of_groups(
    frame: DataFrame, by: Sequence[str], do: Callable[[pa.Table], Iterable[Row]], schema: pa.Schema, *, groups: int
) -> DataFrame:
    """The rows that `do` makes of each group of rows with the same values in the columns `by`; there are `groups`."""
    # Unlike elsewhere Spark takes no other types here than those that the session has it give.
    is_large = str(frame.sparkSession.conf.get(_LARGE_TYPES, "false")).lower() == "true"
    made = pa.schema([field.with_type(large(field.type)) for field in schema]) if is_large else schema

    def run(table: pa.Table) -> pa.Table:
        return pa.Table.from_batches(list(batches_of(made, do(table))), made)

    # Of what is persisted Spark would keep 200, nearly all of them empty, and have a task for each whenever it is read.
    partitions = min(_PARTITIONS_PER_GROUP * groups, _PARTITIONS_MAX)
    return frame.repartition(partitions, *by).groupBy(*by).applyInArrow(run, from_arrow_schema(schema))


def large(of: pa.DataType) -> pa.DataType:
    """A type as Spark has it where texts and bytes, and those in lists and structs, have offsets of 64 bits."""
    if pa.types.is_string(of):
        return pa.large_string()
    if pa.types.is_binary(of):
        return pa.large_binary()
    if pa.types.is_list(of):
        return pa.list_(of.value_field.with_type(large(of.value_type)))
    if pa.types.is_struct(of):
        return pa.struct([field.with_type(large(field.type)) for field in of])
    return of


# --- folders ---
# Stores in folders: jobs that need more than a log's bytes (queues, index, settings) take no others.


def local_stores(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The folders that paths and patterns mean. Raises StoreAccessError for none, BadRequestError for a URL."""
    found = find_stores([str(path)] if isinstance(path, str | Path) else [str(each) for each in path])
    for uri in found:
        if "://" in uri:
            raise BadRequestError(f"{uri}: this job needs a store in a folder that all executors have at one path")
    return [Path(uri) for uri in found]
