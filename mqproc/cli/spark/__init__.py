"""`mqproc spark`: jobs over one store or many, on this machine or a cluster."""

from __future__ import annotations

import click

from mqproc.cli.options import CommandGroup

_LAZY = {
    "counts": ("mqproc.cli.spark.jobs:counts", "Count messages, bytes and latencies by topic, tag, key and time."),
    "verify": ("mqproc.cli.spark.jobs:verify", "Verify many stores, or large ones, in parallel."),
    "duplicates": ("mqproc.cli.spark.jobs:duplicates", "Find messages that are stored more than once."),
    "lag": ("mqproc.cli.spark.jobs:lag", "Show the lag of consumer groups, in messages and time."),
    "rebuild": ("mqproc.cli.spark.jobs:rebuild", "Rebuild queues and index from a store's log, in parallel."),
    "export": ("mqproc.cli.spark.jobs:export", "Write messages as Parquet, by topic and day."),
    "compact": ("mqproc.cli.spark.jobs:compact", "Write the last message of each key as Parquet."),
    "replay": ("mqproc.cli.spark.jobs:replay", "Send stored messages again, into a running store."),
    "pipeline": ("mqproc.cli.spark.jobs:pipeline", "Run the example pipeline over the demo's flights."),
    "script": ("mqproc.cli.spark.session:script", "Print the file to give to spark-submit."),
}


@click.group(cls=CommandGroup, lazy=_LAZY)
def spark() -> None:
    """Run jobs over stores on Spark.

    By default jobs run on this machine. To run one on a cluster: spark-submit "$(mqproc spark script)" COMMAND …; then
    stores must have the same path on every machine, or be on remote storage if the command supports URLs. Needs the
    extra spark.
    """
