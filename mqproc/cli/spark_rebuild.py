"""`mqproc spark rebuild`: queues and index of a store from its log, in parallel."""

from __future__ import annotations

from pathlib import Path

import click

from mqproc.cli.commands import SIZE, Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column
from mqproc.cli.spark_session import paths_of, session, show, spark_options
from mqproc.quantities import counted

EXIT_INCOMPLETE = 1
_QUEUES = [
    Column("topic"),
    Column("queue_id", "queue", "number"),
    *(Column(name, kind="count") for name in ("min_offset", "max_offset", "units", "fillers", "missing", "repeated")),
]


@click.command(cls=Command)
@spark_options
@click.option("--to", required=True, type=click.Path(path_type=Path), metavar="DIR", help="An empty folder, or none.")
@click.option("--skip-damage", is_flag=True, help="Pass over damage of the log; otherwise it is an error.")
@click.option("--share", type=SIZE, default="256MiB", show_default=True, help="A task reads so much of the log.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True, help="Print so many rows.")
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
    """Build queues and index from a store's log, in parallel.

    STORE is one folder, which is only read. DIR/consumequeue and DIR/index become what dispatch makes of its log; they
    can take the places of the stopped store's own. A row a queue tells what it has. The exit code is 1 when offsets are
    missing, or two records have the same.
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
