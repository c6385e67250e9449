"""`mqproc spark verify`, `duplicates` and `lag`: what is wrong, what is there twice, what is not consumed yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mqproc.cli.commands import SECONDS, SIZE, Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column
from mqproc.cli.spark_session import (
    check_spans,
    paths_of,
    selection_of,
    selection_options,
    session,
    show,
    spark_options,
    write_rows,
)
from mqproc.cli.store_verify import EXIT_DAMAGE, FINDING_COLUMNS

_STORES = [
    Column("store"),
    Column("clean"),
    *(Column(name, kind="count") for name in ("records", "units", "index_entries", "queues", "damage", "notes")),
    Column("bytes", kind="bytes"),
]
_DUPLICATES = [
    Column("topic"),
    Column("unique_id"),
    Column("copies", kind="count"),
    Column("stores", kind="count"),
    Column("first_stored_ms", "first", "time_ms"),
    Column("last_stored_ms", "last", "time_ms"),
]
_LAG = [
    *(Column(name) for name in ("store", "group", "topic")),
    Column("queue_id", "queue", "number"),
    *(Column(name, kind="count") for name in ("offset", "max_offset", "behind", "expired")),
    Column("oldest_stored_ms", "oldest", "time_ms"),
]
_BACKLOG = [
    *(Column(name) for name in ("store", "group", "topic")),
    Column("window_start_ms", "from", "time_ms"),
    Column("window_end_ms", "to", "time_ms"),
    Column("messages", kind="count"),
    Column("bytes", kind="bytes"),
]
_to = click.option("--to", type=click.Path(path_type=Path), metavar="DIR", help="Append all rows there, as Parquet.")
_limit = click.option(
    "--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Print so many rows."
)


@click.command(cls=Command)
@spark_options
@click.option("--share", type=SIZE, default="256MiB", show_default=True, help="A task looks at so much of a log.")
@_to
@_limit
@pass_invocation
def verify(
    invocation: Invocation,
    stores: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
    share: int,
    to: Path | None,
    limit: int,
) -> int:
    """Verify many stores, or large ones, in parallel.

    STORE is a folder or a pattern. What is looked at, and what a finding means, is as in mqproc store verify: sizes and
    CRCs of records, queues and index against the log and back, gaps, places that two records have. A row a store, then
    the findings. The exit code is 1 when a store is damaged.
    """
    paths = paths_of(invocation, stores)
    with session(master, conf) as spark:
        from pyspark import StorageLevel
        from pyspark.sql import functions as F

        from mqproc.spark import jobs
        from mqproc.spark.jobs.folders import local_stores
        from mqproc.spark.jobs.targets import check_target

        folders = [str(folder) for folder in local_stores(paths)]
        if to is not None:
            # Before the stores are verified, which may take hours.
            check_target(to, folders)
        # Kept, since it is looked at three times.
        found = jobs.verify(spark, paths, share_bytes=share).persist(StorageLevel.DISK_ONLY)
        [(damaged, listed_count)] = found.agg(F.expr("count_if(not clean)"), F.sum(F.size("findings"))).collect()
        if to is not None:
            write_rows(invocation.out, found.orderBy("store"), to, folders)
            return EXIT_DAMAGE if damaged else 0
        if invocation.out.is_json:
            show(invocation.out, "stores", _STORES, found.orderBy("store"), limit)
            return EXIT_DAMAGE if damaged else 0
        show(invocation.out, "stores", _STORES, found.orderBy("store").drop("findings"), limit)
        listed = found.select("store", F.explode("findings").alias("finding")).select("store", "finding.*")
        if listed_count:
            invocation.out.line("")
            columns = [Column("store"), *FINDING_COLUMNS]
            show(invocation.out, "findings", columns, listed.orderBy("store", "severity", "kind", "file"), limit)
        return EXIT_DAMAGE if damaged else 0


@click.command(cls=Command)
@spark_options
@selection_options
@_to
@_limit
@pass_invocation
def duplicates(
    invocation: Invocation,
    /,
    stores: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
    to: Path | None,
    limit: int,
    **chosen: Any,
) -> int:
    """Find messages that are stored more than once.

    Messages of one topic with one unique id (UNIQ_KEY), in one store or in several: a producer that sent again after a
    lost answer made them. The exit code is 1 when there are any.
    """
    paths = paths_of(invocation, stores)
    with session(master, conf) as spark:
        from pyspark.sql import functions as F

        from mqproc.spark import jobs
        from mqproc.spark.jobs.targets import check_sources

        found = jobs.duplicates(spark, paths, **selection_of(chosen))
        for name in ("first_stored", "last_stored"):
            found = found.withColumn(name, F.unix_millis(name)).withColumnRenamed(name, f"{name}_ms")
        ordered = found.orderBy(F.desc("copies"), "topic", "unique_id")
        if to is not None:
            write_rows(invocation.out, ordered, to, check_sources(paths, fail_on_data_loss=not chosen["skip_damage"]))
            return 0
        return EXIT_DAMAGE if show(invocation.out, "duplicates", _DUPLICATES, ordered, limit) else 0


@click.command(cls=Command)
@spark_options
@click.option("--window", type=SECONDS, metavar="SPAN", help="By when what is not consumed was stored: 1h, 1d.")
@_to
@_limit
@pass_invocation
def lag(
    invocation: Invocation,
    stores: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
    window: float | None,
    to: Path | None,
    limit: int,
) -> None:
    """Show how far consumer groups are behind, and since when.

    Each group's progress against its queues: messages that are not consumed, such as expired before they were, and when
    the oldest one was stored. Run with the same --to now and then, the rows there tell lag over time (seen_at). With
    --window the messages themselves are counted, by the time at which they were stored.
    """
    paths = paths_of(invocation, stores)
    check_spans(window)
    with session(master, conf) as spark:
        from pyspark.sql import functions as F

        from mqproc.spark import jobs
        from mqproc.spark.jobs.targets import check_sources

        if window is None:
            found = jobs.lag(spark, paths)
        else:
            found = jobs.backlog(spark, paths, window=f"{round(window * 1000)} milliseconds")
        if to is not None:
            write_rows(invocation.out, found, to, check_sources(paths, fail_on_data_loss=False))
        elif window is None:
            found = found.withColumn("oldest_stored_ms", F.unix_millis("oldest_stored"))
            found = found.drop("oldest_stored", "seen_at").orderBy(F.desc("behind"), "store", "group", "topic")
            if not show(invocation.out, "lag", _LAG, found, limit):
                invocation.out.note(f"no group has consumed anything in {' '.join(paths)}")
        else:
            for name in ("window_start", "window_end"):
                found = found.withColumn(name, F.unix_millis(name)).withColumnRenamed(name, f"{name}_ms")
            found = found.orderBy("store", "group", "topic", "window_start_ms")
            if not show(invocation.out, "backlog", _BACKLOG, found, limit):
                invocation.out.note(f"nothing is left to any group in {' '.join(paths)}")
