"""Recovery of the CommitLog: finds its end, records damage and cuts the torn tail.

From the durable mark, or the log's beginning, records are checked with their CRCs. Where that ends:

  only zeros follow                          the end of the log
  below the checkpoint's confirmed offset    damage if an intact record follows: a hole, which reads skip
  at or above mark and checkpoint            a torn tail: cut, zeroed, synced; kept if it contains intact records
  no mark, no intact record follows          a torn tail
  no mark, intact records follow             damage: a hole, which reads skip

Below the mark only known or suspected damage is checked (`examine`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO, dirty_end, zero_tail
from mqproc.kernels import log_match, record_check, scan
from mqproc.kernels.record_check import REASON_NAMES, checked_size, record_size, stored_at_ms
from mqproc.layout import record
from mqproc.layout.durable_marks import Mark
from mqproc.paths import StorePaths
from mqproc.store.commitlog.flush import make_segment
from mqproc.store.commitlog.misnamed_segments import claimed_start
from mqproc.store.commitlog.segments import LogSegments, find_record_in, written_ranges
from mqproc.store.compat import (
    TIME_ORDER_UNKNOWN,
    ForeignSession,
    are_record_crcs_written,
    foreign_session,
    time_ordered_from,
    was_opened_elsewhere,
)
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import MISSING_SEGMENT, DamageLedger, Hole, merged
from mqproc.store.durable_marks import DurableMark, read_checkpoint
from mqproc.store.index.files import IndexFiles
from mqproc.store.recovery.store_files import LogFiles, StoreFiles

# Resynchronisation after damage


class Resync:
    """Finds intact records after damage by their magic, own offset, sizes and CRCs."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)

    def next_record(self, position: int, limit: int) -> int | None:
        """First intact record that begins in [position, limit); None without one.

        Searches only written ranges of existing segments.
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
        """Hole at a position without an intact record, up to the next intact record or `limit`."""
        following = self.next_record(position + 1, limit)
        return Hole(position, limit if following is None else following, self._fault(position))

    def _fault(self, position: int) -> str:
        base = self._segments.start_of(position)
        try:
            view = self._segments.view(base)
        except FileNotFoundError:
            return MISSING_SEGMENT
        size = checked_size(view, position - base, len(view), position, record_check.VERIFY_ALL)
        return REASON_NAMES[-size] if size < 0 else "invalid queue offset"

    def _in_segment(self, base: int, position: int, limit: int) -> int | None:
        view = self._segments.view(base)
        limit = min(limit, len(view))
        io = self._segments.io
        with io.opened(self._segments.path(base)) as fd:
            while (at := find_record_in(written_ranges(io, fd, position, limit), view, base, self._out)) >= 0:
                if self._out[scan.COUNT] == 1:
                    return at
                position = at + record.BLANK_SIZE
        return None


# The end of the log

# Upper bound of a log's length; larger offsets are garbage.
LOG_BYTES_MAX: Final = 1 << 50
# Step of readahead, and of releasing pages already walked.
WALK_BYTES = 8 << 20
_NOTHING_WRITTEN = record_check.REASON_NAMES[record_check.ZERO]

OnProgress = Callable[[int, int], None]
"""Called with the number of bytes done and the total of a step."""


def _ignore_progress(done: int, extent: int) -> None:
    return


@dataclass(slots=True)
class LogEnd:
    """The end of the log and the faults before it. Offsets are log positions.

    Store times ascend from `ordered_from` on. `records` counts those checked, `holes` are ranges without an intact
    record. `cuts_records`: the torn tail contains intact records, which are cut with it.
    """

    start: int
    end: int
    last_store_timestamp_ms: int = 0
    ordered_from: int = 0
    last_record: int = -1
    records: int = 0
    cut_bytes: int = 0
    cut_reason: str = ""
    cuts_records: bool = False
    removed_segments: int = 0
    holes: list[Hole] = field(default_factory=list)


class LogRecovery:
    """Finds and cuts the end of a log, whose segments have their full length."""

    def __init__(self, segments: LogSegments, on_progress: OnProgress = _ignore_progress) -> None:
        self._io = segments.io
        self._segments = segments
        self._on_progress = on_progress
        self._resync = Resync(segments)
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)

    def find_end(
        self,
        mark: Mark | None,
        known_holes: Collection[int] = (),
        visit: ForeignSession | None = None,
        *,
        confirmed: int = 0,
        record_crcs: bool = False,
        ordered_from: int = TIME_ORDER_UNKNOWN,
    ) -> LogEnd:
        """Walk the log from the mark and find its end. Changes nothing.

        The log also continues after known damage (`known_holes`: starts) and below `confirmed`, which was durable.
        With a `visit`, records above the mark were written by another program, and records after its end may be ours
        that it cut. `record_crcs`: all records above the mark were written with a CRC over the whole record; one
        without it is torn, and its fields outside the body are undefined. Store times below the mark ascend from
        `ordered_from` on.
        """
        starts = self._segments.starts()
        if not starts:
            return LogEnd(0, 0)
        begin = starts[0] if mark is None else max(mark.offset, starts[0])
        found = LogEnd(begin, begin, ordered_from=begin)
        if mark is not None:
            found.last_store_timestamp_ms = mark.store_timestamp_ms
            found.ordered_from = min(begin, ordered_from)
        limit = starts[-1] + self._segments.segment_size
        whole_only = record_crcs and mark is not None
        durable_end = limit if mark is None or visit is not None else confirmed
        written = -1
        while (fault := self._walk(found, limit, whole_only=whole_only)) is not None:
            if written < 0:
                # Most logs have only zeros after their end; searching for records there would load all of them.
                written = self._written_end(found.end)
            next_record = self._record_after(found.end, written, visit)
            if next_record is None or not (found.end < durable_end or found.end in known_holes):
                found.cut_reason = "" if fault == _NOTHING_WRITTEN else fault
                found.cuts_records = next_record is not None
                break
            found.holes.append(Hole(found.end, next_record, fault))
            found.end = next_record
        if visit is not None and (seam := self._seam(found, visit)) is not None:
            self._end_at(found, seam)
        return found

    def _written_end(self, position: int) -> int:
        """End of the last nonzero byte at or after a log position; the position itself without one."""
        for base in reversed(self._segments.starts()):
            begin = max(0, position - base)
            if begin >= self._segments.segment_size:
                break
            with self._io.opened(self._segments.path(base)) as fd:
                end = dirty_end(self._io, fd, begin)
            if end > begin:
                return base + end
        return position

    def _record_after(self, position: int, limit: int, visit: ForeignSession | None) -> int | None:
        """Next intact record after a fault; None if the other program's log may end here.

        It may end here if only records of ours follow.
        """
        is_in_ours = visit is not None and visit.kept <= position < visit.our_end
        if visit is not None and is_in_ours and self._resync.next_record(visit.our_end, limit) is None:
            return None
        return self._resync.next_record(position + 1, limit)

    def _seam(self, found: LogEnd, visit: ForeignSession) -> int | None:
        """Where the other program's records are followed by older records of ours that it cut.

        It stored its records after our last one, so an earlier record after those is one that it cut.
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
        """Move the end of the log to an earlier position."""
        again = LogEnd(found.start, found.start)
        again.last_store_timestamp_ms = found.last_store_timestamp_ms
        self._walk(again, end)
        found.end, found.last_record = end, again.last_record
        found.ordered_from = min(found.ordered_from, end)
        found.last_store_timestamp_ms = again.last_store_timestamp_ms
        found.holes = [hole for hole in found.holes if hole.stop <= end]
        found.cut_reason = "records cut by another program"

    def examine(self, ranges: Iterable[tuple[int, int]]) -> list[Hole]:
        """Find damage within ranges that begin at record positions. Changes nothing."""
        holes: list[Hole] = []
        for start, stop in sorted(ranges):
            found = LogEnd(start, start)
            while (fault := self._walk(found, stop)) is not None:
                following = self._resync.next_record(found.end + 1, stop)
                holes.append(Hole(found.end, stop if following is None else following, fault))
                found.end = holes[-1].stop
        return holes

    def cut(self, found: LogEnd) -> None:
        """Zero and sync everything after the end; remove later segments from the highest down.

        A second call changes nothing.
        """
        base = self._segments.start_of(found.end)
        starts = self._segments.starts()
        if base in starts:
            with self._io.opened(self._segments.path(base), write=True) as fd:
                cleared = zero_tail(self._io, fd, found.end - base)
                if cleared:
                    self._io.crash_point("recover.tail_zeroed")
                    self._io.sync(fd)
                    self._io.crash_point("recover.tail_synced")
            found.cut_bytes += cleared
        for start in reversed(starts):
            if start > found.end:
                self._segments.forget_below(start + self._segments.segment_size)
                self._io.unlink(self._segments.path(start))
                self._io.crash_point("recover.later_unlinked")
                found.removed_segments += 1
        if found.removed_segments:
            self._io.sync_folder(self._segments.folder)

    def seal(self, end: int) -> None:
        """Write a BLANK at the end, so that the log continues in a later segment. Synced."""
        base = self._segments.start_of(end)
        if end == base or base not in self._segments.starts():
            return
        remaining = base + self._segments.segment_size - end
        blank = remaining.to_bytes(4, "big") + record.MAGIC_BLANK.to_bytes(4, "big", signed=True)
        with self._io.opened(self._segments.path(base), write=True) as fd:
            self._io.pwrite(fd, blank, end - base)
            self._io.sync(fd)

    def sync(self, start: int, end: int) -> None:
        """Sync [start, end): the data of a killed group is only in the page cache."""
        for base in self._segments.starts():
            if start < end and base < end and base + self._segments.segment_size > start:
                with self._io.opened(self._segments.path(base), write=True) as fd:
                    self._io.sync(fd)

    def _walk(self, found: LogEnd, limit: int, *, whole_only: bool = False) -> str | None:
        """Walk records from `found.end` on; return the fault at which they end, None at `limit`.

        With `whole_only`, a record without its own CRC is a fault.
        """
        while found.end < limit:
            self._on_progress(found.end - found.start, limit - found.start)
            base = self._segments.start_of(found.end)
            try:
                view = self._segments.view(base)
            except FileNotFoundError:
                return MISSING_SEGMENT
            reason = self._walk_segment(found, base, view, min(len(view), limit - base), whole_only=whole_only)
            if reason == record_check.BLANK:
                found.end = base + len(view)
            elif reason != record_check.REACHED_STOP:
                return record_check.REASON_NAMES[reason]
            elif found.end < min(limit, base + len(view)):
                # A record that extends over the limit, where another record begins.
                return record_check.REASON_NAMES[record_check.BAD_SIZE]
        return None

    def _walk_segment(self, found: LogEnd, base: int, view: np.ndarray, limit: int, *, whole_only: bool) -> int:
        """Walk at most to `limit` in one segment; return the kernel's reason."""
        position = found.end - base
        reason, step = record_check.REACHED_STOP, WALK_BYTES
        while reason == record_check.REACHED_STOP and position < limit:
            stop = min(limit, position + step)
            self._segments.read_ahead(base + position, base + limit)
            reason = scan.scan_records(view, position, stop, base, record_check.VERIFY_ALL, self._out)
            if whole_only and (bare := scan.find_without_crc(view, position, int(self._out[scan.STOPPED_AT]))) >= 0:
                scan.scan_records(view, position, bare, base, record_check.VERIFY_ALL, self._out)
                reason = record_check.BAD_PROPERTY_CRC
            stopped = int(self._out[scan.STOPPED_AT])
            found.records += int(self._out[scan.COUNT])
            if self._out[scan.LAST_START] >= 0:
                descent = log_match.last_descent(view, position, stopped, found.last_store_timestamp_ms)
                if descent >= 0:
                    found.ordered_from = base + descent
                found.last_record = base + int(self._out[scan.LAST_START])
                # A time before 1970 is damage that RocketMQ's CRC does not cover; marks cannot store it.
                found.last_store_timestamp_ms = max(0, int(self._out[scan.LAST_STORE_TIMESTAMP_MS]))
            self._segments.drop_pages(base, position, stopped - position)
            if stopped == position:
                if stop == limit:
                    break
                # The record is longer than a step.
                step = limit
            position = stopped
        found.end = base + position
        return reason


# The log's part of recovery: damage is recorded, then the tail is cut, then the log is complete again.
#
#     list       names and lengths of the segments; missing parts of short and missing ones below the mark are suspects
#     names      rename segments according to their records if names or the walk indicate an error
#     complete   give every segment its full length
#     walk       to the end, from the mark or the beginning (`LogRecovery`); check known and suspected damage again
#     record     write damage.json before anything is cut
#     cut        the torn tail; or continue after missing segments
#
# If the files end below a durable position, and no other program caused that, the log continues after the lost part in
# a new segment: log positions and queue offsets are never reused.


Ranges = list[tuple[int, int]]
_BAD_OFFSET: Final = record_check.REASON_NAMES[record_check.BAD_OFFSET]


@dataclass(slots=True)
class LogState:
    """The log after recovery. `rebuild_from`: first position that became readable again.

    `fresh` are new holes. `kept`: position up to which another program left the log unchanged; None if no other program
    opened the store.
    """

    begin: int
    end: int
    found: LogEnd
    started_from: str
    fresh: list[Hole] = field(default_factory=list)
    rebuild_from: int = 0
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class OpenStore:
    """The open parts of a store under recovery, whose log is recovered."""

    io: StoreIO
    paths: StorePaths
    options: Options
    table: QueueTable
    segments: LogSegments
    queues: ConsumeQueueFiles
    index: IndexFiles
    ledger: DamageLedger
    log: LogState
    now_ms: Callable[[], int]
    report: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LogStep:
    """Recovers the log of one store, which nothing else has open.

    `keep_tail`: bytes after the end are quarantined, since the store was closed properly. `on_cut_records` is called
    with the end before intact records after it are cut.
    """

    paths: StorePaths
    segments: LogSegments
    files: StoreFiles
    ledger: DamageLedger
    mark: DurableMark
    now_ms: Callable[[], int]
    recovery: LogRecovery
    on_cut_records: Callable[[int], None]
    keep_tail: bool

    def run(self, known_end: Callable[[], int]) -> LogState:
        """Recover the log. `known_end` returns its end if no segment exists.

        Raises CorruptStoreError for damage with `on_damage = refuse`, OSError.
        """
        if self.files.has_invalid_names():
            self.files.fix_segment_names()
        found_files = self.files.list_segments()
        mark = self.mark.valid()
        known = self._known(found_files)
        suspects = self._record_suspects(found_files, known, mark.offset) if mark else []
        self.files.fix_segment_lengths()
        starts = self.segments.starts()
        if not starts:
            return self._start_empty(known_end())
        visit = None
        if was_opened_elsewhere(self.segments.io, self.paths):
            visit = foreign_session(self.segments.io, self.paths, self.segments, self.mark.mark)
            mark = mark if mark is not None and mark.offset <= visit.kept else None
        found = self._find_end(mark, visit, known)
        if mark is not None:
            ranges = _within(merged([*known, *suspects]), starts[0], found.start)
            found.holes = self.recovery.examine(ranges) + found.holes
        if self._may_be_misnamed(found):
            self.segments.close()
            if self.files.fix_segment_names():
                return self.run(known_end)
        self.segments.io.crash_point("recover.scanned")
        # Another program also deletes whole segments: then none is missing.
        resume = found.end if mark is not None or visit is not None else self._resume_at(starts, found)
        state = self._finish(starts[0], found, known, resume, "durable mark" if mark else "beginning")
        state.kept = visit.kept if visit is not None else None
        return state

    def _known(self, found_files: LogFiles) -> Ranges:
        """Known damaged ranges that are still in the log."""
        begin = min(found_files.starts, default=0)
        return [(start, stop) for start, stop in self.ledger.ranges if stop > begin]

    def _record_suspects(self, found_files: LogFiles, known: Ranges, below: int) -> Ranges:
        """Record missing parts of the log below a position: segments that are missing or short.

        Otherwise a crash could erase their only trace, the lengths.
        """
        size = self.segments.segment_size
        suspects = [(start, start + size, "short segment") for start in found_files.short]
        for earlier, later in itertools.pairwise(found_files.starts):
            if later > earlier + size:
                suspects.append((earlier + size, later, MISSING_SEGMENT))
        suspects = sorted((start, min(stop, below), kind) for start, stop, kind in suspects if start < below)
        if suspects:
            known = merged(known)
            extra = [
                Hole(start, stop, kind)
                for start, stop, kind in suspects
                if not any(first <= start and stop <= last for first, last in known)
            ]
            self.ledger.replace([*self.ledger.holes, *extra], self.now_ms())
        return [(start, stop) for start, stop, _kind in suspects]

    def _find_end(self, mark: Mark | None, visit: ForeignSession | None, known: Ranges) -> LogEnd:
        record_crcs = visit is None and are_record_crcs_written(self.segments.io, self.paths)
        # The marks of a copy are older than its checkpoint.
        confirmed = read_checkpoint(self.segments.io, self.paths.checkpoint).confirm_physical_offset
        holes = {start for start, _stop in known}
        return self.recovery.find_end(
            mark,
            holes,
            visit,
            confirmed=confirmed,
            record_crcs=record_crcs,
            ordered_from=time_ordered_from(self.segments.io, self.paths),
        )

    def _may_be_misnamed(self, found: LogEnd) -> bool:
        """Whether faults may come from segments with exchanged names."""
        reasons = {found.cut_reason, *(hole.kind for hole in found.holes)}
        size = self.segments.segment_size
        later = (start for start in self.segments.starts() if start > found.end)
        return _BAD_OFFSET in reasons or any(
            claimed_start(self.segments.io, self.segments.path(start), size) not in (None, start) for start in later
        )

    def _resume_at(self, starts: list[int], found: LogEnd) -> int:
        """Where the log continues: after missing segments if the mark lies there, else at its end."""
        mark = self.mark.mark
        size = self.segments.segment_size
        if mark is None or not starts[-1] + size < mark.offset < LOG_BYTES_MAX:
            return found.end
        resume = _round_up(mark.offset, size)
        found.holes.append(Hole(_round_up(found.end, size), resume, MISSING_SEGMENT))
        found.last_store_timestamp_ms = max(found.last_store_timestamp_ms, mark.store_timestamp_ms)
        return resume

    def _finish(self, begin: int, found: LogEnd, known: Ranges, resume: int, started_from: str) -> LogState:
        """Record damage, cut after the end, make the rest durable."""
        state = LogState(begin, resume, found, started_from)
        state.fresh = self.ledger.replace(found.holes, self.now_ms())
        mark = self.mark.mark
        if mark is not None and resume < mark.offset < LOG_BYTES_MAX:
            self.ledger.record_cut(resume, mark.offset, self.now_ms())
        holes = self.ledger.ranges
        changed = [start for start, stop in known if (start, stop) not in holes]
        state.rebuild_from = max(begin, min(changed, default=resume))
        if found.cuts_records:
            self.on_cut_records(found.end)
        if self.keep_tail:
            self.files.quarantine_after_end(found.end)
        elif found.cuts_records:
            self.files.save_tail(found.end)
        self.recovery.cut(found)
        self.recovery.sync(found.start, found.end)
        if resume > found.end:
            self.recovery.seal(found.end)
            make_segment(self.segments.io, self.paths, resume, self.segments.segment_size)
        return state

    def _start_empty(self, known_end: int) -> LogState:
        """Start an empty log after the last position that queues, index and marks refer to."""
        begin = _round_up(min(known_end, LOG_BYTES_MAX), self.segments.segment_size)
        if known_end:
            self.ledger.record_cut(0, known_end, self.now_ms())
        found = LogEnd(begin, begin, ordered_from=begin)
        if self.mark.mark is not None:
            found.last_store_timestamp_ms = self.mark.mark.store_timestamp_ms
        self.ledger.replace([], self.now_ms())
        make_segment(self.segments.io, self.paths, begin, self.segments.segment_size)
        return LogState(begin, begin, found, "beginning", rebuild_from=begin)


def _within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Intersections of ranges with [start, stop)."""
    cut = [(max(start, first), min(stop, last)) for first, last in ranges]
    return [(first, last) for first, last in cut if first < last]


def _round_up(position: int, size: int) -> int:
    return -(-position // size) * size
