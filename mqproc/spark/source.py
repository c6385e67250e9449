"""`format("mqproc")`: messages of stores as rows, through Spark's Python Data Source API.

Spark imports this module to discover the source, so planner and readers are imported where they are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import ArrayType, MapType, StructField, StructType

from mqproc.errors import BadRequestError
from mqproc.spark.options import (
    ReadOptions,
    ReadSelection,
    check_column_names,
    column_source,
    column_types,
    ddl_type,
    read_options,
    schema_ddl,
    stream_options,
    table_options,
    write_options,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from mqproc.spark.partitions import LogPartition

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER_NULL = frozenset({"topic", "queue_id"})
# Columns show this character for bytes that are not UTF-8; the kernel compares the bytes themselves.
_REPLACEMENT = "\ufffd"


class MqprocDataSource(DataSource):
    """Stores in RocketMQ's format. Options and columns: `mqproc.spark.options`."""

    @classmethod
    def name(cls) -> str:
        return "mqproc"

    def schema(self) -> str:
        """All columns of the naming, or the columns in the option `columns`."""
        return schema_ddl(*table_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = read_options(self.options)
        names = columns_of(schema, options.naming)
        return PushdownReader(options, names) if options.filter_pushdown else BatchReader(options, names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from mqproc.spark.stream_reader import StreamReader

        options = stream_options(self.options)
        return StreamReader(options, columns_of(schema, options.read.naming))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from mqproc.spark.sink import BatchWriter

        return BatchWriter(write_options(self.options, overwrite=overwrite), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from mqproc.spark.sink import StreamWriter

        return StreamWriter(write_options(self.options, overwrite=overwrite), schema)


class BatchReader(DataSourceReader):
    """One batch read: the driver plans its partitions, one task reads each."""

    def __init__(self, options: ReadOptions, names: list[str]) -> None:
        self.read_options = options
        self.names = names

    def partitions(self) -> list[InputPartition]:
        from mqproc.spark.planning import plan
        from mqproc.spark.worker import exclude_loaded_from_gc

        planned: list[InputPartition] = list(plan(self.read_options))
        exclude_loaded_from_gc()
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from mqproc.spark.batches import read_partition
        from mqproc.spark.worker import run_task

        log_partition: LogPartition = partition  # type: ignore[assignment]
        return run_task(read_partition(self.read_options, self.names, log_partition))


class PushdownReader(BatchReader):
    """A reader that evaluates filters of a query in the kernel (`filterPushdown=true`).

    Only for one query per `load()`: Spark keeps the planned read, with the filters of the last planned query, on the
    object of a `load()`. Another query of the same DataFrame would get rows filtered by the first. So it is opt-in.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        naming = self.read_options.naming
        sources = {name: column_source(naming, name) for name in column_types(naming)}
        selection = self.read_options.selection
        remaining: list[Filter] = []
        for each in filters:
            if (narrowed := _narrow(selection, sources, each)) is None:
                remaining.append(each)
            else:
                selection = narrowed
        self.read_options = dataclasses.replace(self.read_options, selection=selection)
        return remaining


def _narrow(selection: ReadSelection, sources: dict[str, str], condition: Filter) -> ReadSelection | None:
    """The selection with one more filter; None when Spark must apply the filter."""
    attribute: tuple[str, ...] = getattr(condition, "attribute", ())
    source = sources.get(attribute[0]) if len(attribute) == 1 else None
    if isinstance(condition, IsNotNull):
        return selection if source in _NEVER_NULL else None
    if isinstance(condition, EqualTo):
        return _with_values(selection, source, (condition.value,))
    if isinstance(condition, In):
        return _with_values(selection, source, tuple(condition.value))
    if source == "store_timestamp" and isinstance(
        condition, GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
    ):
        return _with_time(selection, condition)
    return None


def _with_values(selection: ReadSelection, source: str | None, values: tuple[Any, ...]) -> ReadSelection | None:
    # Spark handles nulls, and empty tags, which the store does not distinguish from absent tags.
    if not values or None in values or "" in values or _REPLACEMENT in "".join(map(str, values)):
        return None
    field = {"topic": "topics", "queue_id": "queue_ids", "tag": "tags"}.get(source or "")
    if field is None or getattr(selection, field):
        return None
    changed: dict[str, Any] = {field: values}
    return dataclasses.replace(selection, **changed)


def _with_time(
    selection: ReadSelection, condition: GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
) -> ReadSelection | None:
    """Narrow the time range, with bounds rounded up to milliseconds."""
    if not isinstance(condition.value, datetime):
        return None
    value = condition.value if condition.value.tzinfo else condition.value.replace(tzinfo=UTC)
    ms, rest = divmod(value - _EPOCH, timedelta(milliseconds=1))
    ms += bool(rest)
    if not rest and isinstance(condition, GreaterThan | LessThanOrEqual):
        ms += 1
    if isinstance(condition, GreaterThan | GreaterThanOrEqual):
        return dataclasses.replace(selection, begin_ms=max(selection.begin_ms, ms))
    return dataclasses.replace(selection, end_ms=min(selection.end_ms, ms))


def columns_of(schema: StructType, naming: str) -> list[str]:
    """The columns that a schema names.

    Raises BadRequestError for a schema without columns, and for a column that is unknown, repeated, NOT NULL or of
    another type.
    """
    types, names = column_types(naming), list(schema.fieldNames())
    if not names:
        # Spark would count 0 rows, whatever the stores contain.
        raise BadRequestError(f"the schema has no columns; columns are {', '.join(types)}")
    for name in names:
        if names.count(name) > 1:
            raise BadRequestError(f"the schema has column {name!r} {names.count(name)} times")
    check_column_names(naming, names)
    for field in schema.fields:
        if (asked := field.dataType.simpleString()) != types[field.name]:
            raise BadRequestError(f"column {field.name} is {ddl_type(types[field.name])}; the schema asks for {asked}")
        if not _is_nullable(field):
            raise BadRequestError(f"column {field.name} of the schema is NOT NULL; columns of messages are nullable")
    return names


def _is_nullable(field: StructField) -> bool:
    """Whether a column and its elements or values are nullable."""
    kind = field.dataType
    inside = (
        kind.containsNull if isinstance(kind, ArrayType) else not isinstance(kind, MapType) or kind.valueContainsNull
    )
    return field.nullable and inside
