"""`write.format("mqproc")` and `writeStream.format("mqproc")`: rows become messages where the tasks run.

    task ──ids of (write, partition, topic, row)──▶ which is the last one stored? ──▶ the rest, in order ──▶ writer

There is nothing to commit: a row is there for everybody when its task has sent it. A task that is done again, or a
micro-batch after a crash, gives its rows the same ids and leaves out those that the store has.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from mqproc.errors import BadRequestError
from mqproc.spark.sink.options import WriteOptions, check_columns

if TYPE_CHECKING:
    import pyarrow as pa

# What Spark tells the tasks of a micro-batch.
_QUERY: Final = "sql.streaming.queryId"
_EPOCH: Final = "streaming.sql.batchId"


@dataclass(frozen=True, slots=True)
class Sent(WriterCommitMessage):
    """What a task did: messages sent, and rows that the store had already."""

    sent: int
    found: int


class BatchWriter(DataSourceArrowWriter):
    """One write of a DataFrame. Under one `writeId` no row is stored twice, however often the write is done."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(options, schema)
        self.write_options = options
        self.write_id = options.write_id or str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        context = _context()
        # Of a write of its own name nothing can be there, unless Spark tries the task again.
        looks = bool(self.write_options.write_id) or context.attemptNumber() > 0
        return _write(self.write_options, self.write_id, context.partitionId(), iterator, looks=looks)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing is left to do."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """What was sent stays; the same `writeId` goes on behind it."""


class StreamWriter(DataSourceStreamArrowWriter):
    """The sink of a query, for all its micro-batches."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(options, schema)
        if options.write_id:
            raise BadRequestError("option writeId is for batch writes: a query is known by its checkpoint")
        self.write_options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        context = _context()
        query, epoch = context.getLocalProperty(_QUERY), context.getLocalProperty(_EPOCH)
        if query is None or epoch is None:
            raise BadRequestError("Spark names neither query nor micro-batch: rows could not be known again")
        return _write(self.write_options, f"{query}\0{epoch}", context.partitionId(), iterator, looks=True)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing is left to do."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """What was sent stays; the micro-batch is done again and goes on behind it."""


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None
    return context


def _write(
    options: WriteOptions, write: str, partition: int, batches: Iterator[pa.RecordBatch], *, looks: bool
) -> Sent:
    from mqproc.spark.sink.sending import RowSender
    from mqproc.spark.worker import keep_loaded

    with RowSender(options, f"{write}\0{partition}", partition, looks=looks) as sender:
        for batch in batches:
            sender.send(batch)
        sender.end()
        keep_loaded()
        return Sent(sender.sent, sender.found)
