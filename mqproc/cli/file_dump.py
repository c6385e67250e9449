"""The files of a store explained: what kind each is, which of its bytes are what, and its content as rows.

Formats come from `mqproc.layout`; a file is recognised by where it lies and what it is called.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mqproc.cli import progress_layout, timer_layout
from mqproc.cli.config_dump import dump_config, dump_log, is_config
from mqproc.cli.dump import Dump, Rows
from mqproc.cli.output import Column
from mqproc.cli.segment_dump import dump_segment
from mqproc.cli.store import file_fields as layouts
from mqproc.cli.store.file_fields import Range, Ranges, whole
from mqproc.cli.timer_dump import dump_timer_check, dump_timer_log, dump_timer_wheel
from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.layout import checkpoint, consume_queue, control, error_log, index_file, queue_table
from mqproc.layout import committed_offsets as progress
from mqproc.layout import durable_marks as marks
from mqproc.paths import INDEX_NAME_DIGITS, index_name_time_ms, segment_start
from mqproc.store.index.files import adopted_index_shape
from mqproc.util.units import counted

LAYOUT_COLUMNS = [
    Column("offset", kind="number"),
    Column("size", kind="number"),
    Column("name", "bytes"),
    Column("help", "meaning"),
]
_FIELD_COLUMNS = [*LAYOUT_COLUMNS[:3], Column("value"), LAYOUT_COLUMNS[3]]
_TEXT_FILES = ("abort", "abort.bak", "lock", "read_only")


def dump_file(io: StoreIO, path: Path, options: Options, *, fields: bool = False) -> Dump:
    """Recognise a file and explain it; with `fields` the rows are its fields, which cover every byte.

    Raises CorruptStoreError when it is no file of a store.
    """
    dump = _recognised(io, path.absolute(), options)
    if not fields:
        return dump
    size = io.size_of(path)
    ranges = whole(_fields_of(dump, io, path.absolute(), options), size)
    rows = (each.to_json() for each in ranges)
    return Dump(dump.kind, dump.head, _FIELD_COLUMNS, rows, dump.layout, is_damaged=dump.is_damaged)


def _fields_of(dump: Dump, io: StoreIO, path: Path, options: Options) -> Ranges:
    if dump.kind == "CommitLog segment":
        return layouts.commit_log_fields(layouts.mapped(io, path), dump.layout)
    if dump.kind == "index file":
        return layouts.index_fields(layouts.mapped(io, path), dump.head["slots"])
    if dump.kind == "timer wheel":
        return timer_layout.timer_wheel_fields(layouts.mapped(io, path))
    explain = {
        "ConsumeQueue": layouts.consume_queue_fields,
        "checkpoint": layouts.checkpoint_fields,
        "mark": layouts.mark_fields,
        "control": layouts.control_fields,
        "queue table": layouts.queue_table_fields,
        "topics journal": layouts.journal_fields,
        "progress": progress_layout.progress_fields,
        "errors": progress_layout.error_fields,
        "timer log": timer_layout.timer_log_fields,
        "timer check": timer_layout.timer_check_fields,
    }.get(dump.kind, layouts.text_fields)
    return explain(io.read_file(path))


def _recognised(io: StoreIO, path: Path, options: Options) -> Dump:
    folder = path.parent.name
    if path.name == "checkpoint":
        return _checkpoint(io, path)
    if path.name == "topics.journal":
        return _journal(io, path)
    if path.name in _TEXT_FILES:
        data = io.read_file(path)
        return Dump("text", {"content": data.decode("utf-8", "replace").strip()}, [], iter(()))
    if folder == "marks":
        return _mark(io, path)
    if folder == "mqproc" and path.name == "control":
        return _control(io, path)
    if folder == "mqproc" and path.name in ("queues", "queues.next"):
        return _queue_table(io, path)
    if folder == "mqproc" and path.name == "progress":
        return _progress(io, path)
    if folder == "mqproc" and path.name == "errors":
        return _errors(io, path)
    if folder == "mqproc" and path.name == "log.jsonl":
        return dump_log(io, path)
    if path.name == "timerwheel":
        return dump_timer_wheel(io, path, options.timer_precision_ms)
    if folder == "config" and path.name == "timercheck":
        return dump_timer_check(io, path)
    if folder == "timerlog" and segment_start(path.name) is not None:
        return dump_timer_log(io, path)
    if is_config(path):
        return dump_config(io, path)
    if folder == "commitlog" and segment_start(path.name) is not None:
        return dump_segment(io, path)
    if path.parent.parent.parent.name == "consumequeue" and segment_start(path.name) is not None:
        return _consume_queue(io, path)
    if len(path.name) == INDEX_NAME_DIGITS and path.name.isdigit():
        return _index(io, path, options)
    raise CorruptStoreError(f"{path}: no file of a store that can be explained")


def _checkpoint(io: StoreIO, path: Path) -> Dump:
    found = checkpoint.decode(io.read_file(path))
    rows = (
        {"offset": offset, "name": name, "value": getattr(found, name), "help": text}
        for name, offset, text in layouts.CHECKPOINT_WORDS
    )
    columns = [
        Column("offset", kind="number"),
        Column("name"),
        Column("value", kind="number"),
        Column("help", "meaning"),
    ]
    size = io.size_of(path)
    parts = [Range(0, layouts.CHECKPOINT_END, "words", "five, big-endian, 8 bytes each")]
    return Dump("checkpoint", {"size": size}, columns, rows, list(whole(parts, size)))


def _journal(io: StoreIO, path: Path) -> Dump:
    data = io.read_file(path)
    parts = list(layouts.journal_fields(data))
    columns = [Column("offset", kind="number"), Column("value", "change"), Column("help", "meaning")]
    return Dump("topics journal", {"size": len(data)}, columns, (each.to_json() for each in parts), parts)


def _progress(io: StoreIO, path: Path) -> Dump:
    data = io.read_file(path)
    _check_magic(path, data, progress.MAGIC, progress.HEADER_SIZE)
    columns = [
        Column("group"),
        Column("topic"),
        Column("queue_id", kind="number"),
        Column("next_offset", kind="number"),
        Column("deleted"),
    ]
    layout = list(whole(progress_layout.progress_layout(data), len(data)))
    head = {"size": len(data), "end": progress_layout.used_end(data)}
    return Dump("progress", head, columns, progress_layout.progress_rows(data), layout)


def _errors(io: StoreIO, path: Path) -> Dump:
    data = io.read_file(path)
    _check_magic(path, data, error_log.MAGIC, error_log.FILE_SIZE)
    columns = [
        Column("offset", kind="number"),
        Column("owner"),
        Column("count", kind="number"),
        Column("first_ms", "first", "time_ms"),
        Column("last_ms", "last", "time_ms"),
        Column("text"),
    ]
    layout = list(whole(progress_layout.error_layout(data), len(data)))
    return Dump("errors", {"size": len(data)}, columns, progress_layout.error_rows(data), layout)


def _check_magic(path: Path, data: bytes, magic: int, size: int) -> None:
    if len(data) < size:
        raise CorruptStoreError(f"{path}: {len(data):,} bytes; there must be {size:,}")
    if (found := progress_layout.word_at(data, 0)) != magic:
        raise CorruptStoreError(f"{path}: byte 0: expected the magic {magic:#x}, found {found:#x}")


def _mark(io: StoreIO, path: Path) -> Dump:
    data = io.read_file(path)
    mark = marks.decode(data)
    rows = (_mark_slot(data, slot, mark) for slot in (0, 1))
    columns = [
        Column("slot", kind="number"),
        Column("valid"),
        Column("is_mark"),
        Column("sequence", kind="number"),
        Column("offset", kind="number"),
        Column("store_timestamp_ms", "store time", "time_ms"),
        Column("fingerprint"),
    ]
    spacing = marks.SLOT_SPACING
    parts = [Range(slot * spacing, marks.SLOT_SIZE, f"slot {slot}", "in a page of its own") for slot in (0, 1)]
    return Dump("mark", {"valid": mark is not None}, columns, rows, list(whole(parts, len(data))))


def _mark_slot(data: bytes, slot: int, mark: marks.Mark | None) -> dict[str, Any]:
    start = slot * marks.SLOT_SPACING
    # A slot alone, in a file whose other slot is empty, is what the codec can tell of it.
    found = marks.decode(data[start : start + marks.SLOT_SIZE])
    if found is None:
        return {"slot": slot, "valid": False, "is_mark": False}
    return {
        "slot": slot,
        "valid": True,
        "is_mark": found == mark,
        "sequence": found.sequence,
        "offset": found.offset,
        "store_timestamp_ms": found.store_timestamp_ms,
        "fingerprint": f"{found.fingerprint:08x}",
    }


def _control(io: StoreIO, path: Path) -> Dump:
    data = io.read_file(path)
    if len(data) < control.FILE_SIZE:
        raise CorruptStoreError(f"{path}: {len(data):,} bytes; a control file has {control.FILE_SIZE:,}")
    cells = memoryview(data[: control.FILE_SIZE]).cast("q")
    rows = (
        {
            "offset": word.index * control.WORD_SIZE,
            "name": word.name,
            "value": cells[word.index],
            "unit": word.unit,
            "owner": word.owner,
            "help": word.help,
        }
        for word in control.WORDS.values()
    )
    columns = [
        Column("offset", kind="number"),
        Column("name"),
        Column("value", kind="number"),
        Column("unit"),
        Column("owner"),
        Column("help", "meaning"),
    ]
    head = {"size": len(data), "version": cells[control.HEADER_VERSION]}
    pages = [
        Range(number * control.PAGE_SIZE, control.PAGE_SIZE, f"page of {owner}", "a word in each line of 64 bytes")
        for number, owner in enumerate(("the header", control.SUPERVISOR, *control.ROLES))
    ]
    return Dump("control", head, columns, rows, list(whole(pages, len(data))))


def _queue_table(io: StoreIO, path: Path) -> Dump:
    data = io.read_file(path)
    cells = memoryview(data[: len(data) & ~7]).cast("q")
    if len(data) < queue_table.HEADER_SIZE or cells[queue_table.HEADER_MAGIC] != queue_table.MAGIC:
        raise CorruptStoreError(f"{path}: byte 0: expected the magic {queue_table.MAGIC:#x}")
    if not 0 <= cells[queue_table.HEADER_COUNT] <= (len(data) - queue_table.HEADER_SIZE) // queue_table.ENTRY_SIZE:
        raise CorruptStoreError(
            f"{path}: byte {queue_table.HEADER_COUNT * queue_table.WORD_SIZE}: a count of "
            f"{counted(cells[queue_table.HEADER_COUNT], 'entry')}, for which the file is too short"
        )
    head = {
        "version": cells[queue_table.HEADER_VERSION],
        "capacity": cells[queue_table.HEADER_CAPACITY],
        "hash_slots": cells[queue_table.HEADER_HASH_SLOTS],
        "count": cells[queue_table.HEADER_COUNT],
    }
    columns = [
        Column("number", kind="number"),
        Column("state"),
        Column("topic"),
        Column("queue_id", "queue", "number"),
        Column("min_offset", kind="number"),
        Column("max_offset", kind="number"),
        Column("next_offset", kind="number"),
    ]
    rows = (_queue_entry(data, cells, number) for number in range(head["count"]))
    layout = list(whole(layouts.queue_table_layout(data), len(data)))
    return Dump("queue table", head, columns, rows, layout)


_ENTRY_STATES = {
    queue_table.STATE_FREE: "free",
    queue_table.STATE_LIVE: "live",
    queue_table.STATE_TOMBSTONE: "deleted",
}


def _queue_entry(data: bytes, cells: memoryview[int], number: int) -> dict[str, Any]:
    def word(place: int) -> int:
        return cells[queue_table.entry_word(number, place)]

    start = queue_table.entry_offset(number) + queue_table.TOPIC_OFFSET_BYTES
    first = word(queue_table.FIRST_OFFSET)
    return {
        "number": number,
        "state": _ENTRY_STATES.get(word(queue_table.STATE), "unknown"),
        "topic": data[start : start + word(queue_table.TOPIC_SIZE)].decode("utf-8", "replace"),
        "queue_id": word(queue_table.QUEUE_ID),
        "min_offset": max(first, word(queue_table.MIN_OFFSET)),
        "max_offset": max(first, word(queue_table.MAX_OFFSET)),
        "next_offset": word(queue_table.NEXT_OFFSET),
    }


def _consume_queue(io: StoreIO, path: Path) -> Dump:
    start = segment_start(path.name)
    assert start is not None
    columns = [
        Column("offset", kind="number"),
        Column("queue_offset", kind="number"),
        Column("physical_offset", kind="number"),
        Column("size", kind="number"),
        Column("tags_code", kind="number"),
        Column("filler"),
    ]
    head = {
        "topic": path.parent.parent.name,
        "queue_id": path.parent.name,
        "first_queue_offset": start // consume_queue.UNIT_SIZE,
        "size": io.size_of(path),
    }
    data = io.read_file(path)
    layout = list(whole(layouts.consume_queue_layout(data), len(data)))
    return Dump("ConsumeQueue", head, columns, _units(data, start // consume_queue.UNIT_SIZE), layout)


def _units(data: bytes, first: int) -> Rows:
    for number in range(len(data) // consume_queue.UNIT_SIZE):
        unit = data[number * consume_queue.UNIT_SIZE :][: consume_queue.UNIT_SIZE]
        size = _number(unit, consume_queue.SIZE, consume_queue.TAGS_CODE)
        if not any(unit):
            return
        yield {
            "offset": number * consume_queue.UNIT_SIZE,
            "queue_offset": first + number,
            "physical_offset": _number(unit, consume_queue.PHYSICAL_OFFSET, consume_queue.SIZE),
            "size": size,
            "tags_code": _number(unit, consume_queue.TAGS_CODE, consume_queue.UNIT_SIZE),
            "filler": size in consume_queue.FILLER_SIZES,
        }


def _number(data: bytes, begin: int, end: int) -> int:
    """A big-endian signed field."""
    return int.from_bytes(data[begin:end], "big", signed=True)


def _index(io: StoreIO, path: Path, options: Options) -> Dump:
    slots, _items_max = adopted_index_shape(io, path.parent, options.max_hash_slot_num, options.max_index_num)
    view = layouts.mapped(io, path)
    if len(view) < index_file.HEADER_SIZE:
        raise CorruptStoreError(f"{path}: {len(view):,} bytes; a header takes {index_file.HEADER_SIZE:,}")
    header = bytes(view[: index_file.HEADER_SIZE])
    head: dict[str, Any] = {name: _number(header, at, at + size) for name, at, size, _help in layouts.INDEX_HEADER}
    head |= {"name_timestamp_ms": index_name_time_ms(path.name), "slots": slots, "size": len(view)}
    columns = [
        Column("offset", kind="number"),
        Column("item", kind="number"),
        Column("key_hash", kind="number"),
        Column("physical_offset", kind="number"),
        Column("time_difference_s", "seconds", "number"),
        Column("previous", kind="number"),
    ]
    layout = list(whole(layouts.index_layout(view, slots), len(view)))
    return Dump("index file", head, columns, _items(view, slots, head["count"]), layout)


def _items(view: NDArray[np.uint8], slots: int, count: int) -> Rows:
    for item in range(index_file.FIRST_ITEM, count):
        offset = index_file.item_offset(slots, item)
        data = bytes(view[offset : offset + index_file.ITEM_SIZE])
        if len(data) < index_file.ITEM_SIZE:
            return
        yield {
            "offset": offset,
            "item": item,
            "key_hash": _number(data, index_file.ITEM_KEY_HASH, index_file.ITEM_PHYSICAL_OFFSET),
            "physical_offset": _number(data, index_file.ITEM_PHYSICAL_OFFSET, index_file.ITEM_TIME_DIFFERENCE),
            "time_difference_s": _number(data, index_file.ITEM_TIME_DIFFERENCE, index_file.ITEM_PREVIOUS),
            "previous": _number(data, index_file.ITEM_PREVIOUS, index_file.ITEM_SIZE),
        }


def limited(rows: Rows, most: int) -> Rows:
    """At most so many rows; 0 means all."""
    return itertools.islice(rows, most) if most else rows
