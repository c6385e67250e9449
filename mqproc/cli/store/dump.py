"""`mqproc store dump`: the records of a store, or what the bytes of one of its files are."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import click

from mqproc.cli.dump import Dump
from mqproc.cli.file_dump import LAYOUT_COLUMNS, dump_file, limited
from mqproc.cli.options import PATH, Command, Invocation, pass_invocation
from mqproc.cli.output import Column, Output, encode_json, format_bytes, format_value
from mqproc.cli.segment_dump import RECORD_COLUMNS
from mqproc.errors import StoreNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.layout.record_codec import decode_records
from mqproc.paths import StorePaths, file_type
from mqproc.store.commitlog.scan import IntactRecords, LostRange
from mqproc.store.store_check import check_is_store
from mqproc.store.verify.inventory import take_inventory
from mqproc.store.verify.verifier import positions_of, sizes_of
from mqproc.types import StoredMessage

EXIT_DAMAGE = 1
_RECORD_COLUMNS = [*RECORD_COLUMNS, Column("message_id")]


@click.command(cls=Command)
@click.argument("path", required=False, type=PATH)
@click.option("--max", "most", type=click.IntRange(0), default=0, metavar="N", help="Stop after so many rows.  [all]")
@click.option("--topic", default="", help="Of a folder: only records of this topic.")
@click.option("--fields", is_flag=True, help="Of a file: each field with its bytes, value and meaning.")
@pass_invocation
def dump(invocation: Invocation, path: Path | None, most: int, topic: str, fields: bool) -> int:
    """Print every CommitLog record of the store PATH, or explain the file PATH.

    Without PATH it is the store that --store and the like name. Of a folder, --json prints one JSON line a record, in
    the order of the log. Holes are told on stderr, and the exit code is then 1. Of a store that runs only what is
    published counts. A file may be the checkpoint, a CommitLog segment, a ConsumeQueue, an index file, one of the
    timer's files, a durable mark, the control file, the queue table, groups' progress, the error list, the topics'
    journal, a marker or a config file: first comes which bytes are what, from the first to the last, then each record,
    unit, item or word. The exit code is 1 when a segment has damage, or when a config file's reader would not take it.
    """
    io = StoreIO()
    path = path or invocation.paths().root
    kind = file_type(path)
    if stat.S_ISDIR(kind):
        return _dump_log(invocation, io, path, most, topic)
    if not kind:
        raise StoreNotFoundError(f"{path}: no such file or folder")
    found = dump_file(io, path, invocation.options_without_store(), fields=fields)
    _print_file(invocation.out, found, most)
    return EXIT_DAMAGE if found.is_damaged else 0


def _dump_log(invocation: Invocation, io: StoreIO, folder: Path, most: int, topic: str) -> int:
    """Also takes the commitlog folder itself."""
    out, folder = invocation.out, folder.absolute()
    paths = StorePaths(folder.parent if folder.name == "commitlog" else folder)
    check_is_store(io, paths)
    inventory = take_inventory(io, paths, sizes_of(io, paths, invocation.store_options(io, paths)))
    positions = positions_of(io, paths)
    log = IntactRecords(io, inventory, positions.begin, positions.end)
    try:
        return _print_records(out, _Records(log, paths.commit_log, out, most, topic))
    finally:
        log.close()


def _print_records(out: Output, records: _Records) -> int:
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

    def __init__(self, log: IntactRecords, path: Path, out: Output, most: int, topic: str) -> None:
        self.holes = 0
        self._log = log
        self._path = path
        self._out = out
        self._left = most or None
        self._topic = topic

    def __iter__(self) -> Iterator[list[StoredMessage]]:
        for found in self._log.pieces():
            if isinstance(found, LostRange):
                self.holes += 1
                size = format_bytes(found.stop - found.start)
                self._out.note(f"{self._path}: hole [{found.start}, {found.stop}), {size}: {found.reason}")
                continue
            messages = decode_records(found.view[found.start : found.stop].data)
            if self._topic:
                messages = [message for message in messages if message.topic == self._topic]
            messages = messages[: self._left]
            if messages:
                yield messages
            if self._left is not None:
                self._left -= len(messages)
                if self._left == 0:
                    return


def _print_file(out: Output, dump: Dump, most: int) -> None:
    rows = limited(dump.rows, most)
    layout = [part.to_json() for part in dump.layout]
    if out.shape == "json":
        out.document({"kind": dump.kind, **dump.head, "layout": layout, "rows": list(rows)})
        return
    if out.shape == "jsonl":
        out.document({"kind": dump.kind, **dump.head, "layout": layout})
    elif out.shape == "table":
        out.fields([Column("kind"), *(Column(name) for name in dump.head)], {"kind": dump.kind, **dump.head})
        out.line("")
        if layout:
            out.rows("layout", LAYOUT_COLUMNS, layout)
            out.line("")
    if dump.columns:
        out.rows("rows", dump.columns, rows)
