"""`format("mqproc")`: messages of stores as rows, by Spark's Python Data Source API.

Light: Spark imports this to learn of the source. What reads is imported where it is used, in planner and tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import ArrayType, MapType, StructField, StructType

from mqproc.errors import BadRequestError
from mqproc.spark.columns import in_ddl, schema_of, types_of
from mqproc.spark.options import ReadOptions, read_options, stream_options, table_options
from mqproc.spark.sink.options import write_options

if TYPE_CHECKING:
    import pyarrow as pa

    from mqproc.spark.ranges import LogPartition


class MqprocDataSource(DataSource):
    """Stores in RocketMQ's format. Options: `mqproc.spark.options`; columns: `mqproc.spark.columns`."""

    @classmethod
    def name(cls) -> str:
        return "mqproc"

    def schema(self) -> str:
        """All columns of the naming, or those of the option `columns`."""
        return schema_of(*table_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = read_options(self.options)
        names = columns_of(schema, options.naming)
        if options.filter_pushdown:
            from mqproc.spark.pushdown import PushdownReader

            return PushdownReader(options, names)
        return BatchReader(options, names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from mqproc.spark.streaming.reader import StreamReader

        options = stream_options(self.options)
        return StreamReader(options, columns_of(schema, options.read.naming))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from mqproc.spark.sink.writer import BatchWriter

        return BatchWriter(write_options(self.options, overwrite=overwrite), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from mqproc.spark.sink.writer import StreamWriter

        return StreamWriter(write_options(self.options, overwrite=overwrite), schema)


class BatchReader(DataSourceReader):
    """One read: partitions are planned where the driver is, each is read by one task."""

    def __init__(self, options: ReadOptions, names: list[str]) -> None:
        self.read_options = options
        self.names = names

    def partitions(self) -> list[InputPartition]:
        from mqproc.spark.planning import plan
        from mqproc.spark.worker import keep_loaded

        planned: list[InputPartition] = list(plan(self.read_options))
        keep_loaded()
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from mqproc.spark.tasks import read_partition
        from mqproc.spark.worker import as_task

        found: LogPartition = partition  # type: ignore[assignment]
        return as_task(read_partition(self.read_options, self.names, found))


def columns_of(schema: StructType, naming: str) -> list[str]:
    """The columns that a schema names.

    Raises BadRequestError for one that there is not, or of another type, that is there twice, or may have no nulls, and
    for a schema without columns.
    """
    types: Mapping[str, str] = types_of(naming)
    names = list(schema.fieldNames())
    if not names:
        # Spark would count no rows, whatever the stores have.
        raise BadRequestError(f"the schema has no column; there are {', '.join(types)}")
    for name in names:
        if names.count(name) > 1:
            raise BadRequestError(f"the schema has column {name!r} {names.count(name)} times")
    for field in schema.fields:
        if field.name not in types:
            raise BadRequestError(f"no column is called {field.name!r}; there are {', '.join(types)}")
        if field.dataType.simpleString() != types[field.name]:
            wanted, has = field.dataType.simpleString(), in_ddl(types[field.name])
            raise BadRequestError(f"column {field.name} is {has}; the schema asks for {wanted}")
        if not _may_be_null(field):
            raise BadRequestError(f"column {field.name} of the schema is NOT NULL; columns of messages may be null")
    return names


def _may_be_null(field: StructField) -> bool:
    """Whether a column, and what it has inside, may be null."""
    of = field.dataType
    inside = of.containsNull if isinstance(of, ArrayType) else not isinstance(of, MapType) or of.valueContainsNull
    return field.nullable and inside
