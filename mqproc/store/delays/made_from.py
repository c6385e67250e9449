"""Which deliveries the log has: a walk over a range of it for records that name the one that they were made from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import made_from as kernel
from mqproc.kernels.record_check import BLANK, REACHED_STOP
from mqproc.store.recovery.resync import Resync
from mqproc.store.segments import LogSegments
from mqproc.store.slices import Slices, finish

FOUND_MAX = 65_536
# Pages of the log that one call of the kernel makes present.
SLICE_BYTES = 16 << 20


def mark_of(physical_offset: int) -> int:
    """What a message made from the record there bears as `preparedTransactionOffset`.

    0 says nothing, so the log's very first record is named by 1, where no record begins.
    """
    return physical_offset or 1


def marks_of(physical_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same of many records."""
    return np.maximum(physical_offsets, 1)


class MadeFrom:
    """Looks for marks in the segments of one log."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self._resync = Resync(segments)
        self._found = np.empty(FOUND_MAX, np.int64)
        self._out = np.zeros(kernel.OUT_SIZE, np.int64)

    def marks(self, begin: int, end: int) -> set[int]:
        """All marks of records in [begin, end). Records begin at both; damage is passed over."""
        return finish(self.slices(begin, end))

    def slices(self, begin: int, end: int) -> Slices[set[int]]:
        """The same in slices."""
        marks: set[int] = set()
        at = begin
        while at < end:
            at = self._slice(at, end, marks)
            yield
        return marks

    def _slice(self, at: int, end: int, marks: set[int]) -> int:
        """Walk a part of one segment; returns where to go on, above `at`."""
        segments = self._segments
        start = segments.start_of(at)
        following = start + segments.segment_size
        try:
            view = segments.view(start)
        except FileNotFoundError:
            return following
        stop = min(end - start, len(view))
        slice_stop = min(stop, at - start + SLICE_BYTES)
        count = int(kernel.find_made_from(view, at - start, slice_stop, start, self._found, self._out))
        marks.update(self._found[:count].tolist())
        stopped, reason = start + int(self._out[kernel.STOPPED_AT]), int(self._out[kernel.REASON])
        segments.let_go(start, at - start, stopped - at)
        if stopped > at:
            return stopped if reason != BLANK else following
        if reason == BLANK:
            return following
        if reason == REACHED_STOP and slice_stop < stop:
            # One record larger than a slice.
            kernel.find_made_from(view, at - start, stop, start, self._found[:1], self._out)
            return max(start + int(self._out[kernel.STOPPED_AT]), at + 1)
        following_record = self._resync.next_record(at + 1, end)
        return end if following_record is None else following_record
