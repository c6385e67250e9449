"""Which bytes of the timer's files are what; see `file_layout`."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.cli.store.file_fields import UNWRITTEN, Range, Ranges
from mqproc.layout import timer_check, timer_log, timer_wheel

_UNIT_HELP: Final = {
    "size": "of the unit, 52",
    "previous": "position of the unit before it in the same slot, -1 = none",
    "magic": "1 a message, +2 to be parked again only, +4 cancels another",
    "enqueued_ms": "when it was filed, in whole slots",
    "delay_ms": "its slot is so much later",
    "physical_offset": "of the parked record in the log",
    "message_size": "of that record",
    "topic_hash": "String.hashCode of the topic that it goes to",
    "due_ms": "mqproc's: the very time; RocketMQ writes 0",
}
_SLOT_HELP: Final = {
    "time": "in slot widths since 1970; a slot of another time is empty",
    "first": "position in the timer log of the slot's first unit",
    "last": "of its last one, where its chain begins",
    "count": "messages, those that cancel others taken off",
    "magic": "0",
}


# The timer log


def units_end(data: bytes) -> int:
    """Where the units at a file's beginning end."""
    units = np.frombuffer(data, timer_log.UNIT_DTYPE, timer_log.units_per_file(len(data)))
    others = np.flatnonzero(units["size"] != timer_log.UNIT_SIZE)
    return (int(others[0]) if len(others) else len(units)) * timer_log.UNIT_SIZE


def timer_log_layout(data: bytes) -> Ranges:
    """Units, the end of a full file, what was never written; what is none of them is damage."""
    end = units_end(data)
    if end:
        yield Range(0, end, "units", f"{end // timer_log.UNIT_SIZE:,}: one for each filed message, 52 bytes")
    if end == len(data):
        return
    if _is_end(data, end):
        yield Range(end, timer_log.END_SIZE, "end", "the file ends here")
        if len(data) > end + timer_log.END_SIZE:
            yield Range(end + timer_log.END_SIZE, len(data) - end - timer_log.END_SIZE, "rest", "never read")
        return
    dirty = len(data.rstrip(b"\0"))
    if dirty > end:
        yield Range(end, dirty - end, "damage", "no unit, and no end of the file")
    if len(data) > max(end, dirty):
        yield Range(max(end, dirty), len(data) - max(end, dirty), UNWRITTEN, "zeros: the timer log goes on here")


def _is_end(data: bytes, at: int) -> bool:
    if at + timer_log.END_SIZE > len(data):
        return False
    rest, zero, magic = timer_log.END.unpack_from(data, at)
    return (rest, zero, magic) == (len(data) - at, 0, timer_log.END_MAGIC)


def timer_log_fields(data: bytes) -> Ranges:
    """The nine fields of each unit, and the three of the end."""
    for part in timer_log_layout(data):
        if part.name == "units":
            units = np.frombuffer(data, timer_log.UNIT_DTYPE, part.size // timer_log.UNIT_SIZE)
            yield from _cells(units, part.offset, _UNIT_HELP)
        elif part.name == "end":
            rest, _zero, magic = timer_log.END.unpack_from(data, part.offset)
            yield Range(part.offset, 4, "remaining", "bytes from here to the file's end", rest)
            yield Range(part.offset + 4, 8, "zero", "", 0)
            yield Range(part.offset + 12, 4, "magic", "the file ends here", f"{magic & 0xFFFFFFFF:08x}")
        else:
            yield part


def _cells(cells: NDArray[np.void], offset: int, helps: dict[str, str]) -> Ranges:
    """Every field of a structured array that lies at `offset` of a file."""
    fields = cells.dtype.fields
    assert fields is not None
    for number, values in enumerate(cells.tolist()):
        at = offset + number * cells.dtype.itemsize
        for (name, (kind, place, *_)), value in zip(fields.items(), values, strict=True):
            yield Range(at + place, kind.itemsize, name, helps[name], value)


# The wheel


def used_slots(view: NDArray[np.uint8]) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """(all whole slots of a wheel, numbers of those that have ever held something)."""
    count = len(view) // timer_wheel.SLOT_SIZE
    whole = view[: count * timer_wheel.SLOT_SIZE]
    words = whole.view(np.int64)
    holds = words.reshape(count, timer_wheel.SLOT_SIZE // words.itemsize).any(axis=1)
    return whole.view(timer_wheel.SLOT_DTYPE), np.flatnonzero(holds)


def timer_wheel_layout(view: NDArray[np.uint8]) -> Ranges:
    """Runs of slots that hold, or held, something, and of empty ones."""
    slots, used = used_slots(view)
    breaks = np.flatnonzero(np.diff(used) > 1)
    starts = used[np.concatenate(([0], breaks + 1))].tolist() if len(used) else []
    stops = (used[np.concatenate((breaks, [len(used) - 1]))] + 1).tolist() if len(used) else []
    at = 0
    for start, stop in zip(starts, stops, strict=True):
        if start > at:
            yield _slots(at, start, "empty slots")
        yield _slots(start, stop, "slots")
        at = stop
    if len(slots) > at:
        yield _slots(at, len(slots), "empty slots")


def _slots(start: int, stop: int, name: str) -> Range:
    size = timer_wheel.SLOT_SIZE
    return Range(start * size, (stop - start) * size, name, f"{stop - start:,} from number {start:,} on, 32 bytes each")


def timer_wheel_fields(view: NDArray[np.uint8]) -> Ranges:
    """The five fields of each slot that is not empty."""
    slots, _used = used_slots(view)
    for part in timer_wheel_layout(view):
        if part.name == "slots":
            first = part.offset // timer_wheel.SLOT_SIZE
            yield from _cells(slots[first : part.end // timer_wheel.SLOT_SIZE], part.offset, _SLOT_HELP)
        else:
            yield part


# The check


def timer_check_fields(data: bytes) -> Ranges:
    """RocketMQ's seven words, and ours while they count."""
    for name, place, text in timer_check.FIELDS:
        if place < timer_check.OWN_AT or timer_check.has_own(data):
            value = int.from_bytes(data[place : place + 8], "big", signed=True)
            yield Range(place, 8, name, text, f"{value:x}" if name == "magic" else value)
