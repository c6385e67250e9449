"""Messages as Parquet, a folder for each topic and day: what other tools read, and what outlives retention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from mqproc.errors import BadRequestError
from mqproc.spark.api import flags_of, planned_messages
from mqproc.spark.columns import MQPROC
from mqproc.spark.jobs.parquet_files import Layout
from mqproc.spark.jobs.targets import check_sources, write_batches
from mqproc.spark.mapped import BatchRead, Read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODES: Final = ("error", "append", "overwrite")
# Of a moment the time in UTC.
_UTC: Final = pa.timestamp("us")
COMPRESSIONS: Final = ("zstd", "snappy", "gzip", "lz4", "none")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: messages, and the bytes that their records have in the log."""

    messages: int
    size: int


def export(
    spark: SparkSession,
    path: str | Path | Sequence[str | Path],
    to: str | Path,
    *,
    mode: str = "error",
    compression: str = "zstd",
    columns: str | Sequence[str] = (),
    **selection: Any,
) -> Exported:
    """Write messages to `to`, a folder or URL: `to/topic=orders/day=2026-01-31/….parquet`, days in UTC by store time.

    A task writes a file for each topic and day that its part of the log has, more where it has very many. `mode` is
    what to do when there is something at `to` already; `columns` are those to write, all if none are named; `selection`
    as in `messages`. Raises BadRequestError for another mode or compression, for `topic` as the only column, which is
    the folders', for a target in a store or around one, and for one that is there in mode `error`.
    """
    columns = [columns] if isinstance(columns, str) else columns
    for name, value, allowed in (("mode", mode, MODES), ("compression", compression, COMPRESSIONS)):
        if value not in allowed:
            raise BadRequestError(f"{name} = {value!r}; there are {', '.join(allowed)}")
    if set(columns) == {"topic"}:
        raise BadRequestError("columns = topic: folders are named by it, and their files need another column")
    stores = check_sources(path, fail_on_data_loss=flags_of(selection).fail_on_data_loss)
    wanted = list(columns) or list(MQPROC)
    found = planned_messages(
        spark, path, **selection | {"columns": list(dict.fromkeys([*wanted, "topic", "store_timestamp", "size"]))}
    )
    dated = BatchRead(found.frame, _dated(found.read), {**found.types, "day": "date"})
    layout = Layout(list(dict.fromkeys(wanted)), ("topic", "day"), compression)
    done = write_batches(dated, to, stores, mode=mode, layout=layout)
    return Exported(done.messages, done.size)


def _dated(read: Read) -> Read:
    """Batches with the day of each message, which no session's zone has a part in."""

    def dated(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in read(batches):
            yield batch.append_column("day", batch.column("store_timestamp").cast(_UTC).cast(pa.date32()))

    return dated
