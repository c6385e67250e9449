"""One share of the log: its records checked, what they come to in each queue, its entries beside the index's items."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels import scan, verify
from mqproc.kernels.dispatch import StopReason
from mqproc.kernels.dispatch_buffers import DispatchBuffers, ScanResult
from mqproc.kernels.intrinsics import load_be32
from mqproc.kernels.record_check import (
    checked_size,
    record_size,
    signed_topic_length,
    topic_length_at,
    topic_length_size,
)
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.store.log_search import find_record_in, scan_piece
from mqproc.store.queue_table import QueueTable
from mqproc.store.verify.index_walk import IndexWalk
from mqproc.store.verify.inventory import Queue
from mqproc.store.verify.log_views import LogViews
from mqproc.store.verify.picture import Picture, Share

# What is checked is looked at again by dispatch: it should be in the cache still.
PIECE_BYTES: Final = 1 << 20
_RECORDS_MAX: Final = 1 << 14
_ENTRIES_MAX: Final = 1 << 16
# Queues that have no folder, beyond those that have one.
_MORE_QUEUES: Final = 1 << 16
_LET_GO_BYTES: Final = 32 << 20
_GAPS_MAX: Final = 10_000
MISSING: Final = -1
"""In the place of a reason: there is no segment."""
BAD_QUEUE: Final = -2
"""In the place of a reason: a record of a queue that cannot be."""
_NO_FOLDER: Final = re.compile(r"[/\x00]|\A\.\.?\Z")

Advance = Callable[[int], None]
Take = Callable[[ScanResult, QueueTable], None]
"""Told of each scan of whole, intact records, with the table that numbers its queues; valid until the next."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Log positions [start, stop) without an intact record."""

    start: int
    stop: int
    reason: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Two records of a queue, at `previous` and next at `physical_offset`; the second has `found`, not `expected`."""

    queue: Queue
    expected: int
    found: int
    previous: int
    physical_offset: int


@dataclass(slots=True)
class LogShare:
    """What a share holds: records and faults from `begin` (None: there is nothing) to `end`.

    `records_end` is where its last record or BLANK ends. `totals` int64[queues, TOTAL_COLUMNS] by number: those of the
    picture, then `more_queues`. `index_fits`: entries and items were equal.
    """

    share: Share
    begin: int | None = None
    end: int = 0
    records_end: int | None = None
    records: int = 0
    entries: int = 0
    last_store_timestamp_ms: int = 0
    max_store_timestamp_ms: int = 0
    faults: list[Fault] = field(default_factory=list)
    wrong_blanks: list[int] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    more_queues: list[Queue] = field(default_factory=list)
    totals: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, verify.TOTAL_COLUMNS), np.int64))
    index_fits: bool = True


class Scanner:
    """What dispatch would make of the log, piece by piece. Queues that are met are numbered."""

    def __init__(self, io: StoreIO, picture: Picture) -> None:
        self.views = LogViews(io, picture.inventory)
        self.queues = picture.queues
        self.table = QueueTable.in_memory(len(self.queues) + len(picture.deleted) + _MORE_QUEUES)
        for queue in self.queues:
            self.table.create_queue(*queue)
        for queue, deletion in picture.deleted.items():
            self.table.remember_deletion(*queue, *deletion)
        self.buffers = DispatchBuffers(self.table.capacity, _RECORDS_MAX, _ENTRIES_MAX, delays_ms=picture.delays_ms)

    @property
    def more_queues(self) -> list[Queue]:
        """Queues that the picture does not have, by number from its last one on."""
        return [self.table.name(number) for number in range(len(self.queues), self.table.count)]

    def scan(self, view: NDArray[np.uint8], start: int, stop: int, base: int) -> tuple[ScanResult, bool]:
        """Dispatch whole records of view[start:stop], and whether the next one's queue is one that cannot be.

        The result ends before `stop` when its buffers are full, or at such a record.
        """
        table = self.table
        while True:
            result = self.buffers.scan(
                view, table.bytes_view, table.cells, table.slots,
                start=start, limit=stop, stop=stop, segment_start=base,
            )  # fmt: skip
            if result.reason is not StopReason.UNKNOWN_QUEUE:
                return result, result.reason is StopReason.BAD_RECORD
            queue = _queue_at(view, result.stopped_at)
            if queue is None:
                return result, True
            table.create_queue(*queue)
            if result.stopped_at > start:
                return result, False

    def walk(self, begin: int, end: int, faults: Sequence[tuple[int, int]]) -> Iterator[ScanResult]:
        """Dispatch the records of [begin, end) once more, of which it is known where none are: `faults`, ascending.

        A result is valid until the next one.
        """
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
            self.views.let_go(base, position - base, result.stopped_at - (position - base))
            if result.reason is StopReason.BLANK or not moved:
                position = base + self.views.segment_size
            else:
                position = base + result.stopped_at


def _queue_at(view: NDArray[np.uint8], at: int) -> Queue | None:
    """Topic and queue id of the record at `at`, whose sizes hold; None when no folder can have these names."""
    width = topic_length_size(view, at)
    length_at = topic_length_at(view, at)
    start = length_at + width
    name = bytes(view[start : start + signed_topic_length(view, length_at, width)])
    queue_id = load_be32(view, at + record.QUEUE_ID)
    try:
        topic = name.decode()
    except UnicodeDecodeError:
        return None
    possible = 0 < len(name) <= table_layout.TOPIC_BYTES_MAX and queue_id >= 0 and not _NO_FOLDER.search(topic)
    return (topic, queue_id) if possible else None


class LogPass:
    """Walks shares, one after the other."""

    def __init__(
        self, io: StoreIO, picture: Picture, advance: Advance, take: Take = lambda result, table: None
    ) -> None:
        """`advance` is told of every so many bytes."""
        self._io = io
        self._picture = picture
        self._advance = advance
        self._take = take
        self._scanner = Scanner(io, picture)
        self._views = self._scanner.views
        capacity = self._scanner.table.capacity
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)
        self._totals = np.zeros(capacity * verify.TOTAL_COLUMNS, np.int64)
        self._gaps = np.zeros(_RECORDS_MAX * verify.GAP_COLUMNS, np.int64)

    def run(self, share: Share) -> LogShare:
        """Walk a share from its first record to where one begins at or behind its stop."""
        found = LogShare(share, end=share.stop)
        self._totals[:] = 0
        self._index = IndexWalk(self._io, self._picture, share) if share.compared else None
        found.begin = share.start if share.exact else self._first_record(share)
        if found.begin is not None:
            found.end = self._walk(found, found.begin)
        if self._index is not None:
            found.index_fits = self._index.ended()
            self._index.close()
        found.more_queues = self._scanner.more_queues
        known = len(self._scanner.queues) + len(found.more_queues)
        found.totals = self._totals[: known * verify.TOTAL_COLUMNS].reshape(known, verify.TOTAL_COLUMNS).copy()
        return found

    def close(self) -> None:
        """Close the segments."""
        self._views.close()

    def _first_record(self, share: Share) -> int | None:
        """Where the first record or BLANK of a share begins, which may be behind it; None: nowhere in it."""
        base = self._views.start_of(share.start)
        view = self._views.view(base)
        if view is not None and share.start - base < len(view):
            ranges = self._views.written_ranges(base, share.start - base, len(view))
            at = find_record_in(ranges, view, base, self._out)
            if at >= 0:
                return base + at
        return self._following(found_in=share, base=base)

    def _following(self, found_in: Share, base: int) -> int | None:
        """The next segment that is there, if it begins within the share."""
        following = self._views.following(base)
        return following if following is not None and following < found_in.stop else None

    def _walk(self, found: LogShare, position: int) -> int:
        """Walk the share from a position on; where that ended."""
        share = found.share
        while position < share.stop:
            base = self._views.start_of(position)
            view = self._views.view(base)
            if view is not None and position - base < len(view):
                position = self._walk_segment(found, view, base, position - base)
                continue
            following = self._following(share, base)
            end = share.stop if following is None else following
            found.faults.append(Fault(position, end, MISSING if view is None else scan.ZERO))
            position = end
        return position

    def _walk_segment(self, found: LogShare, view: NDArray[np.uint8], base: int, at: int) -> int:
        """Walk to the share's stop or the segment's end; the log position to go on at."""
        stop = min(found.share.stop - base, len(view))
        let_go = at
        while at < stop:
            self._views.read_ahead(base, at, stop)
            before = at
            at, reason = self._piece(found, view, base, at, stop)
            if reason == scan.BLANK:
                at = self._blank(found, view, base, at)
            elif reason != scan.REACHED_STOP:
                at = self._resync(found, view, base, at, stop, reason)
            self._advance(min(at, stop) - before)
            if at - let_go > _LET_GO_BYTES:
                self._views.let_go(base, let_go, at - let_go)
                let_go = at
        self._views.let_go(base, let_go, at - let_go)
        return base + at

    def _piece(self, found: LogShare, view: NDArray[np.uint8], base: int, at: int, stop: int) -> tuple[int, int]:
        """Check and dispatch one piece, of at least one record; (where it ended, why)."""
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
            gaps = int(verify.sum_runs(result.units, result.runs, self._totals, self._gaps))
            if gaps and len(found.gaps) < _GAPS_MAX:
                self._note_gaps(found, gaps)
            found.entries += result.entries
            self._take(result, self._scanner.table)
            if self._index is not None:
                self._index.match(result.hashes, result.offsets, result.times, result.entries)
            at = result.stopped_at
            if bad_queue:
                size = int(record_size(view, at, len(view)))
                found.faults.append(Fault(base + at, base + at + size, BAD_QUEUE))
                at += size

    def _note_gaps(self, found: LogShare, count: int) -> None:
        rows = self._gaps[: count * verify.GAP_COLUMNS].reshape(count, verify.GAP_COLUMNS).tolist()
        for number, *places in rows:
            found.gaps.append(Gap(self._scanner.table.name(number), *places))

    def _blank(self, found: LogShare, view: NDArray[np.uint8], base: int, at: int) -> int:
        """A BLANK: the log goes on in the next segment."""
        if load_be32(view, at + record.TOTAL_SIZE) != self._views.segment_size - at:
            found.wrong_blanks.append(base + at)
        found.records_end = base + self._views.segment_size
        return self._views.segment_size

    def _resync(self, found: LogShare, view: NDArray[np.uint8], base: int, at: int, stop: int, reason: int) -> int:
        """No record begins here: go on at the next one in this part of the segment, else at its end."""
        following = find_record_in(self._views.written_ranges(base, at + 1, stop), view, base, self._out)
        if following < 0:
            reaches_on = found.share.stop > base + self._views.segment_size
            following = self._views.segment_size if reaches_on else found.share.stop - base
        found.faults.append(Fault(base + at, base + following, reason))
        return following


def reason_at(views: LogViews, position: int) -> int:
    """Why no intact record begins at a position: a reason of record_check, MISSING, or 0 when one does."""
    base = views.start_of(position)
    view = views.view(base)
    if view is None:
        return MISSING
    size = int(checked_size(view, position - base, len(view), position, scan.VERIFY_ALL))
    return -size if size < 0 else 0
