"""`mqproc store`: a store's files from outside, read-only, whether a group runs or not."""

from __future__ import annotations

import click

from mqproc.cli.options import Group

_LAZY = {
    "dump": ("mqproc.cli.store.dump:dump", "Print every CommitLog record of the store PATH, or explain the file PATH."),
    "repair": ("mqproc.cli.store.repair:repair", "Plan how a damaged store is brought in order, or do it."),
    "recover": (
        "mqproc.cli.store.repair:recover",
        "Show what a start would do to a stopped store: steps, cuts, holes, files.",
    ),
    "export": ("mqproc.cli.store.export:export", "Take topics out of a store: Parquet, JSON lines, or a new store."),
    "info": ("mqproc.cli.store.info:info", "Say what lies in a store: sizes, ends, times, topics, who wrote it."),
    "verify": ("mqproc.cli.store.verify:verify", "Check every record, unit and index entry."),
    "retention": ("mqproc.cli.store.retention:retention", "Show which files retention would delete, or delete them."),
}


@click.group(cls=Group, lazy=_LAZY)
def store() -> None:
    """Look into a store's files; nothing need run."""
