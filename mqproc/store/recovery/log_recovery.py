"""Finding the end of the CommitLog after any kind of stop, and cutting what lies behind it.

from the durable mark, or the log's beginning, whole records are walked with their CRCs; where that ends:
  nothing was ever written behind      the end
  below what the checkpoint confirms   damage, if an intact record follows: a hole, served around
  at or above mark and checkpoint      a torn tail: cut, zeroed, synced; kept aside if intact records are in it
  no mark, no intact record behind     a torn tail
  no mark, intact records behind       damage: a hole, served around

Below the mark nothing is walked but what is known or suspected to be damaged: `examine`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from mqproc.io import StoreIO
from mqproc.kernels import scan
from mqproc.kernels.record_check import record_size, stored_at_ms
from mqproc.layout import record
from mqproc.layout.marks import Mark
from mqproc.store.clearing import clear_behind, dirty_end
from mqproc.store.damage import MISSING_SEGMENT, Hole
from mqproc.store.recovery.resync import Resync
from mqproc.store.segments import LogSegments
from mqproc.store.visitor import Visit

# The walk asks for pages ahead, and lets go of those behind, in steps of this size.
WALK_BYTES = 8 << 20
_NOTHING_WRITTEN = scan.REASON_NAMES[scan.ZERO]

Told = Callable[[int, int], None]
"""Hears how many bytes of how many a step has gone over, now and then."""


def _nobody(done: int, extent: int) -> None:
    return


@dataclass(slots=True)
class LogEnd:
    """What recovery found. Offsets are positions in the log.

    `holes` are ranges without an intact record; `scanned_bytes` and `records` say how much was looked at. With
    `cuts_records` there are intact records in what is cut, which the torn one before them takes with it.
    """

    start: int
    end: int
    last_store_timestamp_ms: int = 0
    last_record: int = -1
    scanned_bytes: int = 0
    records: int = 0
    cut_bytes: int = 0
    cut_reason: str = ""
    cuts_records: bool = False
    removed_segments: int = 0
    holes: list[Hole] = field(default_factory=list)


class LogRecovery:
    """Recovery of one store's log. Nothing else may have the store open; every segment has its full length."""

    def __init__(self, io: StoreIO, segments: LogSegments, told: Told = _nobody) -> None:
        self._io = io
        self._segments = segments
        self._told = told
        self._resync = Resync(segments)
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)

    def find_end(
        self,
        mark: Mark | None,
        known_holes: Collection[int] = (),
        visit: Visit | None = None,
        *,
        confirmed: int = 0,
        record_crcs: bool = False,
    ) -> LogEnd:
        """Walk the log from the mark on and say where it ends. Changes nothing.

        `known_holes` are starts of damage that was seen before: there the log goes on also above the mark. So it does
        below `confirmed`, which was durable too. With a `visit` what lies above the mark was written by another
        program, and whole records behind its end may be ours that it has cut. `record_crcs`: all records above the
        mark were written with a CRC over all of each; one that has none was torn there, and what it says beside its
        body is anything.
        """
        starts = self._segments.starts()
        if not starts:
            return LogEnd(0, 0)
        begin = starts[0] if mark is None else max(mark.offset, starts[0])
        found = LogEnd(begin, begin)
        if mark is not None:
            found.last_store_timestamp_ms = mark.store_timestamp_ms
        limit = starts[-1] + self._segments.segment_size
        whole_only = record_crcs and mark is not None
        written = -1
        while (fault := self._walk(found, limit, whole_only=whole_only)) is not None:
            if written < 0:
                # Most logs have nothing behind their end, and looking for records there makes all of it present.
                written = self._written_end(found.end)
            following = None
            if visit is None or not self._may_be_cut(found.end, written, visit):
                following = self._resync.next_record(found.end + 1, written)
            is_lost = mark is None or visit is not None or found.end < confirmed or found.end in known_holes
            if following is None or not is_lost:
                found.cut_reason = "" if fault == _NOTHING_WRITTEN else fault
                found.cuts_records = following is not None
                break
            found.holes.append(Hole(found.end, following, fault))
            found.end = following
        if visit is not None and (seam := self._seam(found, visit)) is not None:
            self._end_at(found, seam)
        return found

    def _written_end(self, position: int) -> int:
        """End of the last byte at or behind a position of the log that is not zero; the position when there is none."""
        for base in reversed(self._segments.starts()):
            begin = max(0, position - base)
            if begin >= self._segments.segment_size:
                break
            fd = self._io.open(self._segments.path(base))
            try:
                end = dirty_end(self._io, fd, begin)
            finally:
                self._io.close(fd)
            if end > begin:
                return base + end
        return position

    def _may_be_cut(self, position: int, limit: int, visit: Visit) -> bool:
        """Whether the other program's log may end here: what follows lay in ours, and nothing of its own does."""
        return visit.kept <= position < visit.our_end and self._resync.next_record(visit.our_end, limit) is None

    def _seam(self, found: LogEnd, visit: Visit) -> int | None:
        """Where records of the other program end and older ones of ours begin that it has cut, by chance without a gap.

        It stored its own after our last one; a record among them that is not later is one that it cut.
        """
        position, stop = max(visit.kept, found.start), min(found.end, visit.our_end)
        theirs = False
        while position < stop:
            position = next((hole.stop for hole in found.holes if hole.start <= position < hole.stop), position)
            base = self._segments.start_of(position)
            view = self._segments.view(base)
            at = position - base
            size = record_size(view, at, len(view))
            if size < 0:
                position = base + len(view)
                continue
            later = stored_at_ms(view, at, len(view), position) > visit.our_last_ms
            if theirs and not later:
                return position
            theirs = later
            position += size
        return None

    def _end_at(self, found: LogEnd, end: int) -> None:
        """The log ends earlier than it seemed."""
        again = LogEnd(found.start, found.start)
        again.last_store_timestamp_ms = found.last_store_timestamp_ms
        self._walk(again, end)
        found.end, found.last_record = end, again.last_record
        found.last_store_timestamp_ms = again.last_store_timestamp_ms
        found.holes = [hole for hole in found.holes if hole.stop <= end]
        found.cut_reason = "records that another program has cut"

    def examine(self, ranges: Iterable[tuple[int, int]]) -> list[Hole]:
        """What is damaged now within ranges [start, stop) that each begin where a record should. Changes nothing."""
        holes: list[Hole] = []
        for start, stop in sorted(ranges):
            found = LogEnd(start, start)
            while (fault := self._walk(found, stop)) is not None:
                following = self._resync.next_record(found.end + 1, stop)
                holes.append(Hole(found.end, stop if following is None else following, fault))
                found.end = holes[-1].stop
        return holes

    def cut(self, found: LogEnd) -> None:
        """Zero and sync everything behind the end; whole segments behind it go, from the highest down.

        A second call finds nothing to do and stores nothing.
        """
        base = self._segments.start_of(found.end)
        starts = self._segments.starts()
        if base in starts:
            found.cut_bytes += self._zero_tail(base, found.end - base)
        for start in reversed(starts):
            if start > found.end:
                self._segments.forget_below(start + self._segments.segment_size)
                self._io.unlink(self._segments.path(start))
                self._io.crash_point("recover.later_unlinked")
                found.removed_segments += 1
        if found.removed_segments:
            self._io.sync_folder(self._segments.folder)

    def seal(self, end: int) -> None:
        """Let the log go on in another segment: a BLANK at its end, as when a segment is full. Synced."""
        base = self._segments.start_of(end)
        if end == base or base not in self._segments.starts():
            return
        remaining = base + self._segments.segment_size - end
        blank = remaining.to_bytes(4, "big") + record.MAGIC_BLANK.to_bytes(4, "big", signed=True)
        fd = self._io.open(self._segments.path(base), write=True)
        try:
            self._io.pwrite(fd, blank, end - base)
            self._io.sync(fd)
        finally:
            self._io.close(fd)

    def sync(self, start: int, end: int) -> None:
        """Make [start, end) durable: a killed group's bytes are in the page cache only."""
        for base in self._segments.starts():
            if start < end and base < end and base + self._segments.segment_size > start:
                fd = self._io.open(self._segments.path(base), write=True)
                try:
                    self._io.sync(fd)
                finally:
                    self._io.close(fd)

    def _walk(self, found: LogEnd, limit: int, *, whole_only: bool = False) -> str | None:
        """Walk whole records from `found.end` on, over segments; what is wrong where they end, None at `limit`.

        With `whole_only` a record without a CRC of its own ends them too.
        """
        while found.end < limit:
            self._told(found.end - found.start, limit - found.start)
            base = self._segments.start_of(found.end)
            try:
                view = self._segments.view(base)
            except FileNotFoundError:
                return MISSING_SEGMENT
            reason = self._walk_segment(found, base, view, min(len(view), limit - base), whole_only=whole_only)
            if reason == scan.BLANK:
                found.end = base + len(view)
            elif reason != scan.REACHED_STOP:
                return scan.REASON_NAMES[reason]
            elif found.end < min(limit, base + len(view)):
                # A record that reaches over the limit, where another one begins.
                return scan.REASON_NAMES[scan.BAD_SIZE]
        return None

    def _walk_segment(self, found: LogEnd, base: int, view: np.ndarray, limit: int, *, whole_only: bool) -> int:
        """Walk to `limit` in a segment at most; the kernel's reason."""
        position = found.end - base
        reason, step = scan.REACHED_STOP, WALK_BYTES
        while reason == scan.REACHED_STOP and position < limit:
            stop = min(limit, position + step)
            self._segments.read_ahead(base + position, base + limit)
            reason = scan.scan_records(view, position, stop, base, scan.VERIFY_ALL, self._out)
            if whole_only and (bare := self._without_crc(view, position)) >= 0:
                scan.scan_records(view, position, bare, base, scan.VERIFY_ALL, self._out)
                reason = scan.BAD_PROPERTY_CRC
            stopped = int(self._out[scan.STOPPED_AT])
            found.scanned_bytes += stopped - position
            found.records += int(self._out[scan.COUNT])
            if self._out[scan.LAST_START] >= 0:
                found.last_record = base + int(self._out[scan.LAST_START])
                # One before 1970 is damage that no CRC of RocketMQ's covers; a mark has no room for it.
                found.last_store_timestamp_ms = max(0, int(self._out[scan.LAST_STORE_TIMESTAMP_MS]))
            self._segments.let_go(base, position, stopped - position)
            if stopped == position:
                if stop == limit:
                    break
                # A record longer than a step.
                step = limit
            position = stopped
        found.end = base + position
        return reason

    def _without_crc(self, view: np.ndarray, start: int) -> int:
        """Where the first record without a CRC of its own lies of those just scanned from `start` on; -1 = nowhere."""
        return int(scan.find_without_crc(view, start, int(self._out[scan.STOPPED_AT])))

    def _zero_tail(self, base: int, position: int) -> int:
        """Zero a segment from a position on; how far behind it anything else lay."""
        fd = self._io.open(self._segments.path(base), write=True)
        try:
            cleared = clear_behind(self._io, fd, position)
            if cleared:
                self._io.crash_point("recover.tail_zeroed")
                self._io.sync(fd)
                self._io.crash_point("recover.tail_synced")
        finally:
            self._io.close(fd)
        return cleared
