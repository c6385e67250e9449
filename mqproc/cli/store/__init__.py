"""`mqproc store`: inspect, verify, repair and export the files of a store."""

from __future__ import annotations

import click

from mqproc.cli.options import CommandGroup

_LAZY = {
    "dump": ("mqproc.cli.store.dump:dump", "Print every CommitLog record of the store PATH, or explain the file PATH."),
    "repair": ("mqproc.cli.store.repair:repair", "Show the plan to repair a damaged store, or execute it."),
    "recover": ("mqproc.cli.store.repair:recover", "Show the changes that a start would make to a stopped store."),
    "export": ("mqproc.cli.store.export:export", "Export topics to Parquet, JSON lines or a new store."),
    "info": ("mqproc.cli.store.info:info", "Show sizes, positions, times, topics and state of a store."),
    "verify": ("mqproc.cli.store.repair:verify", "Check every record, unit and index entry."),
    "retention": ("mqproc.cli.store.retention:retention", "Show which files retention would delete, or delete them."),
}


@click.group(cls=CommandGroup, lazy=_LAZY)
def store() -> None:
    """Inspect, verify, repair and export a store's files.

    The commands work on a running or stopped store. All but repair, recover and retention are read-only; those change a
    store only with --execute.
    """
