"""Bounds of a queue: extent of its units, first unit at or above a log position; fillers.

    [filler …] unit unit filler unit … unit │ zeros

Units have ascending log positions; fillers do not. A filler counts as the next real unit, or as the previous one
after the last. Leading fillers represent offsets that never existed, or records lost in a hole of the log.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mqproc.layout import record
from mqproc.layout.consume_queue import (
    END_FILLER_SIZE,
    FILLER_SIZE,
    SIZE,
    TAGS_CODE,
    UNIT_FIELDS,
    UNIT_SIZE,
    place_of,
    unit_of,
)
from mqproc.util.units import PAGE_BYTES

UNIT_DTYPE: Final = np.dtype([(field.name, f">i{field.size}") for field in UNIT_FIELDS])
# Chunk of units in the search past fillers.
_CHUNK_UNITS: Final = 512

Place = tuple[int, int]
"""(log position, record size) of a unit."""


def as_units(data: bytes | bytearray | NDArray[np.uint8]) -> NDArray[np.void]:
    """Whole units as a structured array: `physical_offset`, `size`, `tags_code`, big-endian."""
    return np.frombuffer(data, UNIT_DTYPE, len(data) // UNIT_SIZE)


class Row(Protocol):
    """One queue's units by queue offset."""

    units_per_file: int

    def starts(self) -> list[int]:
        """Queue offsets of the files' first units, ascending."""
        ...

    def read(self, first: int, count: int) -> bytes:
        """Units from a queue offset on; fewer where a file is missing or short."""
        ...


@dataclass(frozen=True, slots=True)
class QueueExtent:
    """Units [first_offset, max_offset) of a queue, and the end in the log of their last record.

    `changed`: whether a truncation removed anything.
    """

    first_offset: int
    max_offset: int
    last_physical_end: int
    changed: bool = False


def filler_position(hole_start: int, segment_size: int) -> int:
    """Log position in fillers for a hole: the start of the segment before the hole's.

    RocketMQ, when it cannot read a unit's record, skips to the segment after the one that the unit names. It also adds
    a unit's position in its segment and its size as 32-bit numbers.
    """
    return max(0, hole_start - hole_start % segment_size - segment_size)


def explained_by(
    holes: Sequence[tuple[int, int]], missing: int, physical_end: int, physical_offset: int, segment_size: int
) -> int | None:
    """Log position for fillers of `missing` offsets between two records; None if unexplained.

    The previous record ends at `physical_end`, the next one begins at `physical_offset`. More offsets than the holes
    between them have room for are another fault, which fillers must not hide.
    """
    between = [hole for hole in holes if physical_end <= hole[0] < physical_offset]
    room = sum(stop - start for start, stop in between) // record.FIXED_SIZE_V4
    return filler_position(between[0][0], segment_size) if 0 < missing <= room else None


def extent(row: Row, keep: Callable[[int, int], bool]) -> QueueExtent:
    """Extent of a row up to the last unit for which the monotonic `keep(position, size)` holds.

    Leading fillers are kept: the queue's offsets continue after them.
    """
    starts = row.starts()
    if not starts:
        return QueueExtent(0, 0, 0)
    after_fillers = leading_fillers(row, starts[0])

    def kept(queue_offset: int) -> bool:
        if queue_offset < after_fillers:
            return True
        place = record_place(row, queue_offset)
        return place is not None and keep(*place)

    start = next((start for start in reversed(starts) if kept(start)), starts[0])
    low, high = start, start + row.units_per_file
    while low < high:
        middle = (low + high) // 2
        if kept(middle):
            low = middle + 1
        else:
            high = middle
    return QueueExtent(min(after_fillers, low), low, last_end(row, low))


def leading_fillers(row: Row, first: int) -> int:
    """Queue offset after the leading fillers in the first file, which begins at `first`.

    RocketMQ writes them before a queue's first unit.
    """
    at, stop = first, first + row.units_per_file
    count = 1
    while at < stop and len(units := row.read(at, min(count, stop - at))) >= UNIT_SIZE:
        found = as_units(units)
        others = np.flatnonzero((found["size"] != FILLER_SIZE) | (found["physical_offset"] != 0))
        if len(others):
            return at + int(others[0])
        at += len(found)
        count = _CHUNK_UNITS
    return at


def record_place(row: Row, queue_offset: int) -> Place | None:
    """A unit's place; for a filler the next unit's place, or the previous one's if none follows.

    None without a unit, or if all units are fillers.
    """
    here = _place(row.read(queue_offset, 1), 0)
    if here is None or here[1] != FILLER_SIZE:
        return here
    following = _following(row, queue_offset + 1)
    if following is not None and following[1] > 0:
        return following
    return _preceding(row, queue_offset)


def first_at_or_above(row: Row, low: int, high: int, physical_offset: int) -> int:
    """First offset in [low, high) whose place is at or above a log position, else `high`.

    Missing units count as below.
    """
    while low < high:
        middle = (low + high) // 2
        place = record_place(row, middle)
        if place is not None and place[0] >= physical_offset:
            high = middle
        else:
            low = middle + 1
    return low


def last_end(row: Row, max_offset: int) -> int:
    """End in the log of the last record of the units below `max_offset`; 0 if none exists."""
    place = _preceding(row, max_offset)
    return place[0] + place[1] if place is not None else 0


def _following(row: Row, queue_offset: int) -> Place | None:
    """Place of the first unit from an offset on that is not a filler; None at the end."""
    while units := row.read(queue_offset, _CHUNK_UNITS):
        others = np.flatnonzero(as_units(units)["size"] != FILLER_SIZE)
        if len(others):
            return _place(units, int(others[0]))
        queue_offset += len(units) // UNIT_SIZE
    return None


def _preceding(row: Row, queue_offset: int) -> Place | None:
    """Place of the last unit below an offset that is not a filler; None if missing or invalid."""
    starts = row.starts()
    # Go by files: millions of offsets may be missing before a misplaced file.
    while (file := bisect.bisect_left(starts, queue_offset) - 1) >= 0:
        start = starts[file]
        queue_offset = min(queue_offset, start + row.units_per_file)
        first = max(start, queue_offset - _CHUNK_UNITS)
        units = row.read(first, queue_offset - first)
        others = np.flatnonzero(as_units(units)["size"] != FILLER_SIZE)
        if len(others):
            place = _place(units, int(others[-1]))
            return place if place is not None and place[1] > 0 else None
        queue_offset = first
    return None


def _place(units: bytes, index: int) -> Place | None:
    if len(units) < (index + 1) * UNIT_SIZE:
        return None
    place: Place = place_of(units, index * UNIT_SIZE)
    return place


# Fillers for records lost in a hole, which let RocketMQ continue a queue after them
#
# RocketMQ takes position plus size of a queue's last unit for the end of its dispatched log: it writes no units for
# records up to there. After a usual filler that would skip 2 GiB of log, and the next start would reuse the skipped
# queue offsets.
#
#     usual        (position F, 0x7FFFFFFF, 0)
#     for a hole   (F + segment size − 15, 16, F)     it ends after the first byte of the hole's segment
#
# The second form is equally unreadable: no record is that short or crosses a segment's end. Any of them may become a
# queue's last unit, since RocketMQ truncates a log at damage in its last segment. Readers get the usual form
# (`normalize_fillers`). A unit with this size but not this form is torn: a power loss wrote one of its two sectors.

# A unit as native 32-bit words; one of them is the size.
_WORD: Final = np.dtype(np.uint32)
_UNIT_WORDS: Final = UNIT_SIZE // _WORD.itemsize
_SIZE_WORD: Final = SIZE // _WORD.itemsize
_SIZE_BYTES: Final = END_FILLER_SIZE.to_bytes(_WORD.itemsize, "big")
_SIZE_VALUE: Final = np.frombuffer(_SIZE_BYTES, _WORD)[0]
_NONE: Final = np.empty(0, np.intp)


def end_fillers(count: int, place: int, segment_size: int) -> NDArray[np.uint8]:
    """uint8[20 × count], writable: fillers for a hole whose usual fillers point to `place`."""
    data = unit_of(place + segment_size + 1 - END_FILLER_SIZE, END_FILLER_SIZE, place)
    return np.frombuffer(bytearray(data * count), np.uint8)


def put_end_fillers(units: NDArray[np.void], segment_size: int) -> None:
    """Convert usual fillers among some units to the form for holes, in place."""
    usual = units["size"] == FILLER_SIZE
    units["tags_code"][usual] = units["physical_offset"][usual]
    units["physical_offset"][usual] += segment_size + 1 - END_FILLER_SIZE
    units["size"][usual] = END_FILLER_SIZE


def normalize_fillers(units: bytes) -> bytes:
    """Convert fillers to the usual form, in units as read from disk."""
    count = len(units) // UNIT_SIZE
    if not len(_with_end_filler_size(units, count)):
        return units
    plain = bytearray(units)
    normalize_fillers_in_place(plain, count)
    return bytes(plain)


def normalize_fillers_in_place(units: bytearray, count: int) -> None:
    """The same in place, for the first `count` units."""
    ends = _with_end_filler_size(units, count)
    if not len(ends):
        return
    found = as_units(units)
    ends = ends[_are_end_fillers(found[ends])]
    found["physical_offset"][ends] = found["tags_code"][ends]
    found["size"][ends] = FILLER_SIZE
    found["tags_code"][ends] = 0


def _with_end_filler_size(units: bytes | bytearray, count: int) -> NDArray[np.intp]:
    """Indexes of the units, among the first `count`, that have the size of fillers for a hole.

    Called for each pull. A byte search would take three times as long over thousands of units, and would also match
    positions of a log of 64 GiB.
    """
    if count < 2 and units[SIZE:TAGS_CODE] != _SIZE_BYTES:
        return _NONE
    return np.flatnonzero(np.frombuffer(units, _WORD, count * _UNIT_WORDS)[_SIZE_WORD::_UNIT_WORDS] == _SIZE_VALUE)


def _are_end_fillers(units: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which of these units lie one segment after the position they name."""
    place = units["tags_code"].astype(np.int64)
    segment_size = units["physical_offset"] - place + (END_FILLER_SIZE - 1)
    whole: NDArray[np.bool_] = (place >= 0) & (segment_size > 0) & (segment_size % PAGE_BYTES == 0)
    whole[whole] = place[whole] % segment_size[whole] == 0
    return whole
