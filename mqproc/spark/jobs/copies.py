"""Copy messages to Parquet: by topic and day (export), or the last of each key (compact).

    log ──keys, times, positions──▶ last position of each key ──by store and position──▶ records read there ──▶ rows

Compaction shuffles only keys, times and positions; bodies are read once, of the messages that stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.kernels import record_decode
from mqproc.paths import segment_name
from mqproc.spark.batch_read import BatchRead, flags_of, keys_of, messages, plan_messages
from mqproc.spark.batches import BatchMaker
from mqproc.spark.jobs.output import check_sources, write_batches
from mqproc.spark.jobs.parquet_files import Layout
from mqproc.spark.options import MQPROC_COLUMNS, PathArgument, check_column_names, path_texts
from mqproc.spark.record_reader import FoundRecords
from mqproc.spark.segment_bytes import open_segment
from mqproc.spark.survey import find_stores, survey_store
from mqproc.util.units import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MODES: Final = ("error", "append", "overwrite")
COMPRESSIONS: Final = ("zstd", "snappy", "gzip", "lz4", "none")


@dataclass(frozen=True, slots=True)
class Exported:
    """Messages written, and bytes of their records in the log."""

    messages: int
    size: int


def export(
    spark: SparkSession,
    path: PathArgument,
    to: str | Path,
    *,
    mode: str = "error",
    compression: str = "zstd",
    columns: str | Sequence[str] = (),
    **selection: Any,
) -> Exported:
    """Write messages to `to/topic=orders/day=2026-01-31/….parquet`, days in UTC by store time.

    A task writes a file for each topic and day in its part of the log, several when there are very many. `mode` applies
    to an existing target; `columns` are those to write (default: all); `selection` as in `messages`. Raises
    BadRequestError for an unknown mode or compression, for `topic` as the only column, for a target that overlaps a
    store, and for an existing one in mode `error`.
    """
    columns = [columns] if isinstance(columns, str) else columns
    for name, value, allowed in (("mode", mode, MODES), ("compression", compression, COMPRESSIONS)):
        if value not in allowed:
            raise BadRequestError(f"{name} = {value!r}; must be one of {', '.join(allowed)}")
    if set(columns) == {"topic"}:
        raise BadRequestError("columns = topic: it names the folders, so their files need another column")
    stores = check_sources(path, fail_on_data_loss=flags_of(selection).fail_on_data_loss)
    selected = list(dict.fromkeys(columns)) or list(MQPROC_COLUMNS)
    read_columns = list(dict.fromkeys([*selected, "topic", "store_timestamp", "size"]))
    found = plan_messages(spark, path, **selection | {"columns": read_columns})
    read_messages = found.read

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in read_messages(batches):
            # In UTC, whatever the session's time zone.
            day = batch.column("store_timestamp").cast(pa.timestamp("us")).cast(pa.date32())
            yield batch.append_column("day", day)

    dated = BatchRead(found.frame, read, {**found.types, "day": "date"})
    layout = Layout(selected, ("topic", "day"), compression)
    done = write_batches(dated, to, stores, mode=mode, layout=layout)
    return Exported(done.messages, done.size)


# Compaction

# Records that are read together lie within this many bytes, and have at most this many, as a batch is limited.
_SPAN_BYTES: Final = 16 << 20
# Each task reads 2^28 bytes of log.
_TASK_BITS: Final = 28


def compact(
    spark: SparkSession,
    path: PathArgument,
    *,
    drop_empty: bool = False,
    columns: str | Sequence[str] = (),
    **selection: Any,
) -> DataFrame:
    """The last stored message of each topic and key over all stores.

    Rows have `key` and the columns of `messages`. A message with several keys appears for each of which it is the last;
    with a selection by `key`, only for selected keys. With `drop_empty`, a last message with an empty body deletes its
    key. Within a millisecond the later position in the log is the last; between stores their names decide.
    """
    return plan_compaction(spark, path, drop_empty=drop_empty, columns=columns, **selection).rows()


def plan_compaction(
    spark: SparkSession,
    path: PathArgument,
    *,
    drop_empty: bool,
    columns: str | Sequence[str],
    **selection: Any,
) -> BatchRead:
    """The read behind `compact`: the positions of records, in order, and the reader of these."""
    from pyspark.sql import functions as F

    columns = [columns] if isinstance(columns, str) else columns
    selected = list(dict.fromkeys(columns)) or list(MQPROC_COLUMNS)
    check_column_names("mqproc", selected)
    flags = flags_of(selection)
    if flags.verify_crc is None:
        # Only the scan of the log can detect damaged bodies; a read at known positions cannot distinguish them.
        selection["verifyCrc"] = "body" in selected
    names = ["store", "topic", "keys", "store_timestamp", "physical_offset", "size"]
    keyed = messages(spark, path, columns=names, **selection).withColumn("key", F.explode("keys"))
    if chosen := keys_of(selection.get("key", ())):
        # Messages may have other keys, of which unselected messages may be the last.
        keyed = keyed.where(F.col("key").isin(list(chosen)))
    last = F.max(F.struct("store_timestamp", "store", "physical_offset", "size")).alias("last")
    last_rows = keyed.groupBy("topic", "key").agg(last).select("key", "last.store", "last.physical_offset", "last.size")
    part = F.shiftright("physical_offset", _TASK_BITS)
    ordered = last_rows.repartition("store", part).sortWithinPartitions("store", "physical_offset")
    sizes: dict[str, int] = {}
    for uri in find_stores(path_texts(path)):
        with closing(survey_store(uri)) as found:
            sizes[uri] = found.segment_size
    reader = PositionReader(
        sizes,
        selected,
        drop_empty=drop_empty,
        fail_on_data_loss=flags.fail_on_data_loss,
        plain_bodies=flags.plain_bodies,
    )
    return BatchRead(ordered, reader.read, {"key": "string", **{name: MQPROC_COLUMNS[name] for name in selected}})


@dataclass(frozen=True)
class PositionReader:
    """Reads records at known positions, ordered by store and position."""

    segment_sizes: Mapping[str, int]
    names: Sequence[str]
    drop_empty: bool
    fail_on_data_loss: bool
    plain_bodies: bool = False

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Turn batches of `key`, `store`, `physical_offset`, `size` into messages by `key`."""
        for batch in batches:
            offsets = batch.column("physical_offset").to_numpy()
            stores = batch.column("store").dictionary_encode()
            numbers = stores.indices.to_numpy()
            at = 0
            while at < len(offsets):
                store = stores.dictionary[int(numbers[at])].as_py()
                size = self.segment_sizes[store]
                base = int(offsets[at]) // size * size
                same = (numbers == numbers[at]) & (offsets < base + size)
                stop = at + int(np.argmin(same[at:])) if not same[at:].all() else len(offsets)
                yield from self._of_segment(store, base, size, batch.slice(at, stop - at))
                at = stop

    def _of_segment(self, store: str, base: int, segment_size: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The records of one segment, in batches of bounded size."""
        maker = BatchMaker("mqproc", self.names, store, plain_bodies=self.plain_bodies)
        positions = batch.column("physical_offset").to_numpy() - base
        sizes = batch.column("size").to_numpy()
        ends, sums = positions + sizes, np.cumsum(sizes)
        try:
            with closing(open_segment(store, base, segment_size, segment_size)) as segment:
                at = 0
                while at < len(positions):
                    # A message with several keys appears several times.
                    rows = int(np.searchsorted(sums, sums[at] - sizes[at] + _SPAN_BYTES, "right"))
                    stop = max(at + 1, min(rows, int(np.searchsorted(ends, positions[at] + _SPAN_BYTES))))
                    view, first = segment.part(int(positions[at]), int(ends[stop - 1]))
                    found = FoundRecords(view, positions[at:stop] - first)
                    yield from self._with_keys(batch.slice(at, stop - at), found, maker)
                    at = stop
        except FileNotFoundError:
            if self.fail_on_data_loss:
                raise CorruptStoreError(
                    f"{store}/commitlog/{segment_name(base)}: deleted since its keys were read, and "
                    f"{counted(len(positions), 'last message')} with it; failOnDataLoss=false leaves them out"
                ) from None

    def _with_keys(self, batch: pa.RecordBatch, found: FoundRecords, maker: BatchMaker) -> Iterator[pa.RecordBatch]:
        """The records with each row's `key`; with `drop_empty` only those with a body."""
        at, count = 0, len(found.positions)
        for made in maker.batches(found):
            rows = slice(at, at + made.num_rows)
            keys = batch.column("key")[rows]
            with_keys = pa.RecordBatch.from_arrays([keys, *made.columns], ["key", *made.schema.names])
            if self.drop_empty:
                places = record_decode.places_at(found.view, found.positions, record_decode.rows_of(["body"]))
                sizes = places[record_decode.BODY_SIZE * count : (record_decode.BODY_SIZE + 1) * count]
                with_keys = with_keys.filter(pa.array(sizes[rows] > 0))
            yield with_keys
            at = rows.stop
