"""After damage: where the log goes on. A record is found again by its magic, its own offset, its sizes and CRCs."""

from __future__ import annotations

import bisect

import numpy as np

from mqproc.kernels import scan
from mqproc.kernels.record_check import REASON_NAMES, checked_size
from mqproc.layout import record
from mqproc.store.damage import MISSING_SEGMENT, Hole
from mqproc.store.log_search import find_record_in, written_ranges
from mqproc.store.segments import LogSegments


class Resync:
    """Looks for intact records in the segments of one log."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)

    def next_record(self, position: int, limit: int) -> int | None:
        """The first intact record that begins in [position, limit); None when there is none.

        Looks only where something was ever written, and only in segments that are there.
        """
        starts = self._segments.starts()
        first = bisect.bisect_left(starts, self._segments.start_of(position))
        for base in starts[first:]:
            if base >= limit:
                break
            found = self._in_segment(base, max(0, position - base), limit - base)
            if found is not None:
                return base + found
        return None

    def hole_at(self, position: int, limit: int) -> Hole:
        """The hole that begins at a position where no intact record does; it reaches to the next one, or to `limit`."""
        following = self.next_record(position + 1, limit)
        return Hole(position, limit if following is None else following, self.fault(position))

    def fault(self, position: int) -> str:
        """What is wrong at a position, in words."""
        base = self._segments.start_of(position)
        try:
            view = self._segments.view(base)
        except FileNotFoundError:
            return MISSING_SEGMENT
        size = checked_size(view, position - base, len(view), position, scan.VERIFY_ALL)
        return REASON_NAMES[-size] if size < 0 else "impossible queue offset"

    def _in_segment(self, base: int, position: int, limit: int) -> int | None:
        view = self._segments.view(base)
        limit = min(limit, len(view))
        io = self._segments.io
        fd = io.open(self._segments.path(base))
        try:
            while (at := find_record_in(written_ranges(io, fd, position, limit), view, base, self._out)) >= 0:
                if self._out[scan.COUNT] == 1:
                    return at
                position = at + record.BLANK_SIZE
        finally:
            io.close(fd)
        return None
