"""Which bytes of a store's file are what: ranges that follow each other from its first byte to its last.

`…_layout` tells the large parts, `…_fields` each field of each record, unit, item and word, with its value.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io.store_io import StoreIO
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import checkpoint, consume_queue, control, index_file, queue_table, record
from mqproc.layout import durable_marks as marks
from mqproc.store.commitlog.scan import Blank, LostRange, Piece
from mqproc.util.units import counted


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [offset, offset + size) of a file. `value` is what they say, None when they say nothing by themselves."""

    offset: int
    size: int
    name: str
    help: str = ""
    value: Any = None

    @property
    def end(self) -> int:
        return self.offset + self.size

    def to_json(self) -> dict[str, Any]:
        return {
            "offset": self.offset,
            "size": self.size,
            "name": self.name,
            "value": self.value,
            "help": self.help,
        }


Ranges = Iterator[Range]
UNUSED: Final = "unused"
DAMAGE: Final = "damage"
UNWRITTEN: Final = "unwritten"


def mapped(io: StoreIO, path: Path) -> NDArray[np.uint8]:
    """A file as uint8[n], read-only; an empty one too."""
    fd = io.open(path)
    try:
        size = io.size(fd)
        return as_kernel_array(io.map_as_it_is(fd, size)) if size else np.zeros(0, np.uint8)
    finally:
        io.close(fd)


def whole(ranges: Iterable[Range], size: int) -> Ranges:
    """Ranges in order with what lies between them as unused, up to the file's size; what reaches over it is cut."""
    at = 0
    for each in ranges:
        if each.offset >= size:
            break
        if each.offset > at:
            yield Range(at, each.offset - at, UNUSED)
        cut = min(each.end, size) - each.offset
        yield each if cut == each.size else Range(each.offset, cut, each.name, f"{each.help} (cut short)".strip())
        at = each.offset + cut
    if at < size:
        yield Range(at, size - at, UNUSED)


def _number(data: bytes, at: int, size: int) -> int:
    """A big-endian signed number."""
    return int.from_bytes(data[at : at + size], "big", signed=True)


def _native(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little", signed=True)


# CommitLog


def commit_log_layout(found: Iterable[Piece | LostRange | Blank], base: int, size: int) -> Ranges:
    """Runs of whole records, damage between them, the BLANK, and what was never written.

    `found` lies in the segment of `size` bytes that begins at log position `base`.
    """
    begin = at = records = 0
    for each in found:
        if isinstance(each, Piece):
            records += each.records
            at = each.stop
            continue
        if at > begin:
            yield _run(begin, at, records)
            records = 0
        if isinstance(each, Blank):
            yield Range(at, record.BLANK_SIZE, "blank", "the segment ends here")
            begin = at + record.BLANK_SIZE
            if begin < size:
                yield Range(begin, size - begin, "rest", "never read")
            return
        begin = at
        at = each.written_stop - base
        if at > begin:
            yield Range(begin, at - begin, DAMAGE, each.reason)
        begin = at
    if at > begin:
        yield _run(begin, at, records)
    if at < size:
        yield Range(at, size - at, UNWRITTEN, "zeros: the log goes on here")


def _run(begin: int, end: int, records: int) -> Range:
    return Range(begin, end - begin, "records", f"{counted(records, 'whole record')}")


_RECORD_HELP: Final = {
    "total_size": "of the whole record",
    "magic": "V1 daa320a7, V2 daa320ab",
    "body_crc": "CRC-32 of the body without its highest bit",
    "queue_id": "",
    "flag": "the producer's own",
    "queue_offset": "place in its queue",
    "physical_offset": "place in the log",
    "sys_flag": "1 compressed, 4/8/12 prepared/commit/rollback, 16/32 IPv6 hosts",
    "born_timestamp_ms": "producer's clock",
    "born_host": "producer's address and port",
    "store_timestamp_ms": "writer's clock",
    "store_host": "broker's address and port",
    "reconsume_times": "",
    "prepared_transaction_offset": "of the half message",
    "body_length": "",
    "body": "as it was stored",
    "topic_length": "one byte in V1, two in V2",
    "topic": "",
    "properties_length": "",
    "properties": "name 01 value 02 …",
}


def record_fields(data: bytes, at: int) -> Ranges:
    """Each field of the whole record at `at`."""
    sys_flag = _number(data, at + record.SYS_FLAG, 4)
    v2 = _number(data, at + record.MAGIC, 4) == record.MAGIC_V2
    born = record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_BORN_HOST_V6 else record.HOST_V4_SIZE
    store = record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_STORE_HOST_V6 else record.HOST_V4_SIZE
    sizes: list[tuple[str, int]] = [
        ("total_size", 4), ("magic", 4), ("body_crc", 4), ("queue_id", 4), ("flag", 4), ("queue_offset", 8),
        ("physical_offset", 8), ("sys_flag", 4), ("born_timestamp_ms", 8), ("born_host", born),
        ("store_timestamp_ms", 8), ("store_host", store), ("reconsume_times", 4), ("prepared_transaction_offset", 8),
        ("body_length", 4), ("body", -1), ("topic_length", 2 if v2 else 1), ("topic", -1), ("properties_length", 2),
        ("properties", -1),
    ]  # fmt: skip
    last = 0
    for name, size in sizes:
        if size < 0:
            size = max(last, 0)
            raw = data[at : at + size]
            value: Any = f"{size:,} bytes" if name == "body" else raw.decode("utf-8", "replace")
        elif name.endswith("_host"):
            raw = data[at : at + size]
            value = f"{ipaddress.ip_address(raw[:-4])} {_number(raw, size - 4, 4)}"
        else:
            last = value = _number(data, at, size)
            if name == "magic":
                value = f"{value & 0xFFFFFFFF:08x}"
        if size:
            yield Range(at, size, name, _RECORD_HELP[name], value)
        at += size


def commit_log_fields(view: NDArray[np.uint8], layout: Iterable[Range]) -> Ranges:
    """Each field of each record of a segment whose layout this is."""
    for part in layout:
        if part.name == "records":
            at = part.offset
            while at < part.end:
                data = bytes(view[at : at + _number(bytes(view[at : at + 4]), 0, 4)])
                for each in record_fields(data, 0):
                    yield Range(at + each.offset, each.size, each.name, each.help, each.value)
                at += len(data)
        elif part.name == "blank":
            remaining = _number(bytes(view[part.offset : part.offset + 4]), 0, 4)
            yield Range(part.offset, 4, "remaining", "bytes from here to the segment's end", remaining)
            yield Range(part.offset + 4, 4, "magic", "BLANK: the log goes on in the next segment", "cbd43194")
        else:
            yield part


# ConsumeQueue


def _unit_kind(unit: bytes) -> str:
    if not any(unit):
        return UNWRITTEN
    is_filler = _number(unit, consume_queue.SIZE, 4) in consume_queue.FILLER_SIZES
    return "fillers" if is_filler else "units"


_UNIT_HELP: Final = {
    "fillers": "places in the queue that no record has",
    "units": "one for each message, 20 bytes",
    UNWRITTEN: "zeros: the queue goes on here",
}


def consume_queue_layout(data: bytes) -> Ranges:
    """Runs of fillers, of units, and what was never written."""
    start, kind = 0, ""
    for at in range(0, len(data) - len(data) % consume_queue.UNIT_SIZE, consume_queue.UNIT_SIZE):
        found = _unit_kind(data[at : at + consume_queue.UNIT_SIZE])
        if found != kind:
            if at > start:
                yield _units(start, at, kind)
            start, kind = at, found
    end = len(data) - len(data) % consume_queue.UNIT_SIZE
    if end > start:
        yield _units(start, end, kind)


def _units(start: int, end: int, kind: str) -> Range:
    count = (end - start) // consume_queue.UNIT_SIZE
    return Range(start, end - start, kind, f"{count:,}: {_UNIT_HELP[kind]}")


def consume_queue_fields(data: bytes) -> Ranges:
    """The three fields of each unit."""
    for part in consume_queue_layout(data):
        if part.name == UNWRITTEN:
            yield part
            continue
        for at in range(part.offset, part.end, consume_queue.UNIT_SIZE):
            yield Range(at, 8, "physical_offset", "where the record begins in the log", _number(data, at, 8))
            yield Range(at + 8, 4, "size", "of the record; 7fffffff in a filler", _number(data, at + 8, 4))
            yield Range(at + 12, 8, "tags_code", "hash of the tag, or time to deliver at", _number(data, at + 12, 8))


# Index

INDEX_HEADER: Final = (
    ("begin_timestamp_ms", index_file.BEGIN_TIMESTAMP, 8, "store time of the first entry's record"),
    ("end_timestamp_ms", index_file.END_TIMESTAMP, 8, "of the last one's"),
    ("begin_physical_offset", index_file.BEGIN_PHYSICAL_OFFSET, 8, "where the first entry's record begins"),
    ("end_physical_offset", index_file.END_PHYSICAL_OFFSET, 8, "where the last one's does"),
    ("slots_used", index_file.SLOT_COUNT, 4, "slots that lead to an item"),
    ("count", index_file.ITEM_COUNT, 4, "number of the next item"),
)


def index_layout(view: NDArray[np.uint8], slots: int) -> Ranges:
    """Header, slots, items in use, items to come."""
    yield Range(0, index_file.HEADER_SIZE, "header", "times and offsets of the first and last entry, counts")
    yield Range(index_file.HEADER_SIZE, index_file.SLOT_SIZE * slots, "slots", f"{slots:,}: newest item by key hash")
    first = index_file.item_offset(slots, index_file.FIRST_ITEM)
    yield Range(index_file.items_start(slots), index_file.ITEM_SIZE, "item 0", "never used")
    count = max(index_file.FIRST_ITEM, _number(bytes(view[: index_file.HEADER_SIZE]), index_file.ITEM_COUNT, 4))
    end = min(index_file.item_offset(slots, count), len(view))
    if end > first:
        items = (end - first) // index_file.ITEM_SIZE
        yield Range(first, end - first, "items", f"{items:,}: key hash, record, seconds, item before")
    if end < len(view):
        yield Range(end, len(view) - end, "free items", f"{(len(view) - end) // index_file.ITEM_SIZE:,} more fit")


_ITEM_FIELDS: Final = (
    ("key_hash", index_file.ITEM_KEY_HASH, 4, "of topic#key, without its sign"),
    ("physical_offset", index_file.ITEM_PHYSICAL_OFFSET, 8, "where the record begins in the log"),
    ("time_difference_s", index_file.ITEM_TIME_DIFFERENCE, 4, "seconds after the file's begin"),
    ("previous", index_file.ITEM_PREVIOUS, 4, "item before it in its slot's chain, 0 = none"),
)


def index_fields(view: NDArray[np.uint8], slots: int) -> Ranges:
    """Each field of header and items; slots that lead nowhere in runs."""
    for part in index_layout(view, slots):
        data = bytes(view[part.offset : part.end]) if part.name in ("header", "slots") else b""
        if part.name == "header":
            for name, at, size, text in INDEX_HEADER:
                yield Range(at, size, name, text, _number(data, at, size))
        elif part.name == "slots":
            yield from _slots(data, part.offset)
        elif part.name == "items":
            for at in range(part.offset, part.end, index_file.ITEM_SIZE):
                item = bytes(view[at : at + index_file.ITEM_SIZE])
                for name, place, size, text in _ITEM_FIELDS:
                    yield Range(at + place, size, name, text, _number(item, place, size))
        else:
            yield part


def _slots(data: bytes, offset: int) -> Ranges:
    empty = 0
    for at in range(0, len(data), index_file.SLOT_SIZE):
        item = _number(data, at, index_file.SLOT_SIZE)
        if item == 0:
            empty += index_file.SLOT_SIZE
            continue
        if empty:
            yield Range(offset + at - empty, empty, "empty slots", f"{empty // index_file.SLOT_SIZE:,}")
            empty = 0
        number = at // index_file.SLOT_SIZE
        yield Range(offset + at, index_file.SLOT_SIZE, f"slot {number}", "its newest item", item)
    if empty:
        yield Range(offset + len(data) - empty, empty, "empty slots", f"{empty // index_file.SLOT_SIZE:,}")


# Small files

CHECKPOINT_WORDS: Final = (
    ("physic_timestamp_ms", checkpoint.PHYSIC_TIMESTAMP, "the log is durable up to this store time"),
    ("logics_timestamp_ms", checkpoint.LOGICS_TIMESTAMP, "the ConsumeQueues are"),
    ("index_timestamp_ms", checkpoint.INDEX_TIMESTAMP, "the index is"),
    ("master_flushed_offset", checkpoint.MASTER_FLUSHED_OFFSET, "used by replicas only"),
    ("confirm_physical_offset", checkpoint.CONFIRM_PHYSICAL_OFFSET, "the log is confirmed below this"),
)


CHECKPOINT_END: Final = CHECKPOINT_WORDS[-1][1] + 8


def checkpoint_fields(data: bytes) -> Ranges:
    """The five words."""
    for name, at, text in CHECKPOINT_WORDS:
        yield Range(at, 8, name, text, _number(data, at, 8))


def mark_fields(data: bytes) -> Ranges:
    """The fields of both slots."""
    for slot in (0, 1):
        start = slot * marks.SLOT_SPACING
        for name, place, size, text in marks.SLOT_FIELDS:
            at = start + place
            if at + size <= len(data):
                yield Range(at, size, f"slot {slot} {name}", text, _native(data, at, size))


def control_fields(data: bytes) -> Ranges:
    """Each word, in a line of 64 bytes of its own."""
    for word in sorted(control.WORDS.values(), key=lambda word: word.index):
        at = word.index * control.WORD_SIZE
        if at + control.WORD_SIZE <= len(data):
            unit = f" ({word.unit})" if word.unit else ""
            text = f"{word.help}{unit}; stored by the {word.owner}"
            yield Range(at, control.WORD_SIZE, word.name, text, _native(data, at))


_TABLE_HEADER: Final = (
    ("magic", queue_table.HEADER_MAGIC),
    ("version", queue_table.HEADER_VERSION),
    ("capacity", queue_table.HEADER_CAPACITY),
    ("hash_slots", queue_table.HEADER_HASH_SLOTS),
    ("count", queue_table.HEADER_COUNT),
    ("live", queue_table.HEADER_LIVE),
    ("deletions", queue_table.HEADER_DELETIONS),
)
_TABLE_ENTRY: Final = (
    ("state", queue_table.STATE),
    ("queue_id", queue_table.QUEUE_ID),
    ("topic_size", queue_table.TOPIC_SIZE),
    ("topic_hash", queue_table.TOPIC_HASH),
    ("generation", queue_table.GENERATION),
    ("first_offset", queue_table.FIRST_OFFSET),
    ("deleted_at", queue_table.DELETED_AT),
    ("deleted_next", queue_table.DELETED_NEXT),
    ("topic", queue_table.TOPIC_OFFSET_BYTES // queue_table.WORD_SIZE),
    ("next_offset", queue_table.NEXT_OFFSET),
    ("max_offset", queue_table.MAX_OFFSET),
    ("last_physical_end", queue_table.LAST_PHYSICAL_END),
    ("last_store_timestamp_ms", queue_table.LAST_STORE_TIMESTAMP_MS),
    ("min_offset", queue_table.MIN_OFFSET),
)


def queue_table_layout(data: bytes) -> Ranges:
    """Header, entries in use, entries to come, the hash."""
    places = (queue_table.HEADER_CAPACITY, queue_table.HEADER_COUNT)
    capacity, count = (_native(data, word * queue_table.WORD_SIZE) for word in places)
    yield Range(0, queue_table.HEADER_SIZE, "header", "magic, version, capacity, counts")
    first, used = queue_table.entry_offset(0), queue_table.entry_offset(max(0, count))
    if used > first:
        yield Range(first, used - first, "entries", f"{counted(count, 'queue')}, 512 bytes each")
    end = queue_table.hash_offset(max(0, capacity))
    if end > used:
        yield Range(used, end - used, "free entries", f"room for {counted(capacity - count, 'more queue')}")
    if len(data) > end:
        yield Range(end, len(data) - end, "hash", "entry number + 1 by topic and queue id")


def queue_table_fields(data: bytes) -> Ranges:
    """Each word of header and entries."""
    for name, word in _TABLE_HEADER:
        place = word * queue_table.WORD_SIZE
        yield Range(place, queue_table.WORD_SIZE, name, "", _native(data, place))
    for part in queue_table_layout(data):
        if part.name == "entries":
            for at in range(part.offset, min(part.end, len(data)), queue_table.ENTRY_SIZE):
                yield from _entry(data, at)
        elif part.name != "header":
            yield part


def _entry(data: bytes, at: int) -> Ranges:
    size = _native(data, at + queue_table.TOPIC_SIZE * 8)
    for name, word in _TABLE_ENTRY:
        place = at + word * queue_table.WORD_SIZE
        if name == "topic":
            topic = data[place : place + max(0, min(size, queue_table.TOPIC_BYTES_MAX))]
            if topic:
                yield Range(place, len(topic), name, "", topic.decode("utf-8", "replace"))
        else:
            yield Range(place, queue_table.WORD_SIZE, name, "", _native(data, place))


def journal_fields(data: bytes) -> Ranges:
    """Each line: a change of a topic; a last one without its end was never acknowledged."""
    at = 0
    for line in data.splitlines(keepends=True):
        torn = "" if line.endswith(b"\n") else "; torn, so it was never acknowledged"
        text = f"topic, its queues (0: deleted), its permissions{torn}"
        yield Range(at, len(line), "change", text, line.decode("utf-8", "replace").rstrip("\n"))
        at += len(line)


def text_fields(data: bytes) -> Ranges:
    """A small text."""
    if data:
        yield Range(0, len(data), "text", "", data.decode("utf-8", "replace").strip())
