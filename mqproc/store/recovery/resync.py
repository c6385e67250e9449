"""After damage: where the log goes on. A record is found again by its magic, its own offset, its sizes and CRCs."""

from __future__ import annotations

import bisect
from typing import Final

import numpy as np

from mqproc.kernels import scan
from mqproc.kernels.record_check import REASON_NAMES, checked_size
from mqproc.layout import record
from mqproc.store.damage import MISSING_SEGMENT, Hole
from mqproc.store.segments import LogSegments

# A record is mostly near. Where written data ends is not asked: the file system may look at every page up to there.
_LOOK_BYTES: Final = 256 << 10


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
        return REASON_NAMES[-size] if size < 0 else "queue offset below 0"

    def _in_segment(self, base: int, position: int, limit: int) -> int | None:
        view = self._segments.view(base)
        limit = min(limit, len(view))
        io = self._segments.io
        fd = io.open(self._segments.path(base))
        try:
            while position < limit and (data := io.next_data(fd, position)) is not None:
                # A size's first bytes are zeros too, and may lie in what was never written.
                first = max(position, data - record.MAGIC)
                stop = min(data + _LOOK_BYTES, limit)
                at = int(scan.find_record(view, first, stop, base, self._out))
                if at >= 0 and self._out[scan.COUNT] == 1:
                    return at
                position = stop if at < 0 else at + record.BLANK_SIZE
        finally:
            io.close(fd)
        return None
