"""What a task does with its partition: range after range, wanted records become batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

import pyarrow as pa

from mqproc.errors import CorruptStoreError
from mqproc.spark.batches import BatchMaker
from mqproc.spark.options import ReadOptions
from mqproc.spark.ranges import LogPartition, LogRange, QueueSlice, StoreSelection
from mqproc.spark.reading import RangeReader, Verify, place_of
from mqproc.spark.segment_bytes import open_segment
from mqproc.spark.slices import SliceReader
from mqproc.spark.wanted import Wanted

_NO_LIMIT: Final = 1 << 62


def read_partition(options: ReadOptions, names: Sequence[str], partition: LogPartition) -> Iterator[pa.RecordBatch]:
    """The batches of a partition, in the order of its logs."""
    for number, store in enumerate(partition.stores):
        makes = BatchMaker(options.naming, names, store.uri, plain_bodies=options.plain_bodies)
        slices = [of for of_store, of in partition.slices if of_store == number]
        if slices:
            yield from _read_slices(options, makes, store, slices)
        reader = RangeReader(
            Wanted(store.selection, store.deleted),
            batch_rows=options.batch_rows,
            batch_bytes=_batch_bytes(options, makes),
            verify=_verify(options, makes),
            fail_on_data_loss=options.fail_on_data_loss,
        )
        for of_store, of in partition.ranges:
            if of_store == number:
                yield from _read_range(options, makes, reader, store, of)


def _read_slices(
    options: ReadOptions, makes: BatchMaker, store: StoreSelection, slices: Sequence[QueueSlice]
) -> Iterator[pa.RecordBatch]:
    reader = SliceReader(
        store,
        batch_rows=options.batch_rows,
        batch_bytes=_batch_bytes(options, makes),
        verify=_verify(options, makes),
        fail_on_data_loss=options.fail_on_data_loss,
    )
    for found in reader.records(slices):
        yield from makes.batches(found)


def _batch_bytes(options: ReadOptions, makes: BatchMaker) -> int:
    """Bytes of records that a batch is made of: no matter where bodies are not read."""
    return options.batch_bytes if makes.reads_body else _NO_LIMIT


def _verify(options: ReadOptions, makes: BatchMaker) -> Verify:
    if options.verify_crc is None:
        return Verify.WANTED if makes.reads_body else Verify.NOTHING
    return Verify.EVERYTHING if options.verify_crc else Verify.NOTHING


def _read_range(
    options: ReadOptions, makes: BatchMaker, reader: RangeReader, store: StoreSelection, of: LogRange
) -> Iterator[pa.RecordBatch]:
    try:
        with closing(open_segment(store.uri, of.segment, store.segment_size, of.limit)) as segment:
            for found in reader.records(segment, of, place_of(store.uri, of)):
                yield from makes.batches(found)
    except FileNotFoundError:
        if not options.fail_on_data_loss:
            return
        raise CorruptStoreError(
            f"{place_of(store.uri, of)}: deleted since the read was planned; failOnDataLoss=false leaves it out"
        ) from None
