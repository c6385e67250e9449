"""`mqproc store`: a store's files from outside, read-only, whether a group runs or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mqproc.cli.commands import Command, Group
from mqproc.cli.file_dump import Dump, dump_file, limited
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.log_walk import Hole, segments_in, walk_log
from mqproc.cli.output import Column, Output, encode_json, format_bytes, format_value
from mqproc.control import Control
from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io import StoreIO
from mqproc.layout import control as layout
from mqproc.layout import marks
from mqproc.message import StoredMessage
from mqproc.paths import StorePaths
from mqproc.shm.lock import holder_of
from mqproc.store import checkpoint_file

EXIT_DAMAGE = 1
_RECORD_COLUMNS = [
    Column("physical_offset", kind="number"),
    Column("size", kind="number"),
    Column("topic"),
    Column("queue_id", "queue", "number"),
    Column("queue_offset", kind="number"),
    Column("tag"),
    Column("keys"),
    Column("store_timestamp_ms", "store time", "time_ms"),
    Column("message_id"),
]


@click.group(cls=Group)
def store() -> None:
    """Look into a store's files; nothing need run."""


@store.command(cls=Command)
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@pass_invocation
def info(invocation: Invocation, folder: Path | None) -> None:
    """Say what lies in a store: files and sizes, how it was left, who holds it."""
    paths = StorePaths(folder.absolute()) if folder else invocation.existing_paths()
    found = describe_store(StoreIO(), paths)
    out = invocation.out
    if out.is_json:
        out.document(found)
        return
    parts = [
        Column("part"),
        Column("files", kind="count"),
        Column("bytes", kind="bytes"),
        Column("on_disk", kind="bytes"),
    ]
    out.fields([Column(name, title, kind) for name, title, kind in _FACTS], found)
    out.line("")
    out.rows("parts", parts, [{"part": name, **part} for name, part in found["parts"].items()])


_FACTS = (
    ("store", "", "text"),
    ("held_by", "held by", "text"),
    ("stopped_in_order", "stopped in order", "text"),
    ("log_begin", "log begins at", "count"),
    ("log_end", "segments end at", "count"),
    ("topics", "", "count"),
    ("queues", "", "count"),
    ("physic_timestamp_ms", "log durable up to", "time_ms"),
    ("logics_timestamp_ms", "queues durable up to", "time_ms"),
    ("index_timestamp_ms", "index durable up to", "time_ms"),
    ("marks", "durable marks", "text"),
    ("group", "group was last", "text"),
)


def describe_store(io: StoreIO, paths: StorePaths) -> dict[str, Any]:
    """Everything that names and sizes of files tell."""
    starts = segments_in(io, paths.commit_log)
    last = paths.commit_log / f"{starts[-1]:020d}" if starts else None
    holder = holder_of(io, paths)
    checkpoint = checkpoint_file.read(io, paths.checkpoint)
    topics = [name for name in io.names(paths.consume_queue) if (paths.consume_queue / name).is_dir()]
    return {
        "store": str(paths.root),
        "held_by": str(holder) if holder else None,
        "stopped_in_order": not io.exists(paths.abort),
        "log_begin": starts[0] if starts else 0,
        "log_end": starts[-1] + io.size_of(last) if last else 0,
        "topics": len(topics),
        "queues": sum(len(io.names(paths.consume_queue / topic)) for topic in topics),
        "physic_timestamp_ms": checkpoint.physic_timestamp_ms,
        "logics_timestamp_ms": checkpoint.logics_timestamp_ms,
        "index_timestamp_ms": checkpoint.index_timestamp_ms,
        "marks": _marks(io, paths),
        "group": _group_state(io, paths),
        "parts": {
            "commitlog": _size_of(paths.commit_log),
            "consumequeue": _size_of(paths.consume_queue),
            "index": _size_of(paths.index),
            "config": _size_of(paths.config),
            "mqproc": _size_of(paths.own),
        },
    }


def _marks(io: StoreIO, paths: StorePaths) -> dict[str, int]:
    found = {}
    for name in io.names(paths.marks):
        mark = marks.decode(io.read_file(paths.mark(name)))
        if mark is not None:
            found[name] = mark.offset
    return found


def _group_state(io: StoreIO, paths: StorePaths) -> str | None:
    try:
        control = Control.open(io, paths)
    except (NotRunningError, CorruptStoreError):
        return None
    state = control.load(layout.GROUP_STATE)
    control.close()
    return layout.GROUP_NAMES[state] if 0 <= state < len(layout.GROUP_NAMES) else str(state)


def _size_of(folder: Path) -> dict[str, int]:
    """Files below a folder: their lengths, and what they take on disk, which is less where they are sparse."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {
        "files": len(files),
        "bytes": sum(found.st_size for found in files),
        "on_disk": sum(found.st_blocks * 512 for found in files),
    }


@store.command(cls=Command)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--max", "most", type=click.IntRange(0), default=0, metavar="N", help="Stop after so many rows.  [all]")
@click.option("--topic", default="", help="Of a folder: only records of this topic.")
@pass_invocation
def dump(invocation: Invocation, path: Path, most: int, topic: str) -> int:
    """Print every CommitLog record of the store PATH, or explain the file PATH.

    Of a folder, --json prints one JSON line a record, in the order of the log. Holes are told on stderr, and the
    exit code is then 1. A file may be the checkpoint, a CommitLog segment, a ConsumeQueue, an index file, a durable
    mark, the control file, the queue table, or a config file.
    """
    if path.is_dir():
        return _dump_log(invocation.out, path, most, topic)
    _print_file(invocation.out, dump_file(StoreIO(), path, invocation.options()), most)
    return 0


def _dump_log(out: Output, folder: Path, most: int, topic: str) -> int:
    """Also takes the commitlog folder itself."""
    log = folder if folder.name == "commitlog" else StorePaths(folder).commit_log
    if not log.is_dir():
        raise click.BadParameter(f"{folder}: no store, it has no folder commitlog", param_hint="PATH")
    records = _Records(log, out, most, topic)
    if out.is_json:
        # Written in large pieces: a store has millions of lines.
        for messages in records:
            out.stream.write("".join(encode_json(message.to_json()) + "\n" for message in messages))
    else:
        for messages in records:
            rows = [message.to_json() for message in messages]
            if out.shape == "table":
                for row in rows:
                    out.line("  ".join(format_value(row[c.name], c.kind, terminal=False) for c in _RECORD_COLUMNS))
            else:
                out.rows("records", _RECORD_COLUMNS, rows)
    return EXIT_DAMAGE if records.holes else 0


class _Records:
    """The records asked for, in lists; counts the holes and tells them on stderr."""

    def __init__(self, log: Path, out: Output, most: int, topic: str) -> None:
        self.holes = 0
        self._log = log
        self._out = out
        self._left = most or None
        self._topic = topic

    def __iter__(self) -> Iterator[list[StoredMessage]]:
        for found in walk_log(StoreIO(), self._log):
            if isinstance(found, Hole):
                self.holes += 1
                size = format_bytes(found.end - found.begin)
                self._out.note(f"{self._log}: hole [{found.begin}, {found.end}), {size}: {found.reason}")
                continue
            messages = [message for message in found if not self._topic or message.topic == self._topic]
            messages = messages[: self._left]
            if messages:
                yield messages
            if self._left is not None:
                self._left -= len(messages)
                if self._left == 0:
                    return


def _print_file(out: Output, dump: Dump, most: int) -> None:
    rows = limited(dump.rows, most)
    if out.shape == "json":
        out.document({"kind": dump.kind, **dump.head, "rows": list(rows)})
        return
    if out.shape == "jsonl":
        out.document({"kind": dump.kind, **dump.head})
    elif out.shape == "table":
        out.fields([Column("kind"), *(Column(name) for name in dump.head)], {"kind": dump.kind, **dump.head})
        out.line("")
    if dump.columns:
        out.rows("rows", dump.columns, rows)
