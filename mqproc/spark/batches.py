"""Read a partition: selected records become Arrow batches of Spark's types.

Spark takes `binary` and `string` only with offsets into one buffer, so each body is copied once, from the mapped log
into its batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.client.arrow import ArrowColumn, ArrowColumns
from mqproc.errors import BadMessageError, BadRequestError, CorruptStoreError
from mqproc.kernels import arrow, record_decode
from mqproc.layout import record
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
from mqproc.util.compression import plain_body

Places = NDArray[np.int64]

ARROW: Final = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array<string>": pa.list_(pa.string()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}
PLAIN_BYTES: Final = 64 << 20
"""Limit on decompressed bodies in a batch of more than one row."""

# Numeric columns: their kind by type, and the decoder's names where they differ.
_NUMBERS: Final = {"int": arrow.INT32, "bigint": arrow.INT64, "timestamp": arrow.TIME}
_DECODED: Final = {"born_timestamp": "born_timestamp_ms", "store_timestamp": "store_timestamp_ms"}
# Other columns: their kind, and the decoder's column.
_MADE: Final[dict[str, tuple[int, str]]] = {
    "topic": (arrow.TEXT, "topic"),
    "tag": (arrow.TEXT, "tag"),
    "body": (arrow.BYTES, "body"),
    "born_host": (arrow.HOST, "born_host"),
    "store_host": (arrow.HOST, "store_host"),
    "message_id": (arrow.ID, "store_host"),
    "keys": (arrow.WORDS, "keys"),
    "properties": (arrow.PAIRS, "properties"),
    "properties_json": (arrow.JSON, "properties"),
}


class BatchMaker:
    """Makes batches of the named columns from records of one store."""

    def __init__(self, naming: str, names: Sequence[str], store: str, *, plain_bodies: bool = False) -> None:
        types = column_types(naming)
        self._sources = [column_source(naming, name) for name in names]
        self._unpacks = plain_bodies and bool({"body", "sys_flag"} & set(self._sources))
        self._store = store
        columns = zip(names, self._sources, strict=True)
        self._columns = ArrowColumns([_column(name, types[name], source, store) for name, source in columns])
        self.schema = self._columns.schema
        self.reads_body = "body" in self._sources

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
            yield from self._unpack(batch, found.view, places, count)
        else:
            yield batch

    def _unpack(
        self, batch: pa.RecordBatch, view: NDArray[np.uint8], places: Places, count: int
    ) -> Iterator[pa.RecordBatch]:
        """The batch with decompressed bodies, and sys_flags without their compression bits."""
        flags: Any = record_decode.copy_column(view, places, count, "sys_flag")
        packed = (flags & record.SYS_FLAG_COMPRESSED) != 0
        if not packed.any():
            yield batch
            return
        plain_flags = pa.array(np.where(packed, flags & ~record.SYS_FLAG_BODY, flags), pa.int32())
        batch = self._with("sys_flag", plain_flags, batch)
        if not self.reads_body:
            yield batch
            return
        offsets: Any = record_decode.copy_column(view, places, count, "physical_offset")
        at = 0
        for bodies in _plain(batch.column(self._sources.index("body")), flags, offsets, self._store):
            yield self._with("body", bodies, batch.slice(at, len(bodies)))
            at += len(bodies)

    def _with(self, source: str, array: pa.Array, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with `array` as the column built from `source`, if it has that column."""
        named = zip(self._sources, batch.columns, strict=True)
        return pa.RecordBatch.from_arrays(
            [array if name == source else column for name, column in named], schema=self.schema
        )


def _column(name: str, kind: str, source: str, store: str) -> ArrowColumn:
    """Describe a column of a store for the kernel; `kind` is Spark's short type name."""
    if source in ("store", "store_name"):
        text = store if source == "store" else store.rsplit("/", 1)[-1]
        return ArrowColumn(name, ARROW[kind], arrow.SAME, text=text.encode())
    if source in _MADE:
        how, of = _MADE[source]
        return ArrowColumn(name, ARROW[kind], how, of, nulls=source == "tag")
    return ArrowColumn(name, ARROW[kind], _NUMBERS[kind], _DECODED.get(source, source))


def _plain(bodies: pa.Array, flags: NDArray[np.int32], offsets: NDArray[np.int64], store: str) -> Iterator[pa.Array]:
    """Decompress bodies in arrays of bounded size: a few bytes may expand to any length."""
    found: list[bytes] = []
    size = 0
    for body, flag, offset in zip(bodies.to_pylist(), flags.tolist(), offsets.tolist(), strict=True):
        try:
            plain = plain_body(body, flag)
        except BadMessageError as error:
            raise BadMessageError(
                f"{store}: log position {offset:,}: {error}; plainBodies=false reads bodies as they are stored"
            ) from None
        if found and size + len(plain) > PLAIN_BYTES:
            yield pa.array(found, pa.binary())
            found, size = [], 0
        found.append(plain)
        size += len(plain)
    yield pa.array(found, pa.binary())


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
