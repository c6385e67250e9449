"""`mqproc spark`: jobs over one store or hundreds, here or on a cluster."""

from __future__ import annotations

import click

from mqproc.cli.options import Group

_LAZY = {
    "counts": ("mqproc.cli.spark.jobs:counts", "Count messages, bytes and latencies by topic, tag, key and time."),
    "verify": ("mqproc.cli.spark.jobs:verify", "Verify many stores, or large ones, in parallel."),
    "duplicates": ("mqproc.cli.spark.jobs:duplicates", "Find messages that are stored more than once."),
    "lag": ("mqproc.cli.spark.jobs:lag", "Show how far consumer groups are behind, and since when."),
    "rebuild": ("mqproc.cli.spark.jobs:rebuild", "Build queues and index from a store's log, in parallel."),
    "export": ("mqproc.cli.spark.jobs:export", "Write messages as Parquet, by topic and day."),
    "compact": ("mqproc.cli.spark.jobs:compact", "Write the last message of each key as Parquet."),
    "replay": ("mqproc.cli.spark.jobs:replay", "Send stored messages once more, into a running store."),
    "pipeline": ("mqproc.cli.spark.jobs:pipeline", "Run the example pipeline over the demo's flights."),
    "script": ("mqproc.cli.spark.session:script", "Print the file to give to spark-submit."),
}


@click.group(cls=Group, lazy=_LAZY)
def spark() -> None:
    """Run jobs over stores on Spark.

    Without more they run on this machine. On a cluster: spark-submit "$(mqproc spark script)" COMMAND …; stores must
    lie at the same path everywhere, or on remote storage where a command says so. Needs the extra spark.
    """
