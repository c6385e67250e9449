"""Fillers for records lost in a hole, which let RocketMQ continue a queue after them.

RocketMQ takes position plus size of a queue's last unit for the end of its dispatched log: it writes no units for
records up to there. After a usual filler that would skip 2 GiB of log, and the next start would reuse the skipped
queue offsets.

    usual        (position F, 0x7FFFFFFF, 0)
    for a hole   (F + segment size − 15, 16, F)     it ends after the first byte of the hole's segment

The second form is equally unreadable: no record is that short or crosses a segment's end. Any of them may become a
queue's last unit, since RocketMQ truncates a log at damage in its last segment. Readers get the usual form
(`normalize_fillers`). A unit with this size but not this form is torn: a power loss wrote one of its two sectors.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.layout import consume_queue as layout
from mqproc.util.units import PAGE_BYTES

_FILLER_BYTES: Final = np.frombuffer(layout.FILLER_SIZE.to_bytes(4, "big"), np.uint8)
# A unit as native 32-bit words; one of them is the size.
_WORD: Final = np.dtype(np.uint32)
_UNIT_WORDS: Final = layout.UNIT_SIZE // _WORD.itemsize
_SIZE_WORD: Final = layout.SIZE // _WORD.itemsize
_SIZE_BYTES: Final = layout.END_FILLER_SIZE.to_bytes(_WORD.itemsize, "big")
_SIZE_VALUE: Final = np.frombuffer(_SIZE_BYTES, _WORD)[0]
_NONE: Final = np.empty(0, np.intp)


def end_fillers(count: int, place: int, segment_size: int) -> NDArray[np.uint8]:
    """uint8[20 × count], writable: fillers for a hole whose usual ones point to `place`."""
    data = layout.unit_of(place + segment_size + 1 - layout.END_FILLER_SIZE, layout.END_FILLER_SIZE, place)
    return np.frombuffer(bytearray(data * count), np.uint8)


def put_end_fillers(units: NDArray[np.void], segment_size: int) -> None:
    """Convert usual fillers among some units to the form for holes, in place."""
    usual = units["size"] == layout.FILLER_SIZE
    units["tags_code"][usual] = units["physical_offset"][usual]
    units["physical_offset"][usual] += segment_size + 1 - layout.END_FILLER_SIZE
    units["size"][usual] = layout.END_FILLER_SIZE


def normalize_fillers(units: bytes) -> bytes:
    """Convert fillers to the usual form, in units as read from disk."""
    count = len(units) // layout.UNIT_SIZE
    if not len(_of_the_size(units, count)):
        return units
    plain = bytearray(units)
    normalize_fillers_in_place(plain, count)
    return bytes(plain)


def normalize_fillers_in_place(units: bytearray, count: int) -> None:
    """The same in place, for the first `count` units."""
    ends = _of_the_size(units, count)
    if not len(ends):
        return
    rows = np.frombuffer(units, np.uint8, count * layout.UNIT_SIZE).reshape(count, layout.UNIT_SIZE)
    ends = ends[_have_the_form(rows[ends])]
    rows[ends, layout.PHYSICAL_OFFSET : layout.SIZE] = rows[ends, layout.TAGS_CODE : layout.UNIT_SIZE]
    rows[ends, layout.SIZE : layout.TAGS_CODE] = _FILLER_BYTES
    rows[ends, layout.TAGS_CODE : layout.UNIT_SIZE] = 0


def _of_the_size(units: bytes | bytearray, count: int) -> NDArray[np.intp]:
    """Indexes of the units, among the first `count`, that have this size.

    Called for each pull. A byte search would take three times as long over thousands of units, and would also match
    positions of a log of 64 GiB.
    """
    if count < 2 and units[layout.SIZE : layout.TAGS_CODE] != _SIZE_BYTES:
        return _NONE
    return np.flatnonzero(np.frombuffer(units, _WORD, count * _UNIT_WORDS)[_SIZE_WORD::_UNIT_WORDS] == _SIZE_VALUE)


def _have_the_form(rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which of these units, uint8[n, 20], lie one segment after the position they name."""
    at = np.ascontiguousarray(rows[:, layout.PHYSICAL_OFFSET : layout.SIZE]).view(">i8").ravel().astype(np.int64)
    place = np.ascontiguousarray(rows[:, layout.TAGS_CODE : layout.UNIT_SIZE]).view(">i8").ravel().astype(np.int64)
    segment_size = at - place + (layout.END_FILLER_SIZE - 1)
    whole: NDArray[np.bool_] = (place >= 0) & (segment_size > 0) & (segment_size % PAGE_BYTES == 0)
    whole[whole] = place[whole] % segment_size[whole] == 0
    return whole
