"""Verification of the CommitLog: records are checked in shares, then the shares joined.

`LogPass` checks the records of one share, sums up the units they imply for each queue and compares their index entries
with the index. `join_shares` combines the results: the end of one share must be the start of the next; anything in
between is damage, or the end of the log.
"""

from __future__ import annotations

import bisect
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io.store_io import StoreIO, dirty_end
from mqproc.kernels import index_verify, record_check, scan, verify
from mqproc.kernels.dispatch import DispatchBuffers, ScanResult, StopReason
from mqproc.kernels.jit.intrinsics import load_be32
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import checked_size, record_size
from mqproc.layout import index_file, record
from mqproc.store.commitlog.segments import find_record_in, scan_piece, written_ranges
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import merged
from mqproc.store.recovery.queues import queue_of_record
from mqproc.store.verify.findings import Finding, FindingKind
from mqproc.store.verify.inventory import MISSING_ALONE_MAX, Inventory, Queue
from mqproc.store.verify.snapshot import IndexFile, Share, Snapshot
from mqproc.util.units import PAGE_BYTES

# Segments as arrays

_MAPPED_MAX = 16
# Readahead within a segment.
AHEAD_BYTES = 16 << 20


class SegmentViews:
    """Read-only maps of a store's segments, also of truncated segments; a few are open."""

    def __init__(self, io: StoreIO, inventory: Inventory) -> None:
        self._io = io
        self._inventory = inventory
        self._maps: OrderedDict[int, tuple[int, mmap.mmap, NDArray[np.uint8]]] = OrderedDict()
        self._requested = 0

    @property
    def segment_size(self) -> int:
        return self._inventory.sizes.segment

    def start_of(self, physical_offset: int) -> int:
        return physical_offset - physical_offset % self.segment_size

    def view(self, start: int) -> NDArray[np.uint8] | None:
        """Segment at `start` as uint8[≤ segment size]; None if it does not exist (any more)."""
        size = self._inventory.segments.get(start)
        if size is None:
            return None
        found = self._maps.get(start)
        if found is None:
            try:
                fd = self._io.open(self._inventory.paths.commit_log / f"{start:020d}")
            except FileNotFoundError:
                return None
            mapping = self._io.map_without_filling_holes(fd, min(size, self.segment_size))
            self._requested = 0
            while len(self._maps) >= _MAPPED_MAX:
                self._io.close(self._maps.popitem(last=False)[1][0])
            found = self._maps[start] = fd, mapping, as_kernel_array(mapping)
        self._maps.move_to_end(start)
        return found[2]

    def next_start(self, start: int) -> int | None:
        """Start of the first existing segment after `start`."""
        return min((other for other in self._inventory.segments if other > start), default=None)

    def read_ahead(self, start: int, position: int, stop: int) -> None:
        """Prefetch the bytes after `position`, up to `stop`, of a segment that is read sequentially."""
        if position + AHEAD_BYTES > self._requested:
            ahead = max(self._requested, position)
            self._requested = position + 2 * AHEAD_BYTES
            if ahead < stop:
                self._io.read_ahead(self._maps[start][0], ahead, min(self._requested, stop) - ahead)

    def written_ranges(self, start: int, position: int, stop: int) -> Iterator[tuple[int, int]]:
        """Small written ranges of [position, stop), each released when the next is requested."""
        for first, last in written_ranges(self._io, self._maps[start][0], position, stop):
            yield first, last
            self.release(start, first, last - first)

    def release(self, start: int, position: int, size: int) -> None:
        """Release pages: resident pages count as this process's memory."""
        found = self._maps.get(start)
        if found is not None and size > 0:
            self._io.release_pages(found[1], position, size)

    def release_all(self) -> None:
        """Release the pages of all segments."""
        for _fd, mapping, _view in self._maps.values():
            self._io.release_pages(mapping, 0, len(mapping))

    def close(self) -> None:
        """Close the files; each map lives as long as a view of it."""
        while self._maps:
            self._io.close(self._maps.popitem()[1][0])


# Dispatch reads a piece again after it was checked: it should still be in the cache.
PIECE_BYTES: Final = 1 << 20
_RECORDS_MAX: Final = 1 << 14
_ENTRIES_MAX: Final = 1 << 16
# Room for queues that have records but no folder.
_MORE_QUEUES: Final = 1 << 16
_RELEASE_BYTES: Final = 32 << 20
_GAPS_MAX: Final = 10_000
MISSING: Final = -1
"""Fault reason: the segment is missing."""
BAD_QUEUE: Final = -2
"""Fault reason: a record with an invalid queue."""

Advance = Callable[[int], None]
OnScan = Callable[[ScanResult, QueueTable], None]
"""Called with each scan of intact records and the table that numbers its queues; valid until the next call."""


@dataclass(frozen=True, slots=True)
class LogFault:
    """Log range [start, stop) without an intact record."""

    start: int
    stop: int
    reason: int


@dataclass(frozen=True, slots=True)
class OffsetGap:
    """Non-consecutive queue offsets of the records at `previous` and `physical_offset`."""

    queue: Queue
    expected: int
    found: int
    previous: int
    physical_offset: int


@dataclass(slots=True)
class LogShare:
    """Result for one share: records and faults from `begin` (None: no records) to `end`.

    `records_end` is the end of its last record or BLANK. `totals` int64[queues, TOTAL_COLUMNS]: queues of the snapshot,
    then `more_queues`. `index_fits`: the index entries matched.
    """

    share: Share
    begin: int | None = None
    end: int = 0
    records_end: int | None = None
    records: int = 0
    entries: int = 0
    last_store_timestamp_ms: int = 0
    max_store_timestamp_ms: int = 0
    faults: list[LogFault] = field(default_factory=list)
    wrong_blanks: list[int] = field(default_factory=list)
    gaps: list[OffsetGap] = field(default_factory=list)
    more_queues: list[Queue] = field(default_factory=list)
    totals: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, verify.TOTAL_COLUMNS), np.int64))
    index_fits: bool = True


class LogScanner:
    """Dispatches the log to memory, piece by piece; new queues are added to its table."""

    def __init__(self, io: StoreIO, snapshot: Snapshot) -> None:
        self.views = SegmentViews(io, snapshot.inventory)
        self.queues = snapshot.queues
        self.table = QueueTable.in_memory(len(self.queues) + len(snapshot.deleted) + _MORE_QUEUES)
        for queue in self.queues:
            self.table.create_queue(*queue)
        for queue, deletion in snapshot.deleted.items():
            self.table.remember_deletion(*queue, *deletion)
        self._entries = snapshot.entries
        self.buffers = DispatchBuffers(self.table.capacity, _RECORDS_MAX, _ENTRIES_MAX, delays_ms=snapshot.delays_ms)

    @property
    def more_queues(self) -> list[Queue]:
        """Queues missing from the snapshot, in the order of their numbers."""
        return [self.table.name(number) for number in range(len(self.queues), self.table.count)]

    def scan(self, view: NDArray[np.uint8], start: int, stop: int, base: int) -> tuple[ScanResult, bool]:
        """Dispatch the records of view[start:stop]; also return whether the next queue is invalid.

        The result ends before `stop` if its buffers are full or at such a record.
        """
        table = self.table
        while True:
            result = self.buffers.scan(
                view, table.bytes_view, table.cells, table.slots,
                start=start, limit=stop, stop=stop, segment_start=base, entries=self._entries,
            )  # fmt: skip
            if result.reason is not StopReason.UNKNOWN_QUEUE:
                return result, result.reason is StopReason.BAD_RECORD
            queue = queue_of_record(view, result.stopped_at)
            if queue is None:
                return result, True
            table.create_queue(*queue)
            if result.stopped_at > start:
                return result, False

    def walk(self, begin: int, end: int, faults: Sequence[tuple[int, int]]) -> Iterator[ScanResult]:
        """Dispatch the records of [begin, end) outside `faults`; a result is valid until the next."""
        position = begin
        while position < end:
            position = next((stop for start, stop in faults if start <= position < stop), position)
            base = self.views.start_of(position)
            view = self.views.view(base)
            if view is None or position - base >= len(view):
                position = base + self.views.segment_size
                continue
            fault = min((start for start, _stop in faults if start > position), default=end)
            stop = min(end, fault, base + len(view)) - base
            result, _bad_queue = self.scan(view, position - base, stop, base)
            yield result
            moved = base + result.stopped_at > position
            self.views.release(base, position - base, result.stopped_at - (position - base))
            if result.reason is StopReason.BLANK or not moved:
                position = base + self.views.segment_size
            else:
                position = base + result.stopped_at


# Items beside the log: both are in log order


def is_required(hashes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which entries an index must have: all but the marked entries, which are for tags."""
    required: NDArray[np.bool_] = hashes >= 0
    return required


class IndexWalk:
    """Compares the items of one share with the entries of its records."""

    def __init__(self, io: StoreIO, snapshot: Snapshot, share: Share) -> None:
        self._io = io
        self._snapshot = snapshot
        self._slots = snapshot.inventory.sizes.slots
        self._files = snapshot.index
        self._out = np.zeros(index_verify.MATCH_SIZE, np.int64)
        self._number = -1
        self._view: NDArray[np.uint8] | None = None
        self._end = self._place(share.stop)
        self._at = self._place(share.start)
        self.fits = True

    def match(
        self, hashes: NDArray[np.int32], offsets: NDArray[np.int64], times: NDArray[np.int64], count: int
    ) -> None:
        """Compare the next `count` entries."""
        entry = 0
        while self.fits and entry < count:
            self._step_over_ends()
            number, item = self._at
            view = self._open(number) if self._at < self._end else None
            if view is None:
                self.fits = not is_required(hashes[entry:count]).any()
                return
            file = self._files[number]
            stop = self._end[1] if number == self._end[0] else file.header.count
            reason = index_verify.match_entries(
                view, self._slots, item, stop, file.previous_end_ms,
                hashes, offsets, times, entry, count, self._out,
            )  # fmt: skip
            entry = int(self._out[index_verify.MATCH_ENTRY])
            self._at = number, int(self._out[index_verify.MATCH_ITEM])
            self.fits = reason != index_verify.DIFFERS

    def finish(self) -> bool:
        """Return whether entries and items were equal to the end of the share."""
        self._step_over_ends()
        return self.fits and self._at >= self._end

    def _step_over_ends(self) -> None:
        """Move from the end of a file to the next one that has items."""
        while self._at[0] < len(self._files) and self._at[1] >= self._files[self._at[0]].header.count:
            self._at = self._at[0] + 1, index_file.FIRST_ITEM

    def _place(self, physical_offset: int) -> tuple[int, int]:
        """(file, item) of the first item at or above a log position; past the end without one."""
        for number, file in enumerate(self._files):
            header = file.header
            if header.count > index_file.FIRST_ITEM and header.end_physical_offset >= physical_offset:
                view = self._open(number)
                if view is not None:
                    item = int(index_verify.first_item_at(view, self._slots, header.count, physical_offset))
                    if item < header.count:
                        return number, item
        return len(self._files), index_file.FIRST_ITEM

    def _open(self, number: int) -> NDArray[np.uint8] | None:
        """Map a file, or reuse the last map; None if the file is gone."""
        if self._number != number:
            self._view = index_view(self._io, self._snapshot, self._files[number])
            self._number = number
        return self._view


def index_view(io: StoreIO, snapshot: Snapshot, file: IndexFile) -> NDArray[np.uint8] | None:
    """Map an index file; None if retention has deleted it meanwhile."""
    try:
        with io.opened(snapshot.inventory.paths.index / file.name) as fd:
            return as_kernel_array(io.map_without_filling_holes(fd, snapshot.inventory.sizes.index_file))
    except FileNotFoundError:
        return None


class LogPass:
    """Checks the records of shares, one share after the other."""

    def __init__(
        self, io: StoreIO, snapshot: Snapshot, advance: Advance, on_scan: OnScan = lambda result, table: None
    ) -> None:
        """`advance` is called with the number of bytes checked since its last call."""
        self._io = io
        self._snapshot = snapshot
        self._advance = advance
        self._on_scan = on_scan
        self._scanner = LogScanner(io, snapshot)
        self._views = self._scanner.views
        capacity = self._scanner.table.capacity
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)
        self._totals = np.zeros(capacity * verify.TOTAL_COLUMNS, np.int64)
        self._gaps = np.zeros(_RECORDS_MAX * verify.GAP_COLUMNS, np.int64)

    def run(self, share: Share) -> LogShare:
        """Check a share from its first record to the first one that begins at or after its stop."""
        found = LogShare(share, end=share.stop)
        self._totals[:] = 0
        self._index = IndexWalk(self._io, self._snapshot, share) if share.compared else None
        found.begin = share.start if share.exact else self._first_record(share)
        if found.begin is not None:
            found.end = self._walk(found, found.begin)
        if self._index is not None:
            found.index_fits = self._index.finish()
            self._index = None
        found.more_queues = self._scanner.more_queues
        known = len(self._scanner.queues) + len(found.more_queues)
        found.totals = self._totals[: known * verify.TOTAL_COLUMNS].reshape(known, verify.TOTAL_COLUMNS).copy()
        return found

    def close(self) -> None:
        """Close the segments."""
        self._views.close()

    def _first_record(self, share: Share) -> int | None:
        """Position of the share's first record or BLANK, possibly after its stop; None without one."""
        base = self._views.start_of(share.start)
        view = self._views.view(base)
        if view is not None and share.start - base < len(view):
            ranges = self._views.written_ranges(base, share.start - base, len(view))
            at = find_record_in(ranges, view, base, self._out)
            if at >= 0:
                return base + at
        return self._next_segment(found_in=share, base=base)

    def _next_segment(self, found_in: Share, base: int) -> int | None:
        """Start of the next existing segment if it lies within the share."""
        next_start = self._views.next_start(base)
        return next_start if next_start is not None and next_start < found_in.stop else None

    def _walk(self, found: LogShare, position: int) -> int:
        """Check the share from `position` on; return where that ended."""
        share = found.share
        while position < share.stop:
            base = self._views.start_of(position)
            view = self._views.view(base)
            if view is not None and position - base < len(view):
                position = self._walk_segment(found, view, base, position - base)
                continue
            next_start = self._next_segment(share, base)
            end = share.stop if next_start is None else next_start
            found.faults.append(LogFault(position, end, MISSING if view is None else record_check.ZERO))
            position = end
        return position

    def _walk_segment(self, found: LogShare, view: NDArray[np.uint8], base: int, at: int) -> int:
        """Check up to the share's stop or the segment's end; return the next log position."""
        stop = min(found.share.stop - base, len(view))
        release = at
        while at < stop:
            self._views.read_ahead(base, at, stop)
            before = at
            at, reason = self._piece(found, view, base, at, stop)
            if reason == record_check.BLANK:
                at = self._blank(found, view, base, at)
            elif reason != record_check.REACHED_STOP:
                at = self._resync(found, view, base, at, stop, reason)
            self._advance(min(at, stop) - before)
            if at - release > _RELEASE_BYTES:
                self._views.release(base, release, at - release)
                release = at
        self._views.release(base, release, at - release)
        return base + at

    def _piece(self, found: LogShare, view: NDArray[np.uint8], base: int, at: int, stop: int) -> tuple[int, int]:
        """Check and dispatch one piece of at least one record; return (end, reason for ending)."""
        out = self._out
        reason = scan_piece(view, at, stop, base, PIECE_BYTES, out)
        stopped = int(out[scan.STOPPED_AT])
        if stopped == at:
            return at, reason
        found.records += int(out[scan.COUNT])
        found.records_end = base + stopped
        found.last_store_timestamp_ms = int(out[scan.LAST_STORE_TIMESTAMP_MS])
        found.max_store_timestamp_ms = max(found.max_store_timestamp_ms, int(out[scan.MAX_STORE_TIMESTAMP_MS]))
        if found.share.compared:
            self._dispatch(found, view, base, at, stopped)
        return stopped, reason

    def _dispatch(self, found: LogShare, view: NDArray[np.uint8], base: int, at: int, stop: int) -> None:
        while at < stop:
            result, bad_queue = self._scanner.scan(view, at, stop, base)
            gaps = int(verify.add_runs(result.units, result.runs, self._totals, self._gaps))
            if gaps and len(found.gaps) < _GAPS_MAX:
                self._add_gaps(found, gaps)
            found.entries += int(np.count_nonzero(is_required(result.hashes)))
            self._on_scan(result, self._scanner.table)
            if self._index is not None:
                self._index.match(result.hashes, result.offsets, result.times, result.entries)
            at = result.stopped_at
            if bad_queue:
                size = int(record_size(view, at, len(view)))
                found.faults.append(LogFault(base + at, base + at + size, BAD_QUEUE))
                at += size

    def _add_gaps(self, found: LogShare, count: int) -> None:
        rows = self._gaps[: count * verify.GAP_COLUMNS].reshape(count, verify.GAP_COLUMNS).tolist()
        for number, *places in rows:
            found.gaps.append(OffsetGap(self._scanner.table.name(number), *places))

    def _blank(self, found: LogShare, view: NDArray[np.uint8], base: int, at: int) -> int:
        """Handle a BLANK: the log continues in the next segment."""
        if load_be32(view, at + record.TOTAL_SIZE) != self._views.segment_size - at:
            found.wrong_blanks.append(base + at)
        found.records_end = base + self._views.segment_size
        return self._views.segment_size

    def _resync(self, found: LogShare, view: NDArray[np.uint8], base: int, at: int, stop: int, reason: int) -> int:
        """Skip damage: return the next record in this part of the segment, else its end."""
        next_start = find_record_in(self._views.written_ranges(base, at + 1, stop), view, base, self._out)
        if next_start < 0:
            reaches_on = found.share.stop > base + self._views.segment_size
            next_start = self._views.segment_size if reaches_on else found.share.stop - base
        found.faults.append(LogFault(base + at, base + next_start, reason))
        return next_start


def reason_at(views: SegmentViews, position: int) -> int:
    """Why no intact record begins at `position` (record_check reason, MISSING); 0 if one does."""
    base = views.start_of(position)
    view = views.view(base)
    if view is None:
        return MISSING
    size = int(checked_size(view, position - base, len(view), position, record_check.VERIFY_ALL))
    return -size if size < 0 else 0


# Joining the shares


_KINDS: Final = {
    record_check.ZERO: FindingKind.RECORD_ZEROS,
    record_check.BAD_MAGIC: FindingKind.RECORD_MAGIC,
    record_check.BAD_SIZE: FindingKind.RECORD_SIZE,
    record_check.BAD_OFFSET: FindingKind.RECORD_OFFSET,
    record_check.BAD_BODY_CRC: FindingKind.RECORD_BODY_CRC,
    record_check.BAD_PROPERTY_CRC: FindingKind.RECORD_CRC,
    BAD_QUEUE: FindingKind.RECORD_QUEUE,
    MISSING: FindingKind.SEGMENT_MISSING,
}
_UNKNOWN: Final = 0
# Number of zeros at the end of a page that cannot be a coincidence.
_PAGE_TAIL_BYTES: Final = 16


@dataclass(slots=True)
class WholeLog:
    """The log as a whole: records in [begin, end), `faults` between them, findings."""

    begin: int
    end: int = 0
    records: int = 0
    entries: int = 0
    last_store_timestamp_ms: int = 0
    max_store_timestamp_ms: int = 0
    faults: list[LogFault] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unwritten: set[int] = field(default_factory=set)
    """Starts of faults with pages that end in zeros: a crash or a copy lost data written there."""
    ends_with_loss: bool = False
    """The log ends with lost segments that recovery skipped; nothing was appended since."""

    @property
    def fault_ranges(self) -> list[tuple[int, int]]:
        """Damaged ranges [start, stop), ascending, adjacent ranges merged."""
        return merged((fault.start, fault.stop) for fault in self.faults)


def join_shares(
    io: StoreIO,
    snapshot: Snapshot,
    shares: list[LogShare],
    again: Callable[[Share], LogShare],
    known_holes: list[tuple[int, int]],
) -> WholeLog:
    """Join the shares in order. `again` rechecks a share from another start."""
    log = WholeLog(snapshot.positions.begin)
    views = SegmentViews(io, snapshot.inventory)
    faults, cursor = _add_shares(log, snapshot, shares, again)
    faults = _merge_faults(snapshot, views, faults, log.end)
    _skip_known_loss(snapshot, log, known_holes)
    if log.ends_with_loss:
        faults = [fault for fault in faults if fault.start < cursor]
        faults.append(LogFault(cursor, log.end, MISSING))
    log.faults = [fault for fault in faults if log.begin <= fault.start < log.end]
    log.unwritten = {fault.start for fault in log.faults if _has_unwritten_page(views, fault)}
    log.findings += _fault_findings(snapshot, log.faults, known_holes)
    if snapshot.positions.end is None and not snapshot.positions.running:
        tail = next((fault for fault in faults if fault.start >= log.end), None)
        log.findings += _tail_findings(io, snapshot, log.end, tail)
    views.close()
    return log


def _add_shares(
    log: WholeLog, snapshot: Snapshot, shares: list[LogShare], again: Callable[[Share], LogShare]
) -> tuple[list[LogFault], int]:
    """Sum up the shares in `log`; return (faults in and between them, end of the last share)."""
    cursor = log.end = snapshot.shares[0].start if snapshot.shares else snapshot.positions.begin
    faults: list[LogFault] = []
    for place, found in enumerate(shares):
        if found.begin is not None and found.begin < cursor:
            # The share's first record lies within the previous share's last one.
            stop = found.share.stop
            found = shares[place] = again(Share(found.share.number, cursor, stop, True, found.share.compared))
        begin = found.share.stop if found.begin is None else found.begin
        if begin > cursor:
            faults.append(LogFault(cursor, begin, _UNKNOWN))
        faults += found.faults
        cursor = max(cursor, found.end)
        log.records += found.records
        log.entries += found.entries
        log.end = max(log.end, found.records_end or 0)
        if found.records:
            log.last_store_timestamp_ms = found.last_store_timestamp_ms
            log.max_store_timestamp_ms = max(log.max_store_timestamp_ms, found.max_store_timestamp_ms)
        log.findings += [_finding(snapshot, FindingKind.BLANK_SIZE, position, 8) for position in found.wrong_blanks]
    return faults, cursor


def _skip_known_loss(snapshot: Snapshot, log: WholeLog, known: list[tuple[int, int]]) -> None:
    """Move the end of the log after a known hole there: it continues in the next segment."""
    for start, stop in merged(known):
        if start <= log.end < stop and stop in snapshot.inventory.segments:
            log.end = stop
            log.ends_with_loss = True


def _merge_faults(snapshot: Snapshot, views: SegmentViews, faults: Iterable[LogFault], end: int) -> list[LogFault]:
    """Merge faults that a share border cut, each with its reason.

    Merged faults never cross a segment border or the log's `end`: the last record may have an invalid queue.
    """
    joined: list[LogFault] = []
    for fault in faults:
        for part in _split_by_segment(fault, snapshot.inventory):
            last = joined[-1] if joined else None
            is_border = part.start == end or part.start % snapshot.inventory.sizes.segment == 0
            if last is not None and last.stop == part.start and not is_border:
                joined[-1] = LogFault(last.start, part.stop, last.reason)
            else:
                joined.append(part)
    return [
        fault if fault.reason != _UNKNOWN else LogFault(fault.start, fault.stop, reason_at(views, fault.start))
        for fault in joined
    ]


def _split_by_segment(fault: LogFault, inventory: Inventory) -> Iterable[LogFault]:
    """Split a fault at segment borders; beyond MISSING_ALONE_MAX segments the rest is one part."""
    whole = inventory.sizes.segment
    present = sorted(inventory.segments)
    start, alone = fault.start, 0
    reason = fault.reason
    while start < fault.stop:
        stop = min(fault.stop, start - start % whole + whole)
        alone = alone + 1 if start not in inventory.segments else 0
        if alone > MISSING_ALONE_MAX:
            next_start = bisect.bisect_left(present, start)
            stop = min(fault.stop, present[next_start]) if next_start < len(present) else fault.stop
        yield LogFault(start, stop, reason)
        start, reason = stop, _UNKNOWN


def _has_unwritten_page(views: SegmentViews, fault: LogFault) -> bool:
    base = views.start_of(fault.start)
    view = views.view(base)
    if view is None:
        return False
    first, stop = fault.start - base, min(fault.stop - base, len(view)) // PAGE_BYTES * PAGE_BYTES
    ends = range(first - first % PAGE_BYTES + PAGE_BYTES, stop + 1, PAGE_BYTES)
    return any(not view[max(first, end - _PAGE_TAIL_BYTES) : end].any() for end in ends)


def _fault_findings(snapshot: Snapshot, faults: list[LogFault], known: list[tuple[int, int]]) -> Iterable[Finding]:
    """Findings for faults, except missing segments that the inventory has reported."""
    for fault in faults:
        kind = _KINDS.get(fault.reason, FindingKind.RECORD_MAGIC)
        is_known = any(start <= fault.start and fault.stop <= stop for start, stop in merged(known))
        if is_known:
            yield _finding(snapshot, FindingKind.KNOWN_HOLE, fault.start, fault.stop - fault.start, f"{kind}")
        elif kind is not FindingKind.SEGMENT_MISSING:
            yield _finding(snapshot, kind, fault.start, fault.stop - fault.start)


def _finding(snapshot: Snapshot, kind: FindingKind, position: int, size: int, text: str = "") -> Finding:
    offset = position % snapshot.inventory.sizes.segment
    return Finding(kind, snapshot.inventory.segment_name(position), offset, position, size=size, text=text)


def _tail_findings(io: StoreIO, snapshot: Snapshot, end: int, fault: LogFault | None) -> Iterable[Finding]:
    """Findings for bytes other than zeros after the end of the log."""
    segment = snapshot.inventory.sizes.segment
    for start, size in sorted(snapshot.inventory.segments.items()):
        if start + size <= end:
            continue
        position = max(end, start) - start
        with io.opened(snapshot.inventory.paths.commit_log / f"{start:020d}") as fd:
            dirty = min(dirty_end(io, fd, position), segment)
        if dirty > position:
            reason = record_check.REASON_NAMES[fault.reason] if fault is not None and fault.reason > 0 else ""
            kind = _KINDS.get(fault.reason) if fault is not None else None
            text = f"{kind}: {reason}" if kind is not None and start <= end else ""
            yield _finding(snapshot, FindingKind.TORN_TAIL, start + position, dirty - position, text)
