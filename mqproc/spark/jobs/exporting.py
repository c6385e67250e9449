"""Messages as Parquet, a folder for each topic and day: what other tools read, and what outlives retention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.errors import BadRequestError
from mqproc.spark.api import flags_of, messages
from mqproc.spark.jobs.targets import check_sources, write_parquet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODES: Final = ("error", "append", "overwrite")
_DAY_S: Final = 86_400
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

    A task writes a file for each topic and day that its part of the log has. `mode` is what to do when there is
    something at `to` already; `columns` are those to write, all if none are named; `selection` as in `messages`.
    Raises BadRequestError for another mode or compression, for `topic` as the only column, which is the folders', and
    for a target in a store or around one.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    columns = [columns] if isinstance(columns, str) else columns
    for name, value, allowed in (("mode", mode, MODES), ("compression", compression, COMPRESSIONS)):
        if value not in allowed:
            raise BadRequestError(f"{name} = {value!r}; there are {', '.join(allowed)}")
    if set(columns) == {"topic"}:
        raise BadRequestError("columns = topic: folders are named by it, and their files need another column")
    stores = check_sources(path, fail_on_data_loss=flags_of(selection).fail_on_data_loss)
    wanted = list(dict.fromkeys([*columns, "topic", "store_timestamp", "size"])) if columns else []
    found = messages(spark, path, columns=wanted, **selection)
    # Told by the write itself; a count before it would read everything twice.
    seen = Observation()
    measured = found.observe(seen, F.count(F.lit(1)).alias("messages"), F.sum("size").alias("bytes"))
    # By the number of the day: a detour over the session's zone is wrong for hours around a change of its clocks.
    day = F.date_from_unix_date(F.floor(F.unix_seconds("store_timestamp") / F.lit(_DAY_S)).cast("int"))
    dated = measured.withColumn("day", day)
    if columns:
        dated = dated.select(*dict.fromkeys([*columns, "topic", "day"]))
    write_parquet(dated, to, stores, mode=mode, compression=compression, by=("topic", "day"))
    return Exported(int(seen.get["messages"]), int(seen.get["bytes"] or 0))
