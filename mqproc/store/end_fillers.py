"""Fillers for what damage has swallowed, in a form behind which RocketMQ goes on when a queue ends with one.

RocketMQ takes the last unit of a queue for the end of what the queue has of the log: place and size, added. A record
that ends at or below it has a unit already, it thinks, and it writes none. With a usual filler at the end that would be
so for the next 2 GiB: none of those messages would be in the queue, and the next start would give their queue offsets
away again.

    usual one    (place F, 0x7FFFFFFF, 0)
    for a hole   (F + a segment − 15, 16, F)     it ends behind the first byte of the hole's segment

It is as unreadable: no record is that short, and none reaches over its segment's end. A queue may come to end with any
of them, since RocketMQ cuts a log at damage in its last segment. Whoever reads units gets usual ones (`as_fillers`).
What has the size without the form is none: a power loss leaves of a unit that two sectors share what one of them has.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config import PAGE_BYTES
from mqproc.layout import consume_queue as layout

_FILLER_BYTES: Final = np.frombuffer(layout.FILLER_SIZE.to_bytes(4, "big"), np.uint8)
# A unit as words of four bytes, in whatever order of theirs: the size is one of them.
_WORD: Final = np.dtype(np.uint32)
_UNIT_WORDS: Final = layout.UNIT_SIZE // _WORD.itemsize
_SIZE_WORD: Final = layout.SIZE // _WORD.itemsize
_SIZE_BYTES: Final = layout.END_FILLER_SIZE.to_bytes(_WORD.itemsize, "big")
_SIZE_VALUE: Final = np.frombuffer(_SIZE_BYTES, _WORD)[0]
_NONE: Final = np.empty(0, np.intp)


def end_fillers(count: int, place: int, segment_size: int) -> NDArray[np.uint8]:
    """uint8[20 × count], writable: what stands for fillers that point to `place`, where a segment begins."""
    data = layout.unit_of(place + segment_size + 1 - layout.END_FILLER_SIZE, layout.END_FILLER_SIZE, place)
    return np.frombuffer(bytearray(data * count), np.uint8)


def put_end_fillers(units: NDArray[np.void], segment_size: int) -> None:
    """Make usual fillers among some units those for holes, in place."""
    usual = units["size"] == layout.FILLER_SIZE
    units["tags_code"][usual] = units["physical_offset"][usual]
    units["physical_offset"][usual] += segment_size + 1 - layout.END_FILLER_SIZE
    units["size"][usual] = layout.END_FILLER_SIZE


def as_fillers(units: bytes) -> bytes:
    """Units as they lie on disk, whole ones and what is cut off behind them, with usual fillers for those of ends."""
    count = len(units) // layout.UNIT_SIZE
    if not len(_of_the_size(units, count)):
        return units
    plain = bytearray(units)
    put_fillers(plain, count)
    return bytes(plain)


def put_fillers(units: bytearray, count: int) -> None:
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
    """Which of the first `count` units have the size.

    Each pull asks it. A search for the size's bytes would take three times as long over thousands of units, and finds
    them in the places of a log of 64 GiB, too.
    """
    if count < 2 and units[layout.SIZE : layout.TAGS_CODE] != _SIZE_BYTES:
        return _NONE
    return np.flatnonzero(np.frombuffer(units, _WORD, count * _UNIT_WORDS)[_SIZE_WORD::_UNIT_WORDS] == _SIZE_VALUE)


def _have_the_form(rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which units of the size, uint8[n, 20], lie as far behind the place that they name as a segment's last ones."""
    at = np.ascontiguousarray(rows[:, layout.PHYSICAL_OFFSET : layout.SIZE]).view(">i8").ravel().astype(np.int64)
    place = np.ascontiguousarray(rows[:, layout.TAGS_CODE : layout.UNIT_SIZE]).view(">i8").ravel().astype(np.int64)
    segment_size = at - place + (layout.END_FILLER_SIZE - 1)
    whole: NDArray[np.bool_] = (place >= 0) & (segment_size > 0) & (segment_size % PAGE_BYTES == 0)
    whole[whole] = place[whole] % segment_size[whole] == 0
    return whole
