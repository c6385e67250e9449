"""`mqproc spark export`, `compact` and `replay`: messages to where others can use them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mqproc.cli.commands import Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column
from mqproc.cli.replay_options import replay_options
from mqproc.cli.spark_session import paths_of, selection_of, selection_options, session, spark_options

_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
_MODES = ("error", "append", "overwrite")


def _copy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what tells where Parquet goes and what is in it; `to` is the command's, the others are among `chosen`."""
    for option in (
        click.option("--column", "columns", multiple=True, metavar="NAME", help="Only these columns; may be repeated."),
        click.option(
            "--compression", type=click.Choice(_COMPRESSIONS), default="zstd", show_default=True, help="Of Parquet."
        ),
        click.option(
            "--mode",
            type=click.Choice(_MODES),
            default="error",
            show_default=True,
            help="When something is there already.",
        ),
        click.option("--to", required=True, metavar="DIR|URL", help="Where to write."),
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

    DIR/topic=…/day=…/ holds what was stored on that day, in UTC. STORE is a folder, a pattern or a URL.
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
    invocation.out.fields([Column("to"), Column("messages", kind="count"), Column("bytes", kind="bytes")], fields)


@click.command(cls=Command)
@spark_options
@selection_options
@_copy_options
@click.option("--drop-empty", is_flag=True, help="Leave out keys whose last message has no body: they were deleted.")
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

    Of each topic and key the message that was stored last, over all stores; messages without a key are left out.
    """
    paths = paths_of(invocation, stores)
    with session(master, conf) as spark:
        from mqproc.spark.jobs.compacting import planned_last
        from mqproc.spark.jobs.parquet_files import Layout
        from mqproc.spark.jobs.targets import check_sources, write_batches

        sources = check_sources(paths, fail_on_data_loss=not chosen["skip_damage"])
        last = planned_last(
            spark,
            paths,
            drop_empty=drop_empty,
            columns=chosen["columns"],
            **selection_of(chosen),
        )
        layout = Layout(list(last.types), compression=chosen["compression"])
        keys = write_batches(last, to, sources, mode=chosen["mode"], layout=layout).messages
    invocation.out.fields([Column("to"), Column("keys", kind="count")], {"to": to, "keys": keys})


@click.command(cls=Command)
@spark_options
@selection_options
@click.option("--to-store", type=click.Path(path_type=Path), metavar="DIR", help="A running store.  [--store]")
@replay_options
@click.option("--name", default="", help="With the same name again, a replay goes on where it stopped.")
@click.option("--streams", type=click.IntRange(1, 1024), default=1, show_default=True, help="So many send at once.")
@click.option("--queues", type=click.IntRange(1, 65535), default=8, show_default=True, help="Of a topic that is made.")
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
    """Send stored messages once more, into a running store.

    Those that --topic, --begin, --end, --tag and --key choose, of any stores. Copies keep body, tag, keys, properties
    and born time. With --name the same command goes on after a stop: no message twice, none missed. One stream keeps
    the order of each log. Executors run on the target's machine.
    """
    if not chosen["topics"]:
        raise click.UsageError("--topic names what to send once more")
    target = to_store or invocation.store_path()
    # With STORE, --store is the target's.
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
    columns = [Column("to"), Column("messages", kind="count"), Column("already_stored", kind="count")]
    invocation.out.fields(columns, fields)
