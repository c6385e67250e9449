"""`mqproc spark counts`: messages, bytes and latencies by topic, tag, key and window of time; as rows or as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqproc.cli.commands import SECONDS, Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column
from mqproc.cli.spark_session import (
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
from mqproc.errors import BadRequestError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BY = ("store", "topic", "queue_id", "tag", "key")
_MEASURES = [
    Column("messages", kind="count"),
    Column("bytes", kind="bytes"),
    *(Column(f"latency_ms_{each}", f"latency {each} ms", "number") for each in ("mean", "p50", "p99", "max")),
]


@click.command(cls=Command)
@spark_options
@selection_options
@click.option(
    "--by", multiple=True, type=click.Choice(_BY), default=("topic",), show_default=True, help="One row for each."
)
@click.option("--window", type=SECONDS, metavar="SPAN", help="And for each window of time: 1h, 15m.")
@click.option(
    "--slide", type=SECONDS, metavar="SPAN", help="A window begins so far behind the one before. [its length]"
)
@click.option(
    "--time", type=click.Choice(["store", "born"]), default="store", show_default=True, help="Which time windows go by."
)
@click.option("--no-latencies", is_flag=True, help="Only messages and bytes, which is faster.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: .png, .svg, .pdf or .html.")
@click.option(
    "--to", type=click.Path(path_type=Path), metavar="DIR", help="Write all rows there, as Parquet; a new folder."
)
@click.option("--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Print so many rows.")
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

    STORE is a folder, a pattern or a URL; several are counted together, apart with --by store. Latency is from born to
    stored. A message with several keys counts for each. The plot shows the largest groups.
    """
    by = tuple(dict.fromkeys(by))
    paths = paths_of(invocation, stores)
    # What Spark need not be started for.
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
            from mqproc.spark.jobs.plotting import plot_counts

            plot_counts(found, by, plot, slide_s=slide)
            invocation.out.note(f"drawn to {plot}")
            return
        ordered = _ordered(found, by, window)
        if to is not None:
            sources = check_sources(paths, fail_on_data_loss=not chosen["skip_damage"])
            write_rows(invocation.out, ordered, to, sources, mode="error")
            return
        if not show(invocation.out, "counts", _columns(by, window, no_latencies), ordered, limit):
            # A topic that no store has is no error: a store may have lost its queues.
            invocation.out.note(f"no message of what was chosen in {' '.join(paths)}")


def _check_outputs(invocation: Invocation, plot: Path | None, to: Path | None) -> None:
    if to is not None and to.exists():
        # Those of a second run, beside these, would double all sums.
        raise BadRequestError(f"{to}: already exists; counts are written to a new folder")
    if plot is None:
        return
    for is_given, name in ((to is not None, "--to"), (invocation.out.is_json, f"--output {invocation.output}")):
        if is_given:
            raise click.UsageError(f"--plot and {name}: choose one")
    with needing_spark():
        from mqproc.spark.jobs.plotting import check_plot
    check_plot(plot)


def _span(seconds: float | None) -> str:
    """A length as Spark writes it."""
    return "" if seconds is None else f"{round(seconds * 1000)} milliseconds"


def _columns(by: tuple[str, ...], window: float | None, no_latencies: bool) -> list[Column]:
    columns = [Column(name, "queue" if name == "queue_id" else "") for name in by]
    if window is not None:
        columns += [Column("window_start_ms", "from", "time_ms"), Column("window_end_ms", "to", "time_ms")]
    return columns + (_MEASURES[:2] if no_latencies else _MEASURES)


def _ordered(found: DataFrame, by: tuple[str, ...], window: float | None) -> DataFrame:
    from pyspark.sql import functions as F

    if window is None:
        return found.orderBy(F.desc("messages"), *by)
    for name in ("window_start", "window_end"):
        found = found.withColumn(name, F.unix_millis(name)).withColumnRenamed(name, f"{name}_ms")
    return found.orderBy(F.asc_nulls_last("window_start_ms"), *by)
