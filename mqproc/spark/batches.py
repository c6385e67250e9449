"""Read a partition: selected records become Arrow batches of Spark's types.

Spark takes `binary` and `string` only with offsets into one buffer, so each body is copied once, from the mapped log
into its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

import pyarrow as pa

from mqproc.arrow.batches import ARROW_TYPES, ArrowColumn, ArrowColumns, PlainBodies, message_column
from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.kernels import arrow, record_decode
from mqproc.spark.options import ReadOptions, column_source, column_types
from mqproc.spark.partitions import LogPartition, LogRange, StoreSelection
from mqproc.spark.record_reader import (
    FoundRecords,
    KernelSelection,
    RangeReader,
    RecordLimits,
    SliceReader,
    Verify,
    segment_uri,
)
from mqproc.spark.segment_bytes import open_segment

# Spark has no dictionary type, and its times are in microseconds.
ARROW: Final = ARROW_TYPES | {"timestamp": pa.timestamp("us", "UTC")}


class BatchMaker:
    """Makes batches of the named columns from records of one store."""

    def __init__(self, naming: str, names: Sequence[str], store: str, *, plain_bodies: bool = False) -> None:
        types = column_types(naming)
        sources = [column_source(naming, name) for name in names]
        self._plain = PlainBodies(sources, store, "plainBodies=false reads bodies as they are stored")
        self._unpacks = plain_bodies and bool({"body", "sys_flag"} & set(sources))
        columns = zip(names, sources, strict=True)
        self._columns = ArrowColumns([_column(name, ARROW[types[name]], source, store) for name, source in columns])
        self.schema = self._columns.schema
        self.reads_body = "body" in sources

    def batches(self, found: FoundRecords) -> Iterator[pa.RecordBatch]:
        """The records as one batch, or several if decompressed bodies are large.

        Raises BadRequestError when a batch becomes too large, BadMessageError for a body that cannot be decompressed.
        """
        count = len(found.positions)
        places = record_decode.places_at(found.view, found.positions, self._columns.rows)
        try:
            batch = self._columns.batch(found.view, places, count)
        except BadRequestError as error:
            raise BadRequestError(f"{error}: lower batchRows or batchBytes") from None
        if self._unpacks:
            yield from self._plain.unpack(batch, found.view, places, count)
        else:
            yield batch


def _column(name: str, type_: pa.DataType, source: str, store: str) -> ArrowColumn:
    """Describe a column of a store for the kernel."""
    if source in ("store", "store_name"):
        text = store if source == "store" else store.rsplit("/", 1)[-1]
        return ArrowColumn(name, type_, arrow.SAME, text=text.encode())
    return message_column(name, source, type_)


# Partitions

_NO_LIMIT: Final = 1 << 62


def read_partition(options: ReadOptions, names: Sequence[str], partition: LogPartition) -> Iterator[pa.RecordBatch]:
    """Read a partition; its batches are in log order."""
    for number, store in enumerate(partition.stores):
        maker = BatchMaker(options.naming, names, store.uri, plain_bodies=options.plain_bodies)
        limits = _limits(options, maker)
        if slices := [queue_slice for index, queue_slice in partition.slices if index == number]:
            for found in SliceReader(store, limits).records(slices):
                yield from maker.batches(found)
        reader = RangeReader(KernelSelection(store.selection, store.deleted), limits)
        for index, log_range in partition.ranges:
            if index == number:
                yield from _read_range(reader, maker, store, log_range, options)


def _limits(options: ReadOptions, maker: BatchMaker) -> RecordLimits:
    if options.verify_crc is None:
        verify = Verify.SELECTED if maker.reads_body else Verify.NOTHING
    else:
        verify = Verify.EVERYTHING if options.verify_crc else Verify.NOTHING
    batch_bytes = options.batch_bytes if maker.reads_body else _NO_LIMIT
    return RecordLimits(options.batch_rows, batch_bytes, verify, options.fail_on_data_loss)


def _read_range(
    reader: RangeReader, maker: BatchMaker, store: StoreSelection, log_range: LogRange, options: ReadOptions
) -> Iterator[pa.RecordBatch]:
    place = segment_uri(store.uri, log_range)
    try:
        with closing(open_segment(store.uri, log_range.segment, store.segment_size, log_range.limit)) as segment:
            for found in reader.records(segment, log_range, place):
                yield from maker.batches(found)
    except FileNotFoundError:
        if options.fail_on_data_loss:
            raise CorruptStoreError(
                f"{place}: deleted since the read was planned; failOnDataLoss=false leaves it out"
            ) from None
