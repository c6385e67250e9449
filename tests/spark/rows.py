"""Read a store as a Spark task does, without Spark; the engine's own view for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mqproc.spark.batches import read_partition
from mqproc.spark.options import ReadOptions, column_types, read_options
from mqproc.spark.partitions import LogPartition
from mqproc.spark.planning import plan
from mqproc.store.read.reader import StoreReader
from mqproc.types import StoredMessage

Row = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def options_of(path: Path | str, **given: Any) -> ReadOptions:
    """Options as a user passes them: `failOnDataLoss=False`, `splitBytes=4096`."""
    return read_options({"path": str(path), **{name: str(value) for name, value in given.items()}})


def partitions_of(path: Path | str, **given: Any) -> list[LogPartition]:
    return plan(options_of(path, **given))


def rows_of(path: Path | str, names: Sequence[str] = (), **given: Any) -> list[Row]:
    """All rows of a read, ordered by log position."""
    options = options_of(path, **given)
    wanted = list(names or options.columns or column_types(options.naming))
    found: list[Row] = []
    for partition in plan(options):
        for batch in read_partition(options, wanted, partition):
            batch.validate(full=True)
            found += batch.to_pylist()
    return sorted(found, key=lambda row: (row.get("store") or "", row.get("physical_offset") or 0))


def offsets_of(path: Path | str, **given: Any) -> list[int]:
    """Log positions of the messages of a read."""
    return [row["physical_offset"] for row in rows_of(path, ["physical_offset"], **given)]


def messages_of(path: Path | str, **wanted: Any) -> list[StoredMessage]:
    """Messages with these field values from the engine's own reader, ordered by log position."""
    with StoreReader(path) as reader:
        found = [each for each in reader.messages() if all(getattr(each, name) == wanted[name] for name in wanted)]
    return sorted(found, key=lambda message: message.physical_offset)


def row_of(message: StoredMessage, store: Path) -> Row:
    """The expected row of a message."""
    row: Row = {name: getattr(message, name, None) for name in column_types("mqproc")}
    row |= {"store": str(store), "tag": message.tag or None, "keys": list(message.keys)}
    row |= {"properties": sorted(message.properties.items())}
    for name in ("born_timestamp", "store_timestamp"):
        row[name] = EPOCH + timedelta(milliseconds=getattr(message, f"{name}_ms"))
    return row


def comparable(row: Row) -> Row:
    """A row with its properties sorted."""
    return row | {"properties": sorted(dict(row["properties"]).items())}
