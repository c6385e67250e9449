"""Settings and end of small sessions; rows as a task reads them, and the engine's own view."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from mqproc.spark.batches import read_partition
from mqproc.spark.options import ReadOptions, column_types, read_options
from mqproc.spark.partitions import LogPartition
from mqproc.spark.planning import plan
from mqproc.store.read.reader import StoreReader
from mqproc.types import StoredMessage

# Sessions are short: little memory, few partitions, no code generation.
JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
SETTINGS: Final[dict[str, str]] = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    "spark.driver.maxResultSize": "16m",
    # Compiling small queries takes longer than running them.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
}
JAVA_EXIT_S: Final = 60.0


def end_session() -> None:
    """Stop the running session, if any, and its Java; the next session starts another."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    context, gateway = SparkContext._active_spark_context, SparkContext._gateway
    session = SparkSession._instantiatedSession
    if gateway is None:
        return
    try:
        if session is not None:
            session.stop()
        elif context is not None:
            context.stop()
        gateway.shutdown()
    finally:
        # Also when Java has ended by itself and nothing could be stopped.
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = None
        # Java exits when its input ends.
        gateway.proc.stdin.close()
        try:
            gateway.proc.wait(JAVA_EXIT_S)
        except subprocess.TimeoutExpired:
            gateway.proc.kill()
            gateway.proc.wait()


Row = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def options_of(path: Path | str, **given: Any) -> ReadOptions:
    """Options as a user passes them: `failOnDataLoss=False`, `splitBytes=4096`."""
    return read_options({"path": str(path), **{name: str(value) for name, value in given.items()}})


def partitions_of(path: Path | str, **given: Any) -> list[LogPartition]:
    return plan(options_of(path, **given))


def rows_in(partition: LogPartition) -> int:
    """Messages in the slices of a partition."""
    return sum(len(queue_slice) for _store, queue_slice in partition.slices)


def rows_of(path: Path | str, names: Sequence[str] = (), **given: Any) -> list[Row]:
    """All rows of a read, ordered by log position."""
    options = options_of(path, **given)
    columns = list(names or options.columns or column_types(options.naming))
    found: list[Row] = []
    for partition in plan(options):
        for batch in read_partition(options, columns, partition):
            batch.validate(full=True)
            found += batch.to_pylist()
    return sorted(found, key=lambda row: (row.get("store") or "", row.get("physical_offset") or 0))


def offsets_of(path: Path | str, **given: Any) -> list[int]:
    """Log positions of the messages of a read."""
    return [row["physical_offset"] for row in rows_of(path, ["physical_offset"], **given)]


def messages_of(path: Path | str, **values: Any) -> list[StoredMessage]:
    """Messages with these field values from the engine's own reader, ordered by log position."""
    with StoreReader(path) as reader:
        found = [each for each in reader.messages() if all(getattr(each, name) == values[name] for name in values)]
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


def files_below(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a folder, by relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
