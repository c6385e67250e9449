"""A CommitLog segment explained: its parts, then its records, with a row for each range that should hold some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mqproc.cli.dump import Dump, Rows
from mqproc.cli.output import Column
from mqproc.cli.store.file_fields import DAMAGE, commit_log_layout, whole
from mqproc.io.store_io import StoreIO
from mqproc.layout.record_codec import decode_records
from mqproc.paths import StorePaths, segment_start
from mqproc.store.commitlog.scan import Blank, IntactRecords, LostRange, Piece
from mqproc.store.verify.inventory import Inventory, Sizes
from mqproc.store.verify.verifier import positions_of

RECORD_COLUMNS = [
    Column("physical_offset", kind="number"),
    Column("size", kind="number"),
    Column("topic"),
    Column("queue_id", "queue", "number"),
    Column("queue_offset", kind="number"),
    Column("tag"),
    Column("keys"),
    Column("store_timestamp_ms", "store time", "time_ms"),
]


def dump_segment(io: StoreIO, path: Path) -> Dump:
    """A segment by its absolute path, where it lies in a store; of one that runs only what is published counts."""
    start = segment_start(path.name)
    assert start is not None
    size = io.size_of(path)
    layout = list(whole(commit_log_layout(_found(io, path, start, size), start, size), size))
    is_damaged = any(part.name == DAMAGE for part in layout)
    rows = _records(_found(io, path, start, size), start)
    columns = [Column("offset", kind="number"), *RECORD_COLUMNS]
    return Dump("CommitLog segment", {"start": start, "size": size}, columns, rows, layout, is_damaged)


def _found(io: StoreIO, path: Path, start: int, size: int) -> Iterator[Piece | LostRange | Blank]:
    paths = StorePaths(path.parent.parent)
    # The file is taken as it is: of what length the store's others are is not asked.
    inventory = Inventory(paths.root, Sizes(size, 0, 0, 0), {start: size} if size else {})
    log = IntactRecords(io, inventory, start, positions_of(io, paths).end)
    try:
        yield from log.in_segment(start)
    finally:
        log.close()


def _records(found: Iterator[Piece | LostRange | Blank], start: int) -> Rows:
    for each in found:
        if isinstance(each, Piece):
            for message in decode_records(each.view[each.start : each.stop].data):
                yield {"offset": message.physical_offset - start, **message.to_json()}
        elif isinstance(each, LostRange) and each.written_stop > each.start:
            size = each.written_stop - each.start
            offset = each.start - start
            yield {"offset": offset, "physical_offset": each.start, "size": size, "topic": f"({each.reason})"}
