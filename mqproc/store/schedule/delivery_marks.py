"""Delivery marks: find deliveries in the log by the source record that each one names."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels import scan as kernel
from mqproc.kernels.record_check import BLANK, REACHED_STOP
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.cooperative import Slices, finish
from mqproc.store.recovery.log import Resync

FOUND_MAX = 65_536
# Bytes of the log that one kernel call makes resident.
SLICE_BYTES = 16 << 20


def mark_of(physical_offset: int) -> int:
    """Mark of a delivery: its source's physical offset, in `preparedTransactionOffset`.

    0 means no source, so the very first record of the log has the mark 1, where no record begins.
    """
    return physical_offset or 1


def marks_of(physical_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Marks for many source records."""
    return np.maximum(physical_offsets, 1)


class DeliveryMarks:
    """Searches the segments of one log for marks."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self._resync = Resync(segments)
        self._found = np.empty(FOUND_MAX, np.int64)
        self._out = np.zeros(kernel.MARKS_SIZE, np.int64)

    def marks(self, begin: int, end: int) -> set[int]:
        """All marks of records in [begin, end). Records begin at both ends; damage is skipped."""
        return finish(self.slices(begin, end))

    def slices(self, begin: int, end: int) -> Slices[set[int]]:
        """`marks` as a cooperative generator."""
        marks: set[int] = set()
        at = begin
        while at < end:
            at = self._slice(at, end, marks)
            yield
        return marks

    def _slice(self, at: int, end: int, marks: set[int]) -> int:
        """Search a part of one segment; returns where to continue, above `at`."""
        segments = self._segments
        start = segments.start_of(at)
        following = start + segments.segment_size
        try:
            view = segments.view(start)
        except FileNotFoundError:
            return following
        stop = min(end - start, len(view))
        slice_stop = min(stop, at - start + SLICE_BYTES)
        count = int(kernel.find_delivery_marks(view, at - start, slice_stop, start, self._found, self._out))
        marks.update(self._found[:count].tolist())
        stopped, reason = start + int(self._out[kernel.STOPPED_AT]), int(self._out[kernel.REASON])
        segments.drop_pages(start, at - start, stopped - at)
        if stopped > at:
            return stopped if reason != BLANK else following
        if reason == BLANK:
            return following
        if reason == REACHED_STOP and slice_stop < stop:
            # A record larger than a slice.
            kernel.find_delivery_marks(view, at - start, stop, start, self._found[:1], self._out)
            return max(start + int(self._out[kernel.STOPPED_AT]), at + 1)
        following_record = self._resync.next_record(at + 1, end)
        return end if following_record is None else following_record
