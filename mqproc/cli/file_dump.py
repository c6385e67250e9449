"""The files of a store explained: what kind each is, and its content as rows of named values.

Formats come from `mqproc.layout`; a file is recognised by where it lies and what it is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqproc.cli.log_walk import Hole, walk_segment
from mqproc.cli.output import Column
from mqproc.config import Options
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.layout import checkpoint, consume_queue, control, index_file, marks, queue_table
from mqproc.paths import INDEX_NAME_DIGITS, index_name_time_ms, segment_start
from mqproc.store import rocketmq_json

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Dump:
    """A file's content: one-off values (`head`), then rows."""

    kind: str
    head: dict[str, Any]
    columns: list[Column]
    rows: Rows


def dump_file(io: StoreIO, path: Path, options: Options) -> Dump:
    """Recognise a file and explain it. Raises CorruptStoreError when it is no file of a store."""
    path = path.absolute()
    folder = path.parent.name
    if path.name == "checkpoint":
        return _checkpoint(io, path)
    if folder == "marks":
        return _mark(io, path)
    if folder == "mqproc" and path.name == "control":
        return _control(io, path)
    if folder == "mqproc" and path.name == "queues":
        return _queue_table(io, path)
    if path.suffix == ".json" or path.name.endswith(".json.bak"):
        return Dump("config", {"content": rocketmq_json.parse(io.read_file(path).decode())}, [], iter(()))
    if folder == "commitlog" and segment_start(path.name) is not None:
        return _commit_log(io, path)
    if segment_start(path.name) is not None:
        return _consume_queue(io, path)
    if len(path.name) == INDEX_NAME_DIGITS and path.name.isdigit():
        return _index(io, path, options)
    raise CorruptStoreError(f"{path}: no file of a store that can be explained")


def _checkpoint(io: StoreIO, path: Path) -> Dump:
    found = checkpoint.decode(io.read_file(path))
    words = [
        ("physic_timestamp_ms", checkpoint.PHYSIC_TIMESTAMP, "the log is durable up to this store time"),
        ("logics_timestamp_ms", checkpoint.LOGICS_TIMESTAMP, "the ConsumeQueues are"),
        ("index_timestamp_ms", checkpoint.INDEX_TIMESTAMP, "the index is"),
        ("master_flushed_offset", checkpoint.MASTER_FLUSHED_OFFSET, "used by replicas only"),
        ("confirm_physical_offset", checkpoint.CONFIRM_PHYSICAL_OFFSET, "the log is confirmed below this"),
    ]
    rows = (
        {"offset": offset, "name": name, "value": getattr(found, name), "help": text} for name, offset, text in words
    )
    columns = [
        Column("offset", kind="number"),
        Column("name"),
        Column("value", kind="number"),
        Column("help", "meaning"),
    ]
    return Dump("checkpoint", {"size": io.size_of(path)}, columns, rows)


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
    return Dump("mark", {"valid": mark is not None}, columns, rows)


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
    cells = memoryview(io.read_file(path)).cast("q")
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
    return Dump("control", {"size": cells.nbytes, "version": cells[control.HEADER_VERSION]}, columns, rows)


def _queue_table(io: StoreIO, path: Path) -> Dump:
    data = io.read_file(path)
    cells = memoryview(data).cast("i" if len(data) % 8 else "q")
    if len(data) % 8 or cells[queue_table.HEADER_MAGIC] != queue_table.MAGIC:
        raise CorruptStoreError(f"{path}: byte 0: expected the magic {queue_table.MAGIC:#x}")
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
    return Dump("queue table", head, columns, rows)


_ENTRY_STATES = {
    queue_table.STATE_FREE: "free",
    queue_table.STATE_LIVE: "live",
    queue_table.STATE_TOMBSTONE: "deleted",
}


def _queue_entry(data: bytes, cells: memoryview[int], number: int) -> dict[str, Any]:
    def word(place: int) -> int:
        return cells[queue_table.entry_word(number, place)]

    start = queue_table.entry_offset(number) + queue_table.TOPIC_OFFSET_BYTES
    return {
        "number": number,
        "state": _ENTRY_STATES.get(word(queue_table.STATE), "unknown"),
        "topic": data[start : start + word(queue_table.TOPIC_SIZE)].decode("utf-8", "replace"),
        "queue_id": word(queue_table.QUEUE_ID),
        "min_offset": word(queue_table.MIN_OFFSET),
        "max_offset": word(queue_table.MAX_OFFSET),
        "next_offset": word(queue_table.NEXT_OFFSET),
    }


def _commit_log(io: StoreIO, path: Path) -> Dump:
    start = segment_start(path.name)
    assert start is not None
    columns = [
        Column("physical_offset", kind="number"),
        Column("size", kind="number"),
        Column("topic"),
        Column("queue_id", "queue", "number"),
        Column("queue_offset", kind="number"),
        Column("tag"),
        Column("keys"),
        Column("store_timestamp_ms", "store time", "time_ms"),
    ]
    return Dump("CommitLog segment", {"start": start, "size": io.size_of(path)}, columns, _records(io, path, start))


def _records(io: StoreIO, path: Path, start: int) -> Rows:
    for found in walk_segment(io, path, start):
        if isinstance(found, Hole):
            yield {"physical_offset": found.begin, "size": found.end - found.begin, "topic": f"({found.reason})"}
        else:
            yield from (message.to_json() for message in found)


def _consume_queue(io: StoreIO, path: Path) -> Dump:
    start = segment_start(path.name)
    assert start is not None
    columns = [
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
    return Dump("ConsumeQueue", head, columns, _units(io, path, start // consume_queue.UNIT_SIZE))


def _units(io: StoreIO, path: Path, first: int) -> Rows:
    data = io.read_file(path)
    for number in range(len(data) // consume_queue.UNIT_SIZE):
        unit = data[number * consume_queue.UNIT_SIZE :][: consume_queue.UNIT_SIZE]
        size = _number(unit, consume_queue.SIZE, consume_queue.TAGS_CODE)
        if not any(unit):
            return
        yield {
            "queue_offset": first + number,
            "physical_offset": _number(unit, consume_queue.PHYSICAL_OFFSET, consume_queue.SIZE),
            "size": size,
            "tags_code": _number(unit, consume_queue.TAGS_CODE, consume_queue.UNIT_SIZE),
            "filler": size == consume_queue.FILLER_SIZE,
        }


def _number(data: bytes, begin: int, end: int) -> int:
    """A big-endian signed field."""
    return int.from_bytes(data[begin:end], "big", signed=True)


_INDEX_HEADER = (
    ("begin_timestamp_ms", index_file.BEGIN_TIMESTAMP, index_file.END_TIMESTAMP),
    ("end_timestamp_ms", index_file.END_TIMESTAMP, index_file.BEGIN_PHYSICAL_OFFSET),
    ("begin_physical_offset", index_file.BEGIN_PHYSICAL_OFFSET, index_file.END_PHYSICAL_OFFSET),
    ("end_physical_offset", index_file.END_PHYSICAL_OFFSET, index_file.SLOT_COUNT),
    ("slots_used", index_file.SLOT_COUNT, index_file.ITEM_COUNT),
    ("count", index_file.ITEM_COUNT, index_file.HEADER_SIZE),
)


def _index(io: StoreIO, path: Path, options: Options) -> Dump:
    slots, items = options.max_hash_slot_num, options.max_index_num
    size = io.size_of(path)
    if size != index_file.file_size(slots, items):
        slots = _guess_slots(size, slots)
    fd = io.open(path)
    try:
        header = io.pread(fd, index_file.HEADER_SIZE, 0)
    finally:
        io.close(fd)
    head: dict[str, Any] = {name: _number(header, begin, end) for name, begin, end in _INDEX_HEADER}
    head |= {"name_timestamp_ms": index_name_time_ms(path.name), "slots": slots, "size": size}
    columns = [
        Column("item", kind="number"),
        Column("key_hash", kind="number"),
        Column("physical_offset", kind="number"),
        Column("time_difference_s", "seconds", "number"),
        Column("previous", kind="number"),
    ]
    return Dump("index file", head, columns, _items(io, path, slots, head["count"]))


def _guess_slots(size: int, usual: int) -> int:
    """Stores are usually made with four items a slot: a file of another size is read so, if that comes out even."""
    slots, rest = divmod(size - index_file.HEADER_SIZE, index_file.SLOT_SIZE + 4 * index_file.ITEM_SIZE)
    return usual if rest else slots


def _items(io: StoreIO, path: Path, slots: int, count: int) -> Rows:
    fd = io.open(path)
    try:
        for item in range(index_file.FIRST_ITEM, count):
            data = io.pread(fd, index_file.ITEM_SIZE, index_file.item_offset(slots, item))
            yield {
                "item": item,
                "key_hash": _number(data, index_file.ITEM_KEY_HASH, index_file.ITEM_PHYSICAL_OFFSET),
                "physical_offset": _number(data, index_file.ITEM_PHYSICAL_OFFSET, index_file.ITEM_TIME_DIFFERENCE),
                "time_difference_s": _number(data, index_file.ITEM_TIME_DIFFERENCE, index_file.ITEM_PREVIOUS),
                "previous": _number(data, index_file.ITEM_PREVIOUS, index_file.ITEM_SIZE),
            }
    finally:
        io.close(fd)


def limited(rows: Rows, most: int) -> Rows:
    """At most so many rows; 0 means all."""
    return itertools.islice(rows, most) if most else rows
