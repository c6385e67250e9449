"""Single CommitLog records by physical offset, verified on access."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.kernels import gather
from mqproc.kernels.record_check import BLANK, REASON_NAMES, VERIFY_ALL, checked_size, stored_at_ms
from mqproc.layout import record
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import UNIT_DTYPE
from mqproc.store.damage import Hole, KnownHoles

_NO_BYTES = np.zeros(0, np.uint8)
_NO_WORDS = np.zeros(0, np.int64)


class Visible(NamedTuple):
    """The readable part of the log: physical offsets [begin, end)."""

    begin: int
    end: int


class LogRecords:
    """Records by offset. `visible` returns the readable part, `holes` knows damaged ranges."""

    def __init__(self, segments: LogSegments, visible: Callable[[], Visible], holes: KnownHoles | None = None) -> None:
        self.segments = segments
        self.visible = visible
        self._holes = holes

    def have_holes(self) -> bool:
        """Whether damaged ranges of the log are known."""
        return self._holes is not None and self._holes.any()

    def holes_named(self, position: int, begin: int, end: int) -> list[Hole]:
        """Damaged ranges in [begin, end) of the log that a filler with this position may represent."""
        return self._holes.named(position, begin, end) if self._holes is not None else []

    def segment(self, physical_offset: int) -> tuple[int, NDArray[np.uint8]] | None:
        """(start, view) of the segment that contains an offset; None if it does not exist.

        Raises CorruptStoreError for a short file.
        """
        start = self.segments.start_of(physical_offset)
        try:
            return start, self.segments.view(start)
        except FileNotFoundError:
            return None

    def record(self, physical_offset: int) -> NDArray[np.uint8] | None:
        """A copy of the record at an offset; None outside the log or if no record begins there.

        Raises CorruptStoreError if the record's CRC is wrong.
        """
        found = self._find(physical_offset)
        if found is None:
            return None
        start, view, limit = found
        at = physical_offset - start
        size = checked_size(view, at, limit, physical_offset, 0)
        if size < 0:
            return None
        reason = -checked_size(view, at, limit, physical_offset, VERIFY_ALL)
        if reason > 0:
            place = f"{self.segments.path(start)}: record [{physical_offset}, {physical_offset + size})"
            raise CorruptStoreError(f"{place}: {REASON_NAMES[reason]}")
        self.segments.note_read(physical_offset, size)
        return view[at : at + size].copy()

    def intact(self, physical_offset: int) -> NDArray[np.uint8] | None:
        """The same, but None for a damaged record, which status and `damage.json` report."""
        try:
            return self.record(physical_offset)
        except CorruptStoreError:
            return None

    def copies(self, places: Iterable[int]) -> list[bytes | None]:
        """Records at several offsets; None for each that is deleted or has a wrong CRC."""
        found: list[bytes | None] = []
        begin, end = self.visible()
        segments = self.segments
        start, limit, view = -1, 0, _NO_BYTES
        for place in places:
            if start < 0 or not start <= place < start + segments.segment_size:
                entered = self.segment(place) if begin <= place < end else None
                start, view = entered or (-1, _NO_BYTES)
                limit = min(len(view), end - start)
            at = place - start
            size = checked_size(view, at, limit, place, VERIFY_ALL) if start >= 0 else 0
            found.append(view[at : at + size].tobytes() if size > 0 else None)
            segments.note_read(place, size)
        return found

    def gathered(self, places: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Concatenated records at several offsets, and which offsets have one, bool[n].

        Deleted records and those with a wrong CRC are left out.
        """
        begin, end = self.visible()
        found = (places >= begin) & (places < end)
        starts = places - places % self.segments.segment_size
        edges = [0, *(np.flatnonzero(starts[1:] != starts[:-1]) + 1).tolist(), len(places)]
        parts = [_NO_BYTES]
        for first, stop in itertools.pairwise(edges):
            entered = self.segment(int(places[first])) if found[first:stop].any() else None
            if entered is None:
                found[first:stop] = False
            else:
                parts.append(self._gather(*entered, end, places[first:stop], found[first:stop]))
        return np.concatenate(parts), found

    def _gather(
        self, start: int, view: NDArray[np.uint8], end: int, places: NDArray[np.int64], found: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Records of one segment; sets `found` to False where none begins."""
        limit = min(len(view), end - start)
        found &= places - start + record.FIXED_SIZE_V4 <= limit
        rows = np.flatnonzero(found)
        ats = places[rows] - start
        units = np.zeros(len(rows), UNIT_DTYPE)
        units["physical_offset"] = places[rows]
        units["size"] = view[ats[:, None] + np.arange(record.TOTAL_SIZE, record.TOTAL_SIZE + 4)].view(">i4")[:, 0]
        sizes = units["size"].astype(np.int64)
        out = np.empty(int(sizes[(sizes > 0) & (ats + sizes <= limit)].sum()), np.uint8)
        state = np.zeros(gather.STATE_SIZE, np.int64)
        state[gather.UNIT_STOP], state[gather.BASE], state[gather.LOG_STOP] = len(rows), start, end
        state[gather.VERIFY], state[gather.COPY] = VERIFY_ALL, 1
        state[gather.COUNT_LIMIT] = state[gather.BYTES_LIMIT] = state[gather.SCAN_BUDGET] = 1 << 62
        state[gather.BORN_BEGIN_MS] = state[gather.STORE_BEGIN_MS] = gather.TIME_MIN
        state[gather.BORN_END_MS] = state[gather.STORE_END_MS] = gather.TIME_MAX
        codes, tags, ends, program, texts, scratch = _NO_WORDS, _NO_BYTES, _NO_WORDS, _NO_WORDS, _NO_BYTES, _NO_WORDS
        cells = units.view(np.uint8)
        walk = (cells, view, codes, tags, ends, program, texts, scratch, out, state)
        while gather.gather(*walk) != gather.UNITS_DONE:
            found[rows[state[gather.UNIT]]] = False
            state[gather.UNIT] += 1
        self.segments.note_reads(places[rows])
        return out[: int(state[gather.OUT_AT])]

    def store_timestamp_ms(self, physical_offset: int) -> int:
        """Store time of the record at an offset, −1 if none exists."""
        found = self._find(physical_offset)
        if found is None:
            return -1
        start, view, limit = found
        self.segments.note_read(physical_offset)
        return int(stored_at_ms(view, physical_offset - start, limit, physical_offset))

    def first_record(self) -> int:
        """Physical offset of the first readable record, −1 if none exists."""
        begin, end = self.visible()
        while begin < end:
            found = self._find(begin)
            if found is not None:
                start, view, limit = found
                size = checked_size(view, begin - start, limit, begin, 0)
                if size > 0:
                    return begin
                if size != -BLANK:
                    return -1
            begin = self.segments.start_of(begin) + self.segments.segment_size
        return -1

    def _find(self, physical_offset: int) -> tuple[int, NDArray[np.uint8], int] | None:
        """(segment's start, its view, end of its readable part)."""
        begin, end = self.visible()
        if not begin <= physical_offset < end:
            return None
        found = self.segment(physical_offset)
        if found is None:
            return None
        start, view = found
        return start, view, min(len(view), end - start)
