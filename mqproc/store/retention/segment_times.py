"""When a CommitLog segment's first and last records were stored, found at its two ends without reading what is between.

A file's own time says nothing: a copy has another, and a segment is touched when it is repaired.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mqproc.config import KIB, MIB
from mqproc.kernels import scan
from mqproc.store.segments import LogSegments

# So much of a segment's end is looked at, then more, when no record begins there.
_TAIL_BYTES: Final = (64 * KIB, MIB, 16 * MIB, 1 << 40)


class SegmentTimes:
    """Store times in the segments of one log, in ms. Those of full segments do not change: they are kept."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)
        self._known: dict[int, tuple[int, int] | None] = {}

    def of_full(self, start: int) -> tuple[int, int] | None:
        """(first, last) of a segment that is full: the first record's, and the greatest among the last ones.

        None when no intact record is in it. Raises FileNotFoundError.
        """
        if start not in self._known:
            first_ms, last_ms = self.first_ms(start), self._look_at_end(start)
            self._known[start] = None if first_ms is None or last_ms is None else (first_ms, last_ms)
        return self._known[start]

    def first_ms(self, start: int) -> int | None:
        """The first intact record's, of any segment; None when it has none yet. Raises FileNotFoundError."""
        found = self._known.get(start)
        return self._look_at_begin(start) if found is None else found[0]

    def forget_below(self, physical_offset: int) -> None:
        """Segments below an offset will not be asked about again."""
        for start in [start for start in self._known if start < physical_offset]:
            del self._known[start]

    def _look_at_begin(self, start: int) -> int | None:
        view = self._segments.view(start)
        found = int(scan.find_record(view, 0, len(view), start, self._out))
        self._segments.touched(start)
        if found < 0 or not self._out[scan.COUNT]:
            return None
        return int(self._out[scan.LAST_STORE_TIMESTAMP_MS])

    def _look_at_end(self, start: int) -> int | None:
        view = self._segments.view(start)
        for tail in _TAIL_BYTES:
            first = max(0, len(view) - tail)
            latest = self._latest_from(view, first, start)
            self._segments.touched(start + first, len(view) - first)
            if latest is not None or first == 0:
                return latest
        return None

    def _latest_from(self, view: np.ndarray, at: int, start: int) -> int | None:
        """The greatest store time of records that begin at or behind `at`, around whatever is damaged."""
        latest: int | None = None
        out = self._out
        while (found := int(scan.find_record(view, at, len(view), start, out))) >= 0 and out[scan.COUNT]:
            scan.scan_records(view, found, len(view), start, scan.VERIFY_ALL, out)
            latest = max(latest or 0, int(out[scan.MAX_STORE_TIMESTAMP_MS]))
            at = int(out[scan.STOPPED_AT]) + 1
        return latest
