"""The formats of a store's files for `mqproc store dump`.

Positions and meanings of fields come from the declarations in `mqproc.layout`.

    layout   large parts of a file, from its first byte to its last
    fields   the same bytes, field by field, with values
    rows     its records, units, items, entries or words
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from mqproc.cli.output import OutputColumn, output_columns
from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import (
    WORD_SIZE,
    Field,
    checkpoint,
    committed_offsets,
    consume_queue,
    control,
    durable_marks,
    error_log,
    index_file,
    queue_table,
    record,
    timer_files,
)
from mqproc.layout.record_codec import decode_records
from mqproc.paths import StorePaths, index_name_time_ms, segment_start
from mqproc.store.commitlog.scan import Blank, IntactRecords, LostRange, RecordRun
from mqproc.store.index.files import adopted_index_shape
from mqproc.store.verify.inventory import Inventory, Sizes
from mqproc.store.verify.verifier import positions_of
from mqproc.util.units import counted

Rows = Iterator[dict[str, Any]]
UNUSED: Final = "unused"
DAMAGE: Final = "damage"
UNWRITTEN: Final = "unwritten"
_LITTLE: Final = "little"


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [offset, offset + size) of a file, with their value or None."""

    offset: int
    size: int
    name: str
    help: str = ""
    value: Any = None

    @property
    def end(self) -> int:
        return self.offset + self.size

    def to_json(self) -> dict[str, Any]:
        return {"offset": self.offset, "size": self.size, "name": self.name, "value": self.value, "help": self.help}


Ranges = Iterator[ByteRange]


@dataclass(frozen=True)
class StoreFile:
    """A file to be explained, by its absolute path."""

    io: StoreIO
    path: Path
    options: Options

    @cached_property
    def data(self) -> bytes:
        return self.io.read_file(self.path)

    @cached_property
    def view(self) -> NDArray[np.uint8]:
        """The file mapped read-only, for large files."""
        fd = self.io.open(self.path)
        try:
            size = self.io.size(fd)
            return as_kernel_array(self.io.map_without_filling_holes(fd, size)) if size else np.zeros(0, np.uint8)
        finally:
            self.io.close(fd)

    @property
    def start(self) -> int:
        """The position in the file's name."""
        start = segment_start(self.path.name)
        assert start is not None
        return start

    def check_size(self, needed: int, what: str) -> None:
        if len(self.data) < needed:
            raise CorruptStoreError(f"{self.path}: {len(self.data):,} bytes; {what} {needed:,}")


Explanations = Mapping[str, Callable[[ByteRange], Ranges]]


@dataclass
class FileDump:
    """Explanation of a file: single values (`head`), rows, large parts (`layout`), fields.

    `parts` of the layout are in order; those whose name is in `explained` have fields.
    """

    kind: str
    head: dict[str, Any]
    columns: list[OutputColumn]
    rows: Rows
    parts: Iterable[ByteRange]
    size: int
    explained: Explanations = field(default_factory=dict)
    is_damaged: bool = False

    @cached_property
    def layout(self) -> list[ByteRange]:
        return list(fill_gaps(self.parts, self.size))

    def fields(self) -> Ranges:
        """Every byte of the file, field by field."""
        for part in self.layout or self.parts:
            yield from self.explained[part.name](part) if part.name in self.explained else (part,)


def fill_gaps(ranges: Iterable[ByteRange], size: int) -> Ranges:
    """Add ranges for unused bytes between others, and cut them at the file's size."""
    at = 0
    for each in ranges:
        if each.offset >= size:
            break
        if each.offset > at:
            yield ByteRange(at, each.offset - at, UNUSED)
        cut = min(each.end, size) - each.offset
        yield each if cut == each.size else ByteRange(each.offset, cut, each.name, f"{each.help} (cut short)".strip())
        at = each.offset + cut
    if at < size:
        yield ByteRange(at, size - at, UNUSED)


def _number(data: bytes, at: int, size: int, order: Literal["big", "little"] = "big", *, signed: bool = True) -> int:
    return int.from_bytes(data[at : at + size], order, signed=signed)


def _word(data: bytes, index: int) -> int:
    return _number(data, index * WORD_SIZE, WORD_SIZE, _LITTLE)


def _walk(
    declared: Iterable[Field],
    data: bytes,
    at: int = 0,
    order: Literal["big", "little"] = "big",
    *,
    base: int = 0,
    signed: bool = True,
) -> Ranges:
    """The fields of the structure at byte `at` of `data`; `base` is the file offset of `data`."""
    for each in declared:
        value = _number(data, at + each.offset, each.size, order, signed=signed)
        yield ByteRange(base + at + each.offset, each.size, each.name, each.help, value)


def _row(columns: Sequence[OutputColumn], *values: Any) -> dict[str, Any]:
    """A row of these values, in the order of the columns."""
    return {column.name: value for column, value in zip(columns, values, strict=True)}


def _values(declared: Iterable[Field], data: bytes, at: int = 0) -> dict[str, int]:
    return {each.name: _number(data, at + each.offset, each.size) for each in declared}


# CommitLog

RECORD_COLUMNS: Final = output_columns(
    "physical_offset:number, size:number, topic, queue_id:number:queue, queue_offset:number, tag, keys",
    "store_timestamp_ms:time_ms:store time",
)


def commitlog_segment(file: StoreFile) -> FileDump:
    """A segment in a store. In a running store only published records count."""
    size = file.io.size_of(file.path)
    found = FileDump(
        "CommitLog segment",
        {"start": file.start, "size": size},
        [*output_columns("offset:number"), *RECORD_COLUMNS],
        _segment_rows(_runs_in(file, size), file.start),
        _segment_layout(_runs_in(file, size), file.start, size),
        size,
        {"records": lambda part: _run_fields(file.view, part), "blank": lambda part: _blank_fields(file.view, part)},
    )
    found.is_damaged = any(part.name == DAMAGE for part in found.layout)
    return found


def _runs_in(file: StoreFile, size: int) -> Iterator[RecordRun | LostRange | Blank]:
    paths = StorePaths(file.path.parent.parent)
    # The segment is read with its own size, whatever size the store's other segments have.
    inventory = Inventory(paths.root, Sizes(size, 0, 0, 0), {file.start: size} if size else {})
    log = IntactRecords(file.io, inventory, file.start, positions_of(file.io, paths).end)
    try:
        yield from log.in_segment(file.start)
    finally:
        log.close()


def _segment_layout(runs: Iterable[RecordRun | LostRange | Blank], base: int, size: int) -> Ranges:
    """Runs of records, damage, the BLANK, and unwritten bytes of a segment at position `base`."""
    begin = at = records = 0
    for each in runs:
        if isinstance(each, RecordRun):
            records += each.records
            at = each.stop
            continue
        if at > begin:
            yield ByteRange(begin, at - begin, "records", counted(records, "whole record"))
            records = 0
        if isinstance(each, Blank):
            yield ByteRange(at, record.BLANK_SIZE, "blank", "the segment ends here")
            begin = at + record.BLANK_SIZE
            if begin < size:
                yield ByteRange(begin, size - begin, "rest", "never read")
            return
        begin = at
        at = each.written_stop - base
        if at > begin:
            yield ByteRange(begin, at - begin, DAMAGE, each.reason)
        begin = at
    if at > begin:
        yield ByteRange(begin, at - begin, "records", counted(records, "whole record"))
    if at < size:
        yield ByteRange(at, size - at, UNWRITTEN, "zeros: the next record is written here")


def _segment_rows(runs: Iterator[RecordRun | LostRange | Blank], start: int) -> Rows:
    for each in runs:
        if isinstance(each, RecordRun):
            for message in decode_records(each.view[each.start : each.stop].data):
                yield {"offset": message.physical_offset - start, **message.to_json()}
        elif isinstance(each, LostRange) and each.written_stop > each.start:
            size = each.written_stop - each.start
            offset = each.start - start
            yield {"offset": offset, "physical_offset": each.start, "size": size, "topic": f"({each.reason})"}


def _run_fields(view: NDArray[np.uint8], part: ByteRange) -> Ranges:
    at = part.offset
    while at < part.end:
        data = bytes(view[at : at + _number(bytes(view[at : at + 4]), 0, 4)])
        yield from _record_fields(data, at)
        at += len(data)


def _record_fields(data: bytes, base: int) -> Ranges:
    """Each field of a whole record that begins at byte `base` of the file."""
    sys_flag = _number(data, record.SYS_FLAG, 4)
    sizes = {
        "born_host": record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_BORN_HOST_V6 else record.HOST_V4_SIZE,
        "store_host": record.HOST_V6_SIZE if sys_flag & record.SYS_FLAG_STORE_HOST_V6 else record.HOST_V4_SIZE,
        "topic_length": 2 if _number(data, record.MAGIC, 4) == record.MAGIC_V2 else 1,
    }
    at = last = 0
    for name, declared_size, text in record.FIELDS:
        size = sizes.get(name, declared_size)
        if size < 0:
            size = max(last, 0)
            value: Any = f"{size:,} bytes" if name == "body" else data[at : at + size].decode("utf-8", "replace")
        elif name.endswith("_host"):
            value = f"{ipaddress.ip_address(data[at : at + size - 4])} {_number(data, at + size - 4, 4)}"
        else:
            last = value = _number(data, at, size)
            if name == "magic":
                value = f"{value & 0xFFFFFFFF:08x}"
        if size:
            yield ByteRange(base + at, size, name, text, value)
        at += size


def _blank_fields(view: NDArray[np.uint8], part: ByteRange) -> Ranges:
    remaining, magic = _walk(record.BLANK_FIELDS, bytes(view[part.offset : part.end]), base=part.offset)
    yield remaining
    yield ByteRange(magic.offset, magic.size, magic.name, magic.help, f"{magic.value & 0xFFFFFFFF:08x}")


# ConsumeQueue

_UNIT_KINDS: Final = {
    "fillers": "queue offsets without a record",
    "units": "one for each message, 20 bytes",
    UNWRITTEN: "zeros: the next unit is written here",
}


def consumequeue_file(file: StoreFile) -> FileDump:
    """A file of a queue's units."""
    first = file.start // consume_queue.UNIT_SIZE
    head = {
        "topic": file.path.parent.parent.name,
        "queue_id": file.path.parent.name,
        "first_queue_offset": first,
        "size": len(file.data),
    }

    def fields(part: ByteRange) -> Ranges:
        for at in range(part.offset, part.end, consume_queue.UNIT_SIZE):
            yield from _walk(consume_queue.UNIT_FIELDS, file.data, at)

    return FileDump(
        "ConsumeQueue",
        head,
        output_columns(
            "offset:number, queue_offset:number, physical_offset:number, size:number, tags_code:number, filler"
        ),
        _unit_rows(file.data, first),
        _unit_runs(file.data),
        len(file.data),
        {"units": fields, "fillers": fields},
    )


def _unit_runs(data: bytes) -> Ranges:
    """Runs of fillers, of units, and unwritten bytes."""
    size = consume_queue.UNIT_SIZE
    end = len(data) - len(data) % size
    start, kind = 0, ""
    for at in range(0, end + 1, size):
        found = _unit_kind(data[at : at + size]) if at < end else ""
        if found != kind:
            if at > start:
                yield ByteRange(start, at - start, kind, f"{(at - start) // size:,}: {_UNIT_KINDS[kind]}")
            start, kind = at, found


def _unit_kind(unit: bytes) -> str:
    if not any(unit):
        return UNWRITTEN
    return "fillers" if _number(unit, consume_queue.SIZE, 4) in consume_queue.FILLER_SIZES else "units"


def _unit_rows(data: bytes, first: int) -> Rows:
    for number in range(len(data) // consume_queue.UNIT_SIZE):
        at = number * consume_queue.UNIT_SIZE
        if not any(data[at : at + consume_queue.UNIT_SIZE]):
            return
        unit = _values(consume_queue.UNIT_FIELDS, data, at)
        is_filler = unit["size"] in consume_queue.FILLER_SIZES
        yield {"offset": at, "queue_offset": first + number, **unit, "filler": is_filler}


# Index


def message_index(file: StoreFile) -> FileDump:
    """An index file: header, slots, items."""
    options = file.options
    slots, _items_max = adopted_index_shape(file.io, file.path.parent, options.max_hash_slot_num, options.max_index_num)
    view = file.view
    if len(view) < index_file.HEADER_SIZE:
        raise CorruptStoreError(f"{file.path}: {len(view):,} bytes; a header takes {index_file.HEADER_SIZE:,}")
    head: dict[str, Any] = _values(index_file.HEADER_FIELDS, bytes(view[: index_file.HEADER_SIZE]))
    count = head["count"]
    head |= {"name_timestamp_ms": index_name_time_ms(file.path.name), "slots": slots, "size": len(view)}

    def items(part: ByteRange) -> Ranges:
        for at in range(part.offset, part.end, index_file.ITEM_SIZE):
            yield from _walk(index_file.ITEM_FIELDS, bytes(view[at : at + index_file.ITEM_SIZE]), base=at)

    return FileDump(
        "index file",
        head,
        output_columns(
            "offset:number, item:number, key_hash:number, physical_offset:number, time_difference_s:number:seconds",
            "previous:number",
        ),
        _item_rows(view, slots, count),
        _index_parts(len(view), slots, count),
        len(view),
        {
            "header": lambda part: _walk(index_file.HEADER_FIELDS, bytes(view[: part.end])),
            "slots": lambda part: _hash_slots(bytes(view[part.offset : part.end]), part.offset),
            "items": items,
        },
    )


def _index_parts(size: int, slots: int, count: int) -> Ranges:
    yield ByteRange(0, index_file.HEADER_SIZE, "header", "times and offsets of the first and last entry, counts")
    yield ByteRange(
        index_file.HEADER_SIZE, index_file.SLOT_SIZE * slots, "slots", f"{slots:,}: newest item by key hash"
    )
    yield ByteRange(index_file.items_start(slots), index_file.ITEM_SIZE, "item 0", "never used")
    first = index_file.item_offset(slots, index_file.FIRST_ITEM)
    end = min(index_file.item_offset(slots, max(index_file.FIRST_ITEM, count)), size)
    if end > first:
        items = (end - first) // index_file.ITEM_SIZE
        yield ByteRange(first, end - first, "items", f"{items:,}: key hash, record, seconds, previous item")
    if end < size:
        yield ByteRange(end, size - end, "free items", f"{(size - end) // index_file.ITEM_SIZE:,} more fit")


def _hash_slots(data: bytes, offset: int) -> Ranges:
    """Each used slot, and runs of empty slots."""
    empty = 0
    for at in range(0, len(data), index_file.SLOT_SIZE):
        item = _number(data, at, index_file.SLOT_SIZE)
        if item == 0:
            empty += index_file.SLOT_SIZE
            continue
        if empty:
            yield ByteRange(offset + at - empty, empty, "empty slots", f"{empty // index_file.SLOT_SIZE:,}")
            empty = 0
        number = at // index_file.SLOT_SIZE
        yield ByteRange(offset + at, index_file.SLOT_SIZE, f"slot {number}", "its newest item", item)
    if empty:
        yield ByteRange(offset + len(data) - empty, empty, "empty slots", f"{empty // index_file.SLOT_SIZE:,}")


def _item_rows(view: NDArray[np.uint8], slots: int, count: int) -> Rows:
    for item in range(index_file.FIRST_ITEM, count):
        offset = index_file.item_offset(slots, item)
        data = bytes(view[offset : offset + index_file.ITEM_SIZE])
        if len(data) < index_file.ITEM_SIZE:
            return
        yield {"offset": offset, "item": item, **_values(index_file.ITEM_FIELDS, data)}


# Checkpoint and durable marks


_FIELD_COLUMNS: Final = output_columns("offset:number, name, value:number, help:text:meaning")


def _field_rows(fields: Iterable[ByteRange]) -> Rows:
    return (_row(_FIELD_COLUMNS, each.offset, each.name, each.value, each.help) for each in fields)


def checkpoint_file(file: StoreFile) -> FileDump:
    """RocketMQ's checkpoint."""
    fields = list(_walk(checkpoint.FIELDS, file.data.ljust(checkpoint.FILE_SIZE, b"\0")))
    words = ByteRange(0, fields[-1].end, "words", "six, big-endian, 8 bytes each")
    rows = _field_rows(fields)
    head, size = {"size": len(file.data)}, len(file.data)
    return FileDump("checkpoint", head, _FIELD_COLUMNS, rows, [words], size, {"words": lambda part: iter(fields)})


def durable_mark(file: StoreFile) -> FileDump:
    """A durable mark: two slots, each in a page of its own."""
    data, spacing = file.data, durable_marks.SLOT_SPACING
    mark = durable_marks.decode(data)
    columns = output_columns(
        "slot:number, valid, is_mark, sequence:number, offset:number, store_timestamp_ms:time_ms:store time",
        "fingerprint",
    )
    parts = [
        ByteRange(slot * spacing, durable_marks.SLOT_SIZE, f"slot {slot}", "in a page of its own") for slot in (0, 1)
    ]

    def fields(part: ByteRange) -> Ranges:
        for each in _walk(durable_marks.SLOT_FIELDS, data, part.offset, _LITTLE):
            yield ByteRange(each.offset, each.size, f"{part.name} {each.name}", each.help, each.value)

    rows = (_mark_row(data, slot, mark) for slot in (0, 1))
    explained = {part.name: fields for part in parts}
    return FileDump("mark", {"valid": mark is not None}, columns, rows, parts, len(data), explained)


def _mark_row(data: bytes, slot: int, mark: durable_marks.Mark | None) -> dict[str, Any]:
    start = slot * durable_marks.SLOT_SPACING
    # Decode the slot alone, as a file whose other slot is empty.
    found = durable_marks.decode(data[start : start + durable_marks.SLOT_SIZE])
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


# Shared memory: control file, queue table


def control_file(file: StoreFile) -> FileDump:
    """Every word of the control file, each in a cache line of its own."""
    data, size = file.data, control.WORD_SIZE
    file.check_size(control.FILE_SIZE, "a control file has")
    words = sorted(control.WORDS.values(), key=lambda word: word.index)
    columns = output_columns("offset:number, name, value:number, unit, owner, help:text:meaning")
    rows = (
        _row(columns, word.index * size, word.name, _word(data, word.index), word.unit, word.owner, word.help)
        for word in control.WORDS.values()
    )
    pages = [
        ByteRange(number * control.PAGE_SIZE, control.PAGE_SIZE, f"page of {owner}", "a word in each line of 64 bytes")
        for number, owner in enumerate(("the header", control.SUPERVISOR, *control.ROLES))
    ]

    def fields(part: ByteRange) -> Ranges:
        for word in words:
            if part.offset <= word.index * size < part.end:
                text = f"{word.help}{f' ({word.unit})' if word.unit else ''}; stored by the {word.owner}"
                yield ByteRange(word.index * size, size, word.name, text, _word(data, word.index))

    head = {"size": len(data), "version": _word(data, control.HEADER_VERSION)}
    return FileDump("control", head, columns, rows, pages, len(data), {page.name: fields for page in pages})


_ENTRY_STATES: Final = {
    queue_table.STATE_FREE: "free",
    queue_table.STATE_LIVE: "live",
    queue_table.STATE_TOMBSTONE: "deleted",
}


def queue_table_file(file: StoreFile) -> FileDump:
    """The queue table: header, entries, hash."""
    data = file.data
    if len(data) < queue_table.HEADER_SIZE or _word(data, queue_table.HEADER_MAGIC) != queue_table.MAGIC:
        raise CorruptStoreError(f"{file.path}: byte 0: expected the magic {queue_table.MAGIC:#x}")
    count, capacity = _word(data, queue_table.HEADER_COUNT), _word(data, queue_table.HEADER_CAPACITY)
    if not 0 <= count <= (len(data) - queue_table.HEADER_SIZE) // queue_table.ENTRY_SIZE:
        raise CorruptStoreError(
            f"{file.path}: byte {queue_table.HEADER_COUNT * WORD_SIZE}: a count of {counted(count, 'entry')}, "
            "for which the file is too short"
        )
    head = {
        "version": _word(data, queue_table.HEADER_VERSION),
        "capacity": capacity,
        "hash_slots": _word(data, queue_table.HEADER_HASH_SLOTS),
        "count": count,
    }
    columns = output_columns(
        "number:number, state, topic, queue_id:number:queue, min_offset:number, max_offset:number, next_offset:number"
    )

    def entries(part: ByteRange) -> Ranges:
        for at in range(part.offset, min(part.end, len(data)), queue_table.ENTRY_SIZE):
            yield from _entry_fields(data, at)

    explained: Explanations = {
        "header": lambda part: _walk(queue_table.HEADER_FIELDS, data, order=_LITTLE),
        "entries": entries,
    }
    rows = (_entry_row(data, number) for number in range(count))
    parts = _table_parts(len(data), capacity, count)
    return FileDump("queue table", head, columns, rows, parts, len(data), explained)


def _table_parts(size: int, capacity: int, count: int) -> Ranges:
    yield ByteRange(0, queue_table.HEADER_SIZE, "header", "magic, version, capacity, counts")
    first, used = queue_table.entry_offset(0), queue_table.entry_offset(max(0, count))
    if used > first:
        yield ByteRange(first, used - first, "entries", f"{counted(count, 'queue')}, 512 bytes each")
    end = queue_table.hash_offset(max(0, capacity))
    if end > used:
        yield ByteRange(used, end - used, "free entries", f"room for {counted(capacity - count, 'more queue')}")
    if size > end:
        yield ByteRange(end, size - end, "hash", "entry number + 1 by topic and queue id")


def _topic_of(data: bytes, at: int) -> bytes:
    """The topic of the queue table's entry at byte `at`."""
    size = _number(data, at + queue_table.TOPIC_SIZE * WORD_SIZE, WORD_SIZE, _LITTLE)
    start = at + queue_table.TOPIC_OFFSET_BYTES
    return data[start : start + max(0, min(size, queue_table.TOPIC_BYTES_MAX))]


def _entry_fields(data: bytes, at: int) -> Ranges:
    topic = _topic_of(data, at)
    for each in _walk(queue_table.ENTRY_FIELDS, data, at, _LITTLE):
        if each.name == "next_offset" and topic:
            start = at + queue_table.TOPIC_OFFSET_BYTES
            yield ByteRange(start, len(topic), "topic", "", topic.decode("utf-8", "replace"))
        yield each


def _entry_row(data: bytes, number: int) -> dict[str, Any]:
    def word(place: int) -> int:
        return _word(data, queue_table.entry_word(number, place))

    first = word(queue_table.FIRST_OFFSET)
    return {
        "number": number,
        "state": _ENTRY_STATES.get(word(queue_table.STATE), "unknown"),
        "topic": _topic_of(data, queue_table.entry_offset(number)).decode("utf-8", "replace"),
        "queue_id": word(queue_table.QUEUE_ID),
        "min_offset": max(first, word(queue_table.MIN_OFFSET)),
        "max_offset": max(first, word(queue_table.MAX_OFFSET)),
        "next_offset": word(queue_table.NEXT_OFFSET),
    }


# Committed offsets and errors


def _check_magic(file: StoreFile, magic: int, size: int) -> None:
    file.check_size(size, "there must be")
    if (found := _word(file.data, 0)) != magic:
        raise CorruptStoreError(f"{file.path}: byte 0: expected the magic {magic:#x}, found {found:#x}")


_OFFSET_COLUMNS: Final = output_columns("group, topic, queue_id:number, next_offset:number, deleted")


def committed_offsets_file(file: StoreFile) -> FileDump:
    """Committed offsets: a header page, then a block for each group and topic."""
    data = file.data
    _check_magic(file, committed_offsets.MAGIC, committed_offsets.HEADER_SIZE)
    end = _word(data, committed_offsets.HEADER_END)
    blocks = dict(_blocks(data, end))
    explained: Explanations = {
        "header": lambda part: _walk(committed_offsets.HEADER_FIELDS, data, order=_LITTLE),
        "block": lambda part: _block_fields(data, part.offset, blocks[part.offset]),
    }
    rows = (row for block in blocks.values() for row in _block_rows(data, block))
    parts = _block_parts(blocks, end, len(data))
    return FileDump("progress", {"size": len(data), "end": end}, _OFFSET_COLUMNS, rows, parts, len(data), explained)


def _blocks(data: bytes, used: int) -> Iterator[tuple[int, committed_offsets.OffsetBlock]]:
    """(byte offset, block) of each."""
    at, end = committed_offsets.HEADER_SIZE, min(used, len(data))
    while (block := committed_offsets.decode_block(data, at, end)) is not None:
        yield at, block
        at = block.end


def _block_parts(blocks: Mapping[int, committed_offsets.OffsetBlock], used: int, size: int) -> Ranges:
    yield ByteRange(0, committed_offsets.HEADER_SIZE, "header", "sizes, fingerprints, counters")
    at = committed_offsets.HEADER_SIZE
    for start, block in blocks.items():
        queues = f"queues {block.first_queue:,} to {block.first_queue + block.queues - 1:,}"
        yield ByteRange(start, block.end - start, "block", f"group {block.group}, topic {block.topic}, {queues}")
        at = block.end
    end = min(max(at, used), size)
    if end > at:
        yield ByteRange(at, end - at, DAMAGE, "no block, though the header counts it")
    if size > end:
        yield ByteRange(end, size - end, "free space", "for more groups and topics")


def _block_fields(data: bytes, at: int, block: committed_offsets.OffsetBlock) -> Ranges:
    yield from _walk(committed_offsets.BLOCK_FIELDS, data, at, _LITTLE, signed=False)
    place = at + committed_offsets.NAMES_AT
    for name, value in (("group", block.group), ("topic", block.topic)):
        if size := len(value.encode()):
            yield ByteRange(place, size, name, "", value)
            place += size
    text = "bit 0: deleted; above: oldest epoch that may commit"
    yield ByteRange(block.state * WORD_SIZE, WORD_SIZE, "state", text, _word(data, block.state))
    for number in range(block.queues):
        index = block.first_offset + number
        text = "next offset to consume, plus one; 0 = unknown"
        yield ByteRange(index * WORD_SIZE, WORD_SIZE, f"queue {block.first_queue + number}", text, _word(data, index))


def _block_rows(data: bytes, block: committed_offsets.OffsetBlock) -> Rows:
    """Each queue with a known offset."""
    is_deleted = bool(_word(data, block.state) & committed_offsets.STATE_DELETED)
    for number in range(block.queues):
        if word := _word(data, block.first_offset + number):
            queue_id = block.first_queue + number
            yield _row(_OFFSET_COLUMNS, block.group, block.topic, queue_id, word - 1, is_deleted)


_ERROR_COLUMNS: Final = output_columns(
    "offset:number, owner, count:number, first_ms:time_ms:first, last_ms:time_ms:last, text"
)


def error_list(file: StoreFile) -> FileDump:
    """The error list: entries of each process."""
    data = file.data
    _check_magic(file, error_log.MAGIC, error_log.FILE_SIZE)
    rows = list(_error_rows(data))
    parts = [ByteRange(0, error_log.HEADER_SIZE, "header", "magic and version")]
    explained: dict[str, Callable[[ByteRange], Ranges]] = {
        "header": lambda part: _walk(error_log.HEADER_FIELDS, data, order=_LITTLE)
    }
    for owner in error_log.OWNERS:
        used = sum(row["owner"] == owner for row in rows)
        text = f"{used} of {error_log.ENTRIES}, {error_log.ENTRY_SIZE} bytes each"
        size = error_log.ENTRIES * error_log.ENTRY_SIZE
        parts.append(ByteRange(error_log.entry_offset(owner, 0), size, f"entries of {owner}", text))
        explained[parts[-1].name] = functools.partial(_owner_fields, data, owner)
    return FileDump("errors", {"size": len(data)}, _ERROR_COLUMNS, iter(rows), parts, len(data), explained)


def _owner_fields(data: bytes, owner: str, _part: ByteRange) -> Ranges:
    for number in range(error_log.ENTRIES):
        yield from _error_fields(data, owner, number)


def _error_text(data: bytes, at: int) -> bytes:
    size = _number(data, at + error_log.TEXT_SIZE * WORD_SIZE, WORD_SIZE, _LITTLE)
    start = at + error_log.TEXT_AT
    return data[start : start + min(max(size, 0), error_log.TEXT_BYTES_MAX)]


def _error_fields(data: bytes, owner: str, number: int) -> Ranges:
    at = error_log.entry_offset(owner, number)
    if _number(data, at, WORD_SIZE, _LITTLE) <= 0:
        yield ByteRange(at, error_log.ENTRY_SIZE, "free entry", f"number {number} of {owner}")
        return
    yield from _walk(error_log.ENTRY_FIELDS, data, at, _LITTLE)
    if found := _error_text(data, at):
        yield ByteRange(at + error_log.TEXT_AT, len(found), "text", f"of {owner}", found.decode("utf-8", "replace"))


def _error_rows(data: bytes) -> Rows:
    for owner in error_log.OWNERS:
        for number in range(error_log.ENTRIES):
            at = error_log.entry_offset(owner, number)
            count, first_ms, last_ms, _size = (each.value for each in _walk(error_log.ENTRY_FIELDS, data, at, _LITTLE))
            if count > 0:
                text = _error_text(data, at).decode("utf-8", "replace")
                yield _row(_ERROR_COLUMNS, at, owner, count, first_ms, last_ms, text)


# Timer


def timer_log_file(file: StoreFile) -> FileDump:
    """A file of the timer log."""
    data = file.data

    def units(part: ByteRange) -> Ranges:
        for at in range(part.offset, part.end, timer_files.UNIT_SIZE):
            yield from _walk(timer_files.UNIT_FIELDS, data, at)

    def end(part: ByteRange) -> Ranges:
        for each in _walk(timer_files.END_FIELDS, data, part.offset):
            value = f"{each.value & 0xFFFFFFFF:08x}" if each.name == "magic" else each.value
            yield ByteRange(each.offset, each.size, each.name, each.help, value)

    return FileDump(
        "timer log",
        {"start": file.start, "size": len(data)},
        output_columns(
            "offset:number, position:number, slot_ms:time_ms:slot, does, previous:number, physical_offset:number",
            "message_size:number:size, topic_hash:number, due_ms:time_ms:due",
        ),
        _timer_rows(data, file.start),
        _timer_log_parts(data),
        len(data),
        {"units": units, "end": end},
    )


def _timer_units_end(data: bytes) -> int:
    """End of the units at the beginning of a file."""
    units = np.frombuffer(data, timer_files.UNIT_DTYPE, timer_files.units_per_file(len(data)))
    others = np.flatnonzero(units["size"] != timer_files.UNIT_SIZE)
    return (int(others[0]) if len(others) else len(units)) * timer_files.UNIT_SIZE


def _timer_log_parts(data: bytes) -> Ranges:
    """Units, the end mark of a full file, damage, unwritten bytes."""
    end = _timer_units_end(data)
    if end:
        yield ByteRange(0, end, "units", f"{end // timer_files.UNIT_SIZE:,}: one for each message, 52 bytes")
    if end == len(data):
        return
    rest = end + timer_files.END_SIZE
    if rest <= len(data) and timer_files.END.unpack_from(data, end) == (len(data) - end, 0, timer_files.END_MAGIC):
        yield ByteRange(end, timer_files.END_SIZE, "end", "the file ends here")
        if len(data) > rest:
            yield ByteRange(rest, len(data) - rest, "rest", "never read")
        return
    dirty = max(end, len(data.rstrip(b"\0")))
    if dirty > end:
        yield ByteRange(end, dirty - end, DAMAGE, "no unit, and no end of the file")
    if len(data) > dirty:
        yield ByteRange(dirty, len(data) - dirty, UNWRITTEN, "zeros: the next unit is written here")


def _timer_rows(data: bytes, start: int) -> Rows:
    for at in range(0, _timer_units_end(data), timer_files.UNIT_SIZE):
        unit = _values(timer_files.UNIT_FIELDS, data, at)
        does = "cancel" if unit["magic"] & timer_files.MAGIC_DELETE else "deliver"
        row: dict[str, Any] = {
            "offset": at,
            "position": start + at,
            "slot_ms": unit["enqueued_ms"] + unit["delay_ms"],
            "does": f"enqueue again, then {does}" if unit["magic"] & timer_files.MAGIC_ROLL else does,
        }
        row |= {name: unit[name] for name in ("previous", "physical_offset", "message_size", "topic_hash")}
        yield row | ({"due_ms": unit["due_ms"]} if unit["due_ms"] else {})


def timer_wheel_file(file: StoreFile) -> FileDump:
    """The timer wheel: used slots."""
    view, size, precision_ms = file.view, timer_files.SLOT_SIZE, file.options.timer_precision_ms
    slots, used = _used_slots(view)
    head = {"size": len(view), "slots": len(slots), "in_use": len(used), "precision_ms": precision_ms}
    columns = output_columns(
        "offset:number, slot:number, slot_ms:time_ms:time, first:number, last:number, messages:number"
    )
    rows = (
        _row(columns, number * size, number, time * precision_ms, first, last, count)
        for number, (time, first, last, count, _magic) in zip(used.tolist(), slots[used].tolist(), strict=True)
    )

    def fields(part: ByteRange) -> Ranges:
        data = bytes(view[part.offset : part.end])
        for at in range(0, len(data), size):
            yield from _walk(timer_files.SLOT_FIELDS, data, at, base=part.offset)

    parts = _wheel_parts(len(slots), used)
    return FileDump("timer wheel", head, columns, rows, parts, len(view), {"slots": fields})


def _used_slots(view: NDArray[np.uint8]) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """(all whole slots of a wheel, numbers of those that are not all zeros)."""
    count = len(view) // timer_files.SLOT_SIZE
    whole = view[: count * timer_files.SLOT_SIZE]
    words = whole.view(np.int64)
    holds = words.reshape(count, timer_files.SLOT_SIZE // words.itemsize).any(axis=1)
    return whole.view(timer_files.SLOT_DTYPE), np.flatnonzero(holds)


def _wheel_parts(count: int, used: NDArray[np.int64]) -> Ranges:
    """Runs of used slots and of empty slots."""
    size = timer_files.SLOT_SIZE
    breaks = np.flatnonzero(np.diff(used) > 1)
    starts = used[np.concatenate(([0], breaks + 1))].tolist() if len(used) else []
    stops = (used[np.concatenate((breaks, [len(used) - 1]))] + 1).tolist() if len(used) else []
    at = 0
    for start, stop in zip([*starts, count], [*stops, count], strict=True):
        for first, end, name in ((at, start, "empty slots"), (start, stop, "slots")):
            if end > first:
                text = f"{end - first:,} from number {first:,} on, 32 bytes each"
                yield ByteRange(first * size, (end - first) * size, name, text)
        at = stop


def timer_check_file(file: StoreFile) -> FileDump:
    """The timer's checkpoint: RocketMQ's seven words, and mqproc's if they are there."""
    page = file.data.ljust(timer_files.CHECK_FILE_SIZE, b"\0")
    fields = list(_walk(timer_files.CHECK_FIELDS, page))
    if timer_files.has_own_check(page):
        magic, *own = _walk(timer_files.OWN_CHECK_FIELDS, page)
        fields += [ByteRange(magic.offset, magic.size, magic.name, magic.help, f"{magic.value:x}"), *own]
    rows = _field_rows(fields)
    return FileDump("timer check", {"size": len(file.data)}, _FIELD_COLUMNS, rows, fields, len(file.data))


# Text files


def topics_journal(file: StoreFile) -> FileDump:
    """The topics' journal: a change per line; a line without its end was never acknowledged."""
    parts, at = [], 0
    for line in file.data.splitlines(keepends=True):
        torn = "" if line.endswith(b"\n") else "; torn, so it was never acknowledged"
        text = f"topic, its queues (0: deleted), its permissions{torn}"
        parts.append(ByteRange(at, len(line), "change", text, line.decode("utf-8", "replace").rstrip("\n")))
        at += len(line)
    columns = output_columns("offset:number, value:text:change, help:text:meaning")
    rows = (each.to_json() for each in parts)
    return FileDump("topics journal", {"size": at}, columns, rows, parts, at)


def text_file(file: StoreFile) -> FileDump:
    """A marker: a short text or nothing."""
    content = file.data.decode("utf-8", "replace").strip()
    # Without a layout: the content is in the head.
    return FileDump("text", {"content": content}, [], iter(()), list(text_ranges(file.data)), 0)


def text_ranges(data: bytes) -> Ranges:
    """A file that is one text."""
    if data:
        yield ByteRange(0, len(data), "text", "", data.decode("utf-8", "replace").strip())
