"""The commands of `mqproc spark`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqproc.cli.options import SECONDS, SIZE, Command, Invocation, pass_invocation, replay_options
from mqproc.cli.output import OutputColumn
from mqproc.cli.spark.session import (
    check_spans,
    needing_spark,
    paths_of,
    selection_of,
    selection_options,
    session,
    show,
    spark_options,
    write_rows,
)
from mqproc.cli.store.verify import EXIT_DAMAGE, FINDING_COLUMNS
from mqproc.errors import BadRequestError, ConfigurationError
from mqproc.util.units import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BY = ("store", "topic", "queue_id", "tag", "key")
_MEASURES = [
    OutputColumn("messages", kind="count"),
    OutputColumn("bytes", kind="bytes"),
    *(OutputColumn(f"latency_ms_{each}", f"latency {each} ms", "number") for each in ("mean", "p50", "p99", "max")),
]


@click.command(cls=Command)
@spark_options
@selection_options
@click.option(
    "--by", multiple=True, type=click.Choice(_BY), default=("topic",), show_default=True, help="Group by these."
)
@click.option("--window", type=SECONDS, metavar="SPAN", help="Also group by time windows of this length: 1h, 15m.")
@click.option(
    "--slide", type=SECONDS, metavar="SPAN", help="Distance between the starts of windows.  [default: their length]"
)
@click.option(
    "--time", type=click.Choice(["store", "born"]), default="store", show_default=True, help="Time of the windows."
)
@click.option("--no-latencies", is_flag=True, help="Count only messages and bytes, which is faster.")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw a plot to FILE: .png, .svg, .pdf or .html."
)
@click.option("--to", type=click.Path(path_type=Path), metavar="DIR", help="Write all rows as Parquet to a new folder.")
@click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="Print at most N rows.",
)
@pass_invocation
def counts(
    invocation: Invocation,
    /,
    stores: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
    by: tuple[str, ...],
    window: float | None,
    slide: float | None,
    time: str,
    no_latencies: bool,
    plot: Path | None,
    to: Path | None,
    limit: int,
    **chosen: Any,
) -> None:
    """Count messages, bytes and latencies by topic, tag, key and time.

    STORE is a folder, a pattern or a URL; several stores are counted together unless grouped by --by store. The latency
    of a message is its store time minus its born time. A message with several keys counts for each key. A plot shows
    the largest groups.
    """
    by = tuple(dict.fromkeys(by))
    paths = paths_of(invocation, stores)
    # Check the options before Spark is started.
    check_spans(window, slide)
    _check_outputs(invocation, plot, to)
    with session(master, conf) as spark:
        from mqproc.spark import jobs
        from mqproc.spark.jobs.targets import check_sources

        found = jobs.counts(
            spark,
            paths,
            by=by,
            window=_span(window),
            slide=_span(slide),
            time=f"{time}_timestamp",
            latencies=not no_latencies,
            **selection_of(chosen),
        )
        if plot is not None:
            from mqproc.spark.jobs.counting import plot_counts

            plot_counts(found, by, plot, slide_s=slide)
            invocation.out.note(f"plot written to {plot}")
            return
        ordered = _ordered(found, by, window)
        if to is not None:
            sources = check_sources(paths, fail_on_data_loss=not chosen["skip_damage"])
            write_rows(invocation.out, ordered, to, sources, mode="error")
            return
        if not show(invocation.out, "counts", _columns(by, window, no_latencies), ordered, limit):
            # A missing topic is not an error: a store may have lost its queues.
            invocation.out.note(f"no selected messages in {' '.join(paths)}")


def _check_outputs(invocation: Invocation, plot: Path | None, to: Path | None) -> None:
    if to is not None and to.exists():
        # The rows of a second run would double all sums.
        raise BadRequestError(f"{to}: already exists; counts are written to a new folder")
    if plot is None:
        return
    for is_given, name in ((to is not None, "--to"), (invocation.out.is_json, f"--output {invocation.output}")):
        if is_given:
            raise click.UsageError(f"--plot and {name}: choose one")
    with needing_spark():
        from mqproc.spark.jobs.counting import check_plot
    check_plot(plot)


def _span(seconds: float | None) -> str:
    """A duration for Spark, "" for none."""
    return "" if seconds is None else f"{round(seconds * 1000)} milliseconds"


def _columns(by: tuple[str, ...], window: float | None, no_latencies: bool) -> list[OutputColumn]:
    columns = [OutputColumn(name, "queue" if name == "queue_id" else "") for name in by]
    if window is not None:
        columns += [OutputColumn("window_start_ms", "from", "time_ms"), OutputColumn("window_end_ms", "to", "time_ms")]
    return columns + (_MEASURES[:2] if no_latencies else _MEASURES)


def _ordered(found: DataFrame, by: tuple[str, ...], window: float | None) -> DataFrame:
    from pyspark.sql import functions as F

    if window is None:
        return found.orderBy(F.desc("messages"), *by)
    for name in ("window_start", "window_end"):
        found = found.withColumn(name, F.unix_millis(name)).withColumnRenamed(name, f"{name}_ms")
    return found.orderBy(F.asc_nulls_last("window_start_ms"), *by)


# Verify, duplicates, lag


_STORES = [
    OutputColumn("store"),
    OutputColumn("clean"),
    *(OutputColumn(name, kind="count") for name in ("records", "units", "index_entries", "queues", "damage", "notes")),
    OutputColumn("bytes", kind="bytes"),
]
_DUPLICATES = [
    OutputColumn("topic"),
    OutputColumn("unique_id"),
    OutputColumn("copies", kind="count"),
    OutputColumn("stores", kind="count"),
    OutputColumn("first_stored_ms", "first", "time_ms"),
    OutputColumn("last_stored_ms", "last", "time_ms"),
]
_LAG = [
    *(OutputColumn(name) for name in ("store", "group", "topic")),
    OutputColumn("queue_id", "queue", "number"),
    *(OutputColumn(name, kind="count") for name in ("offset", "max_offset", "behind", "expired")),
    OutputColumn("oldest_stored_ms", "oldest", "time_ms"),
]
_BACKLOG = [
    *(OutputColumn(name) for name in ("store", "group", "topic")),
    OutputColumn("window_start_ms", "from", "time_ms"),
    OutputColumn("window_end_ms", "to", "time_ms"),
    OutputColumn("messages", kind="count"),
    OutputColumn("bytes", kind="bytes"),
]
_to = click.option("--to", type=click.Path(path_type=Path), metavar="DIR", help="Append all rows as Parquet to DIR.")
_limit = click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="Print at most N rows.",
)


@click.command(cls=Command)
@spark_options
@click.option("--share", type=SIZE, default="256MiB", show_default=True, help="Log bytes per task.")
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

    STORE is a folder or a pattern. The checks are those of mqproc store verify: sizes and CRCs of records, queues and
    index against the log and vice versa, gaps, offsets used twice. Prints a row per store, then the findings. The exit
    code is 1 if a store is damaged.
    """
    paths = paths_of(invocation, stores)
    with session(master, conf) as spark:
        from pyspark import StorageLevel
        from pyspark.sql import functions as F

        from mqproc.spark import jobs
        from mqproc.spark.jobs.targets import check_target
        from mqproc.spark.jobs.tasks import local_stores

        folders = [str(folder) for folder in local_stores(paths)]
        if to is not None:
            # Checked first, as verification may take hours.
            check_target(to, folders)
        # Persisted, as it is used three times.
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
            columns = [OutputColumn("store"), *FINDING_COLUMNS]
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

    Duplicates have the same topic and unique id (UNIQ_KEY), in one store or several. A producer creates them when it
    sends again after a lost answer. The exit code is 1 if there are any.
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
@click.option(
    "--window", type=SECONDS, metavar="SPAN", help="Count unconsumed messages by windows of store time: 1h, 1d."
)
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
    """Show the lag of consumer groups, in messages and time.

    Compares the committed offsets of each group with its queues: unconsumed messages, those that expired unconsumed,
    and the store time of the oldest one. Repeated runs with the same --to record the lag over time (column seen_at).
    With --window the unconsumed messages are counted by store time.
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
                invocation.out.note(f"no group has committed offsets in {' '.join(paths)}")
        else:
            for name in ("window_start", "window_end"):
                found = found.withColumn(name, F.unix_millis(name)).withColumnRenamed(name, f"{name}_ms")
            found = found.orderBy("store", "group", "topic", "window_start_ms")
            if not show(invocation.out, "backlog", _BACKLOG, found, limit):
                invocation.out.note(f"no group has unconsumed messages in {' '.join(paths)}")


# Rebuild


EXIT_INCOMPLETE = 1
_QUEUES = [
    OutputColumn("topic"),
    OutputColumn("queue_id", "queue", "number"),
    *(
        OutputColumn(name, kind="count")
        for name in ("min_offset", "max_offset", "units", "fillers", "missing", "repeated")
    ),
]


@click.command(cls=Command)
@spark_options
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A new or an empty folder.")
@click.option("--skip-damage", is_flag=True, help="Skip damage in the log instead of failing.")
@click.option("--share", type=SIZE, default="256MiB", show_default=True, help="Log bytes per task.")
@click.option(
    "--limit",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="Print at most N rows.",
)
@pass_invocation
def rebuild(
    invocation: Invocation,
    stores: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
    to: Path,
    skip_damage: bool,
    share: int,
    limit: int,
) -> int:
    """Rebuild queues and index from a store's log, in parallel.

    STORE is one folder, which is read-only. The results in DIR/consumequeue and DIR/index can replace those of the
    stopped store. Prints a row per queue. The exit code is 1 if offsets are missing or used twice.
    """
    if len(stores) > 1:
        raise click.UsageError("one store at a time")
    (store,) = paths_of(invocation, stores)
    with session(master, conf) as spark:
        from pyspark.sql import functions as F

        from mqproc.spark import jobs

        built = jobs.rebuild(spark, store, to, share_bytes=share, fail_on_data_loss=not skip_damage)
        show(invocation.out, "queues", _QUEUES, built.queues.orderBy("topic", "queue_id"), limit)
        sums = built.queues.agg(F.count(F.lit(1)), F.sum("units"), F.sum(F.expr("missing + repeated"))).first()
        files = built.index.agg(F.count(F.lit(1)), F.sum("entries")).first()
        built.unpersist()
    queues, units, wrong = (int(each or 0) for each in sums or (0, 0, 0))
    names, entries = (int(each or 0) for each in files or (0, 0))
    made = f"{counted(units, 'unit')} of {counted(queues, 'queue')}"
    invocation.out.note(f"{made}, {counted(entries, 'entry')} in {counted(names, 'index file')}: {to}")
    return EXIT_INCOMPLETE if wrong else 0


# Export, compact, replay


_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
_MODES = ("error", "append", "overwrite")


def _copy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a Parquet target; the command gets `to`, and the others in `chosen`."""
    for option in (
        click.option("--column", "columns", multiple=True, metavar="NAME", help="Only these columns; may be repeated."),
        click.option(
            "--compression",
            type=click.Choice(_COMPRESSIONS),
            default="zstd",
            show_default=True,
            help="Compression of Parquet.",
        ),
        click.option(
            "--mode",
            type=click.Choice(_MODES),
            default="error",
            show_default=True,
            help="If the target exists.",
        ),
        click.option("--to", required=True, metavar="DIR|URL", help="Target folder or URL."),
    ):
        function = option(function)
    return function


@click.command(cls=Command)
@spark_options
@selection_options
@_copy_options
@pass_invocation
def export(
    invocation: Invocation,
    /,
    stores: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
    to: str,
    **chosen: Any,
) -> None:
    """Write messages as Parquet, by topic and day.

    DIR/topic=…/day=…/ contains the messages stored on that day, in UTC. STORE is a folder, a pattern or a URL.
    """
    paths = paths_of(invocation, stores)
    with session(master, conf) as spark:
        from mqproc.spark import jobs

        done = jobs.export(
            spark,
            paths,
            to,
            mode=chosen["mode"],
            compression=chosen["compression"],
            columns=chosen["columns"],
            **selection_of(chosen),
        )
    fields = {"to": to, "messages": done.messages, "bytes": done.size}
    invocation.out.fields(
        [OutputColumn("to"), OutputColumn("messages", kind="count"), OutputColumn("bytes", kind="bytes")], fields
    )


@click.command(cls=Command)
@spark_options
@selection_options
@_copy_options
@click.option("--drop-empty", is_flag=True, help="Omit keys whose last message has no body: they were deleted.")
@pass_invocation
def compact(
    invocation: Invocation,
    /,
    stores: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
    to: str,
    drop_empty: bool,
    **chosen: Any,
) -> None:
    """Write the last message of each key as Parquet.

    Writes the last stored message of each topic and key, over all stores; messages without a key are omitted.
    """
    paths = paths_of(invocation, stores)
    with session(master, conf) as spark:
        from mqproc.spark.jobs.copies import plan_compaction
        from mqproc.spark.jobs.parquet_files import Layout
        from mqproc.spark.jobs.targets import check_sources, write_batches

        sources = check_sources(paths, fail_on_data_loss=not chosen["skip_damage"])
        last = plan_compaction(
            spark,
            paths,
            drop_empty=drop_empty,
            columns=chosen["columns"],
            **selection_of(chosen),
        )
        layout = Layout(list(last.types), compression=chosen["compression"])
        keys = write_batches(last, to, sources, mode=chosen["mode"], layout=layout).messages
    invocation.out.fields([OutputColumn("to"), OutputColumn("keys", kind="count")], {"to": to, "keys": keys})


@click.command(cls=Command)
@spark_options
@selection_options
@click.option(
    "--to-store", type=click.Path(path_type=Path), metavar="DIR", help="The running target store.  [default: --store]"
)
@replay_options
@click.option("--name", default="", help="Name of the replay, by which it can be resumed.")
@click.option(
    "--streams",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of parallel senders.",
)
@click.option(
    "--queues", type=click.IntRange(1, 65535), default=8, show_default=True, metavar="N", help="Queues of a new topic."
)
@pass_invocation
def replay(
    invocation: Invocation,
    /,
    stores: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
    to_store: Path | None,
    to: str,
    name: str,
    rate: float,
    streams: int,
    queues: int,
    **chosen: Any,
) -> None:
    """Send stored messages again, into a running store.

    Sends the messages of any stores that --topic, --begin, --end, --tag and --key select. Copies keep body, tag, keys,
    properties and born time. With --name the same command resumes after a stop: no message is sent twice and none is
    missed. A single stream keeps the order of each log. Executors must run on the target's machine.
    """
    if not chosen["topics"]:
        raise click.UsageError("--topic is required")
    target = to_store or invocation.store_path()
    # If there are STORE arguments, --store is the target.
    paths = list(stores) or [str(invocation.store_path())]
    with session(master, conf) as spark:
        from mqproc.spark import jobs

        done = jobs.replay(
            spark,
            paths,
            target,
            to,
            name=name,
            rate=rate,
            streams=streams,
            queues=queues,
            **selection_of(chosen),
        )
    fields = {"to": to, "messages": done.sent, "already_stored": done.found}
    columns = [OutputColumn("to"), OutputColumn("messages", kind="count"), OutputColumn("already_stored", kind="count")]
    invocation.out.fields(columns, fields)


# The example of a declarative pipeline


@click.command(cls=Command)
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    default="mqproc-pipeline",
    show_default=True,
    metavar="DIR",
    help="Folder of the pipeline.",
)
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
@click.option("--conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's; may be repeated.")
@pass_invocation
def pipeline(invocation: Invocation, to: Path, master: str, conf: tuple[str, ...]) -> None:
    """Run the example pipeline over the demo's flights.

    Create the store with mqproc demo --store DIR. The tables flights, hourly_counts, carrier_delays and dead_letters
    are Parquet files in --to. The code is copied there too, for changes; another run replaces the tables.
    """
    from mqproc.cli.spark.session import setting

    try:
        from mqproc.spark.jobs.pipeline import TABLES, prepare, run
    except ImportError as error:
        raise ConfigurationError(f"{error.name} is not installed: pip install 'mqproc[pipelines,spark]'") from None
    folder = prepare(to, invocation.existing_paths().root)
    run(folder, master, dict(setting(each) for each in conf))
    rows = [{"table": name, "rows": folder.rows(name), "folder": str(folder.table(name))} for name in TABLES]
    invocation.out.rows(
        "tables", [OutputColumn("table"), OutputColumn("rows", kind="count"), OutputColumn("folder")], rows
    )
