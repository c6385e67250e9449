"""A batch read as `mapInArrow` over its partitions: how `messages(…)` reads.

    load() ──plan──▶ a row for each partition ──mapInArrow──▶ batches of messages ──▶ a row of each

Spark writes what a Python source yields into rows twice: behind the batch, and again in the `Project` above the scan.
What `mapInArrow` yields it writes once. So the source says here only what each task is to read. Planning and reading
are those of `format("mqproc")`. Ranges of numbers in place of a source would do too, but by their size Spark would take
the messages for a few bytes, and send them whole to every executor in a join.

What a job writes by itself (`jobs/task_folders.py`) never becomes rows: it takes the partitions and the reader.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from mqproc.spark.columns import in_ddl, types_of
from mqproc.spark.options import ReadOptions, read_options
from mqproc.spark.source import BatchReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

Read = Callable[[Iterator["pa.RecordBatch"]], Iterator["pa.RecordBatch"]]


class PartitionSource(DataSource):
    """What the tasks of a batch read are to do, each a row. Options are those of `format("mqproc")`."""

    @classmethod
    def name(cls) -> str:
        return "mqproc_partitions"

    def schema(self) -> str:
        return "partition binary"

    def reader(self, schema: StructType) -> DataSourceReader:
        return PartitionReader(read_options(self.options), [])


class PartitionReader(BatchReader):
    """Plans as its base does, and gives each partition away instead of reading it."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"partition": [pickle.dumps(partition)]})


@dataclass(frozen=True, slots=True)
class BatchRead:
    """Rows of a frame, each of which says what is to be read, and what makes batches of them in each task.

    `types` are those of the batches' columns, in Spark's short words.
    """

    frame: DataFrame
    read: Read
    types: Mapping[str, str]

    def rows(self) -> DataFrame:
        """A row of each message."""
        return self.frame.mapInArrow(self.read, ", ".join(f"{name} {in_ddl(of)}" for name, of in self.types.items()))

    def arrow_schema(self) -> pa.Schema:
        """That of each batch."""
        import pyarrow as pa

        from mqproc.spark.batches import ARROW

        return pa.schema([(name, ARROW[of]) for name, of in self.types.items()])


def planned(spark: SparkSession, paths: Sequence[str], given: Mapping[str, str], options: ReadOptions) -> BatchRead:
    """A read of the stores at `paths`, planned with its first query. `options` is what the options `given` mean."""
    types = types_of(options.naming)
    names = list(options.columns or types)
    reader = BatchReader(options, names)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for partition in batch.column("partition").to_pylist():
                yield from reader.read(pickle.loads(partition))

    spark.dataSource.register(PartitionSource)
    frame = spark.read.format(PartitionSource.name()).options(**given).load(list(paths))
    return BatchRead(frame, read, {name: types[name] for name in names})
