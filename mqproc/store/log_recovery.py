"""Finding the end of the CommitLog after any kind of stop, and cutting what lies behind it.

from the durable mark, or the log's beginning, whole records are walked with their CRCs; where that ends:
  nothing was ever written behind      the end
  at or above the mark                 a torn tail: cut, zeroed, synced
  no mark, no intact record behind     a torn tail
  no mark, intact records behind       damage: a hole, served around
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.kernels import scan
from mqproc.layout import record
from mqproc.layout.marks import Mark
from mqproc.store.segments import LogSegments

_CHUNK = 1 << 20
# The walk lets go of pages in steps of this size; the largest record fits one many times.
WALK_BYTES = 256 << 20


@dataclass(slots=True)
class LogEnd:
    """What recovery found. Offsets are positions in the log.

    `holes` are ranges [start, stop) without an intact record; `scanned_bytes` and `records` say how much was looked at.
    """

    start: int
    end: int
    last_store_timestamp_ms: int = 0
    last_record: int = -1
    scanned_bytes: int = 0
    records: int = 0
    cut_bytes: int = 0
    cut_reason: str = ""
    holes: list[tuple[int, int]] = field(default_factory=list)


class LogRecovery:
    """Recovery of one store's log. Nothing else may have the store open."""

    def __init__(self, io: StoreIO, segments: LogSegments) -> None:
        self._io = io
        self._segments = segments
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)

    def find_end(self, mark: Mark | None) -> LogEnd:
        """Walk the log from the mark on and say where it ends. Changes nothing.

        Raises CorruptStoreError when a segment is missing below the last one.
        """
        starts = self._segments.starts()
        if not starts:
            return LogEnd(0, 0)
        self._check_row(starts)
        begin = starts[0] if mark is None else max(mark.offset, starts[0])
        found = LogEnd(begin, begin)
        if mark is not None:
            found.last_store_timestamp_ms = mark.store_timestamp_ms
        limit = starts[-1] + self._segments.segment_size
        while found.end < limit:
            reason = self._walk(found)
            if reason == scan.BLANK:
                found.end = self._segments.start_of(found.end) + self._segments.segment_size
                continue
            if mark is not None or reason == scan.REACHED_STOP or not self._step_over_hole(found, limit):
                self._judge(found, reason, limit)
                break
        return found

    def cut(self, found: LogEnd) -> int:
        """Zero and sync everything behind the end; whole segments behind it go. Returns the bytes that were not zero.

        A second call finds nothing to do and stores nothing.
        """
        starts = self._segments.starts()
        size = self._segments.segment_size
        removed = 0
        for start in reversed(starts):
            if start > found.end or (start == found.end and start != starts[0]):
                removed += self._remove_segment(start)
        base = self._segments.start_of(found.end)
        if base in starts and found.end < base + size:
            found.cut_bytes += self._zero_tail(base, found.end - base)
        return removed

    def sync(self, start: int, end: int) -> None:
        """Make [start, end) durable: a killed group's bytes are in the page cache only."""
        base = self._segments.start_of(start)
        while base < end:
            fd = self._io.open(self._segments.path(base), write=True)
            try:
                self._io.sync(fd)
            finally:
                self._io.close(fd)
            base += self._segments.segment_size

    def _check_row(self, starts: list[int]) -> None:
        for earlier, later in itertools.pairwise(starts):
            if later != earlier + self._segments.segment_size:
                expected = earlier + self._segments.segment_size
                raise CorruptStoreError(f"{self._segments.path(expected)}: missing; the next segment is {later:020d}")

    def _walk(self, found: LogEnd) -> int:
        """Walk from `found.end` to the end of its segment."""
        base = self._segments.start_of(found.end)
        view = self._segments.view(base)
        position = found.end - base
        reason = scan.REACHED_STOP
        while position < len(view):
            stop = min(len(view), position + WALK_BYTES)
            reason = scan.scan_records(view, position, stop, base, scan.VERIFY_ALL, self._out)
            stopped = int(self._out[scan.STOPPED_AT])
            found.scanned_bytes += stopped - position
            found.records += int(self._out[scan.COUNT])
            if self._out[scan.LAST_START] >= 0:
                found.last_record = base + int(self._out[scan.LAST_START])
                found.last_store_timestamp_ms = int(self._out[scan.LAST_STORE_TIMESTAMP_MS])
            self._segments.let_go(base, position, stopped - position)
            if reason != scan.REACHED_STOP or stopped == position:
                break
            position = stopped
        found.end = base + int(self._out[scan.STOPPED_AT])
        return reason

    def _step_over_hole(self, found: LogEnd, limit: int) -> bool:
        """Without a mark: look for an intact record behind a bad place; a hole is noted when there is one."""
        start = found.end
        position = start + 1
        while position < limit:
            base = self._segments.start_of(position)
            view = self._segments.view(base)
            at = self._next_intact(base, view, position - base)
            if at >= 0:
                found.holes.append((start, base + at))
                found.end = base + at
                return True
            position = base + self._segments.segment_size
        return False

    def _next_intact(self, base: int, view: np.ndarray, position: int) -> int:
        """Position of the next intact record in a segment, looking only where something was ever written."""
        fd = self._io.open(self._segments.path(base))
        try:
            while position < len(view) and (data := self._io.next_data(fd, position)) is not None:
                hole = self._io.next_hole(fd, data)
                at = int(scan.find_record(view, data, min(hole, len(view)), base, self._out))
                if at >= 0 and self._out[scan.COUNT] == 1:
                    return at
                position = hole if at < 0 else at + record.BLANK_SIZE
        finally:
            self._io.close(fd)
        return -1

    def _judge(self, found: LogEnd, reason: int, limit: int) -> None:
        if reason not in (scan.REACHED_STOP, scan.ZERO) and found.end < limit:
            found.cut_reason = scan.REASON_NAMES[reason]

    def _remove_segment(self, start: int) -> int:
        path = self._segments.path(start)
        self._segments.forget_below(start + self._segments.segment_size)
        self._io.unlink(path)
        self._io.crash_point("recover.later_unlinked")
        self._io.sync_folder(path.parent)
        return 1

    def _zero_tail(self, base: int, position: int) -> int:
        fd = self._io.open(self._segments.path(base), write=True)
        try:
            dirty = self._dirty_end(fd, position)
            if dirty > position:
                self._io.zero(fd, position, self._segments.segment_size - position)
                self._io.crash_point("recover.tail_zeroed")
                self._io.sync(fd)
        finally:
            self._io.close(fd)
        return dirty - position

    def _dirty_end(self, fd: int, position: int) -> int:
        """End of the last byte at or after `position` that is not zero."""
        end = position
        while (data := self._io.next_data(fd, position)) is not None:
            hole = self._io.next_hole(fd, data)
            for start in range(data, hole, _CHUNK):
                chunk = np.frombuffer(self._io.pread(fd, min(_CHUNK, hole - start), start), np.uint8)
                filled = np.flatnonzero(chunk)
                if len(filled):
                    end = start + int(filled[-1]) + 1
            position = hole
        return end
