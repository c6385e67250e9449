"""The commands of `mqproc spark`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mqproc.cli.options import DURATION, SIZE, Command, Invocation, command, grouped_options, replay_options
from mqproc.cli.output import OutputColumn, output_columns
from mqproc.cli.spark.session import (
    CONF_OPTION,
    SparkJob,
    check_spans,
    needing_spark,
    selection_options,
    setting,
    show,
    skip_damage_option,
    spark_options,
    write_rows,
)
from mqproc.cli.store.repair import EXIT_DAMAGE, FINDING_COLUMNS
from mqproc.errors import BadRequestError, ConfigurationError
from mqproc.util.units import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BY = ("store", "topic", "queue_id", "tag", "key")
_COUNTS = output_columns("messages:count", "bytes:bytes")
_LATENCIES = output_columns(*(f"latency_ms_{each}:number:latency {each} ms" for each in ("mean", "p50", "p99", "max")))
_WINDOW = output_columns("window_start_ms:time_ms:from", "window_end_ms:time_ms:to")
_DIR: Final[dict[str, Any]] = {"type": click.Path(path_type=Path), "metavar": "DIR"}
_to = click.option("--to", **_DIR, help="Append all rows as Parquet to DIR.")
_limit = click.option(
    "-n", "--limit", "--max", "limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, metavar="N",
    help="Print at most N rows.",
)  # fmt: skip
_share = click.option("--share", type=SIZE, default="256MiB", show_default=True, help="Log bytes per task.")


@click.command(cls=Command)
@spark_options
@selection_options
@click.option(
    "--by", multiple=True, type=click.Choice(_BY), default=("topic",), show_default=True, help="Group by these."
)
@click.option("--window", type=DURATION, metavar="SPAN", help="Also group by time windows of this length: 1h, 15m.")
@click.option(
    "--slide", type=DURATION, metavar="SPAN", help="Distance between the starts of windows.  [default: their length]"
)
@click.option(
    "--time", type=click.Choice(["store", "born"]), default="store", show_default=True, help="Time of the windows."
)
@click.option("--no-latencies", is_flag=True, help="Count only messages and bytes, which is faster.")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw a plot to FILE: .png, .svg, .pdf or .html."
)
@click.option("--to", **_DIR, help="Write all rows as Parquet to a new folder.")
@_limit
def counts(
    job: SparkJob,
    selection: dict[str, Any],
    by: tuple[str, ...],
    window: float | None,
    slide: float | None,
    time: str,
    no_latencies: bool,
    plot: Path | None,
    to: Path | None,
    limit: int,
) -> None:
    """Count messages, bytes and latencies by topic, tag, key and time.

    STORE is a folder, a pattern or a URL; several stores are counted together unless grouped by --by store. The latency
    of a message is its store time minus its born time. A message with several keys counts for each key. A plot shows
    the largest groups.
    """
    by = tuple(dict.fromkeys(by))
    paths = job.paths()
    # Check the options before Spark is started.
    check_spans(window, slide)
    _check_outputs(job.invocation, plot, to)
    with job.session() as spark:
        from mqproc.spark import jobs

        spans = {"window": _span(window), "slide": _span(slide), "time": f"{time}_timestamp"}
        found = jobs.counts(spark, paths, by=by, **spans, latencies=not no_latencies, **selection)
        if plot is not None:
            from mqproc.spark.jobs.counting import plot_counts

            plot_counts(found, by, plot, slide_s=slide)
            job.out.note(f"plot written to {plot}")
            return
        ordered = _order(found, by, window)
        if to is not None:
            write_rows(job.out, ordered, to, job.checked_sources(selection), mode="error")
            return
        if not show(job.out, "counts", _columns(by, window, no_latencies), ordered, limit):
            # A missing topic is not an error: a store may have lost its queues.
            job.out.note(f"no selected messages in {' '.join(paths)}")


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
    columns = output_columns(*("queue_id:text:queue" if name == "queue_id" else name for name in by))
    return [*columns, *(_WINDOW if window is not None else ()), *_COUNTS, *(() if no_latencies else _LATENCIES)]


def _order(found: DataFrame, by: tuple[str, ...], window: float | None) -> DataFrame:
    from pyspark.sql import functions as F

    if window is None:
        return found.orderBy(F.desc("messages"), *by)
    return _in_ms(found, "window_start", "window_end").orderBy(F.asc_nulls_last("window_start_ms"), *by)


def _in_ms(frame: DataFrame, *names: str) -> DataFrame:
    """Replace timestamps by Unix ms, in columns whose names end in `_ms`."""
    from pyspark.sql import functions as F

    for name in names:
        frame = frame.withColumn(name, F.unix_millis(name)).withColumnRenamed(name, f"{name}_ms")
    return frame


# Verify, duplicates, lag


_STORES = output_columns(
    "store, clean, records:count, units:count, index_entries:count, queues:count, damage:count, notes:count",
    "bytes:bytes",
)
_DUPLICATES = output_columns(
    "topic, unique_id, copies:count, stores:count, first_stored_ms:time_ms:first, last_stored_ms:time_ms:last"
)
_LAG = output_columns(
    "store, group, topic, queue_id:number:queue, offset:count, max_offset:count, behind:count, expired:count",
    "oldest_stored_ms:time_ms:oldest",
)
_BACKLOG = [*output_columns("store", "group", "topic"), *_WINDOW, *_COUNTS]


@click.command(cls=Command)
@spark_options
@_share
@_to
@_limit
def verify(job: SparkJob, share: int, to: Path | None, limit: int) -> int:
    """Verify many stores, or large ones, in parallel.

    STORE is a folder or a pattern. The checks are those of mqproc store verify: sizes and CRCs of records, queues and
    index against the log and vice versa, gaps, offsets used twice. Prints a row per store, then the findings. The exit
    code is 1 if a store is damaged.
    """
    paths = job.paths()
    with job.session() as spark:
        from pyspark import StorageLevel
        from pyspark.sql import functions as F

        from mqproc.spark import jobs
        from mqproc.spark.jobs.output import check_target
        from mqproc.spark.jobs.tasks import local_stores

        folders = [str(folder) for folder in local_stores(paths)]
        if to is not None:
            # Checked first, as verification may take hours.
            check_target(to, folders)
        # Persisted, as it is used three times.
        found = jobs.verify(spark, paths, share_bytes=share).persist(StorageLevel.DISK_ONLY)
        [(damaged, finding_count)] = found.agg(F.expr("count_if(not clean)"), F.sum(F.size("findings"))).collect()
        ordered = found.orderBy("store")
        if to is not None:
            write_rows(job.out, ordered, to, folders)
        elif job.out.is_json:
            show(job.out, "stores", _STORES, ordered, limit)
        else:
            show(job.out, "stores", _STORES, ordered.drop("findings"), limit)
            if finding_count:
                findings = found.select("store", F.explode("findings").alias("finding")).select("store", "finding.*")
                job.out.line("")
                columns = [*output_columns("store"), *FINDING_COLUMNS]
                show(job.out, "findings", columns, findings.orderBy("store", "severity", "kind", "file"), limit)
        return EXIT_DAMAGE if damaged else 0


@click.command(cls=Command)
@spark_options
@selection_options
@_to
@_limit
def duplicates(job: SparkJob, selection: dict[str, Any], to: Path | None, limit: int) -> int:
    """Find messages that are stored more than once.

    Duplicates have the same topic and unique id (UNIQ_KEY), in one store or several. A producer creates them when it
    sends again after a lost answer. The exit code is 1 if there are any.
    """
    paths = job.paths()
    with job.session() as spark:
        from pyspark.sql import functions as F

        from mqproc.spark import jobs

        found = _in_ms(jobs.duplicates(spark, paths, **selection), "first_stored", "last_stored")
        ordered = found.orderBy(F.desc("copies"), "topic", "unique_id")
        if to is not None:
            write_rows(job.out, ordered, to, job.checked_sources(selection))
            return 0
        return EXIT_DAMAGE if show(job.out, "duplicates", _DUPLICATES, ordered, limit) else 0


@click.command(cls=Command)
@spark_options
@click.option(
    "--window", type=DURATION, metavar="SPAN", help="Count unconsumed messages by windows of store time: 1h, 1d."
)
@_to
@_limit
def lag(job: SparkJob, window: float | None, to: Path | None, limit: int) -> None:
    """Show the lag of consumer groups, in messages and time.

    Compares the committed offsets of each group with its queues: unconsumed messages, those that expired unconsumed,
    and the store time of the oldest one. Repeated runs with the same --to record the lag over time (column seen_at).
    With --window the unconsumed messages are counted by store time.
    """
    paths = job.paths()
    check_spans(window)
    with job.session() as spark:
        from pyspark.sql import functions as F

        from mqproc.spark import jobs

        found = jobs.lag(spark, paths) if window is None else jobs.backlog(spark, paths, window=_span(window))
        if to is not None:
            write_rows(job.out, found, to, job.checked_sources({"fail_on_data_loss": False}))
        elif window is None:
            found = _in_ms(found.drop("seen_at"), "oldest_stored").orderBy(F.desc("behind"), "store", "group", "topic")
            if not show(job.out, "lag", _LAG, found, limit):
                job.out.note(f"no group has committed offsets in {' '.join(paths)}")
        else:
            found = _in_ms(found, "window_start", "window_end").orderBy("store", "group", "topic", "window_start_ms")
            if not show(job.out, "backlog", _BACKLOG, found, limit):
                job.out.note(f"no group has unconsumed messages in {' '.join(paths)}")


# Rebuild


EXIT_INCOMPLETE = 1
_LOST_LISTED: Final = 100
_QUEUES = output_columns(
    "topic, queue_id:number:queue, min_offset:count, max_offset:count, units:count, fillers:count",
    "missing:count, repeated:count",
)


@click.command(cls=Command)
@spark_options
@click.option("--to", required=True, **_DIR, help="A new or an empty folder.")
@skip_damage_option
@_share
@_limit
def rebuild(job: SparkJob, to: Path, skip_damage: bool, share: int, limit: int) -> int:
    """Rebuild queues and index from a store's log, in parallel.

    STORE is one folder, which is read-only. The results in DIR/consumequeue and DIR/index can replace those of the
    stopped store. Prints a row per queue. The exit code is 1 if offsets are missing or used twice.
    """
    if len(job.stores) > 1:
        raise click.UsageError("one store at a time")
    (store,) = job.paths()
    with job.session() as spark:
        from pyspark.sql import functions as F

        from mqproc.spark import jobs
        from mqproc.store.lost_messages import LostMessages, lines_about

        built = jobs.rebuild(spark, store, to, share_bytes=share, fail_on_data_loss=not skip_damage)
        show(job.out, "queues", _QUEUES, built.queues.orderBy("topic", "queue_id"), limit)
        sums = built.queues.agg(F.count(F.lit(1)), F.sum("units"), F.sum(F.expr("missing + repeated"))).first()
        files = built.index.agg(F.count(F.lit(1)), F.sum("entries")).first()
        lost = built.queues.select("topic", "queue_id", F.explode("lost").alias("at")).collect()
        built.unpersist()
    queues, units, wrong = (int(each or 0) for each in sums or (0, 0, 0))
    names, entries = (int(each or 0) for each in files or (0, 0))
    made = f"{counted(units, 'unit')} of {counted(queues, 'queue')}"
    job.out.note(f"{made}, {counted(entries, 'entry')} in {counted(names, 'index file')}: {to}")
    ranges = [(row.topic, row.queue_id, row["at"].first_offset, row["at"].last_offset + 1) for row in lost]
    for line in lines_about([LostMessages(*each) for each in sorted(ranges)], _LOST_LISTED):
        job.out.note(line)
    return EXIT_INCOMPLETE if wrong else 0


# Export, compact, replay


_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
_MODES = ("error", "append", "overwrite")
# The command gets `target`.
_target_options = grouped_options(
    "target",
    lambda to, mode, compression, columns: {"to": to, "mode": mode, "compression": compression, "columns": columns},
    click.option("--to", required=True, metavar="DIR|URL", help="Target folder or URL."),
    click.option(
        "--mode", type=click.Choice(_MODES), default="error", show_default=True, help="If the target exists."
    ),
    click.option(
        "--compression", type=click.Choice(_COMPRESSIONS), default="zstd", show_default=True,
        help="Compression of Parquet.",
    ),
    click.option("--column", "columns", multiple=True, metavar="NAME", help="Only these columns; may be repeated."),
)  # fmt: skip


@click.command(cls=Command)
@spark_options
@selection_options
@_target_options
def export(job: SparkJob, selection: dict[str, Any], target: dict[str, Any]) -> None:
    """Write messages as Parquet, by topic and day.

    DIR/topic=…/day=…/ contains the messages stored on that day, in UTC. STORE is a folder, a pattern or a URL.
    """
    paths = job.paths()
    with job.session() as spark:
        from mqproc.spark import jobs

        done = jobs.export(spark, paths, **target, **selection)
    fields = {"to": target["to"], "messages": done.messages, "bytes": done.size}
    job.out.fields([*output_columns("to"), *_COUNTS], fields)


@click.command(cls=Command)
@spark_options
@selection_options
@_target_options
@click.option("--drop-empty", is_flag=True, help="Omit keys whose last message has no body: they were deleted.")
def compact(job: SparkJob, selection: dict[str, Any], target: dict[str, Any], drop_empty: bool) -> None:
    """Write the last message of each key as Parquet.

    Writes the last stored message of each topic and key, over all stores; messages without a key are omitted.
    """
    paths = job.paths()
    with job.session() as spark:
        from mqproc.spark.jobs.copies import plan_compaction
        from mqproc.spark.jobs.output import write_batches
        from mqproc.spark.jobs.parquet_files import Layout

        sources = job.checked_sources(selection)
        last = plan_compaction(spark, paths, drop_empty=drop_empty, columns=target["columns"], **selection)
        layout = Layout(list(last.types), compression=target["compression"])
        keys = write_batches(last, target["to"], sources, mode=target["mode"], layout=layout).messages
    job.out.fields(output_columns("to", "keys:count"), {"to": target["to"], "keys": keys})


@click.command(cls=Command)
@spark_options
@selection_options
@click.option("--to-store", **_DIR, help="The running target store.  [default: --store]")
@replay_options
@click.option("--name", default="", help="Name of the replay, by which it can be resumed.")
@click.option(
    "--streams", type=click.IntRange(1, 1024), default=1, show_default=True, metavar="N",
    help="Number of parallel senders.",
)  # fmt: skip
@click.option(
    "--queues", type=click.IntRange(1, 65535), default=8, show_default=True, metavar="N", help="Queues of a new topic."
)
def replay(
    job: SparkJob,
    selection: dict[str, Any],
    to_store: Path | None,
    to: str,
    name: str,
    rate: float,
    streams: int,
    queues: int,
) -> None:
    """Send stored messages again, into a running store.

    Sends the messages of any stores that --topic, --begin, --end, --tag and --key select. Copies keep body, tag, keys,
    properties and born time. With --name the same command resumes after a stop: no message is sent twice and none is
    missed. A single stream keeps the order of each log. Executors must run on the target's machine.
    """
    if not selection["topic"]:
        raise click.UsageError("--topic is required")
    target = to_store or job.invocation.store_path()
    # If there are STORE arguments, --store is the target.
    paths = list(job.stores) or [str(job.invocation.store_path())]
    with job.session() as spark:
        from mqproc.spark import jobs

        done = jobs.replay(
            spark, paths, target, to, name=name, rate=rate, streams=streams, queues=queues, **selection
        )  # fmt: skip
    columns = output_columns("to", "messages:count", "already_stored:count")
    job.out.fields(columns, {"to": to, "messages": done.sent, "already_stored": done.found})


# The example of a declarative pipeline


@command()
@click.option("--to", **_DIR | {"default": "mqproc-pipeline"}, show_default=True, help="Folder of the pipeline.")
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
@CONF_OPTION
def pipeline(invocation: Invocation, to: Path, master: str, conf: tuple[str, ...]) -> None:
    """Run the example pipeline over the demo's flights.

    Create the store with mqproc demo --store DIR. The tables flights, hourly_counts, carrier_delays and dead_letters
    are Parquet files in --to. The code is copied there too, for changes; another run replaces the tables.
    """
    try:
        from mqproc.spark.jobs.pipeline import TABLES, prepare, run
    except ImportError as error:
        raise ConfigurationError(f"{error.name} is not installed: pip install 'mqproc[pipelines,spark]'") from None
    folder = prepare(to, invocation.existing_paths().root)
    run(folder, master, dict(setting(each) for each in conf))
    rows = [{"table": name, "rows": folder.rows(name), "folder": str(folder.table(name))} for name in TABLES]
    invocation.out.rows("tables", output_columns("table", "rows:count", "folder"), rows)
