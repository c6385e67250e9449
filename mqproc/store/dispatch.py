"""Dispatch (reput): build queue units and index entries from the log, in bounded steps.

A step writes units, index entries, then the `max_offset` words; the caller then publishes `dispatched`. After a kill in
between, the successor rolls the index back to the last commit and repeats the step. That is idempotent for units, whose
position is their queue offset.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.kernels.dispatch import (
    RUN_COUNT,
    RUN_FIRST_OFFSET,
    RUN_QUEUE,
    DispatchBuffers,
    IndexEntries,
    ScanResult,
    StopReason,
    Zeros,
)
from mqproc.kernels.dispatch_step import SingleRecordBuffers, publish_queues
from mqproc.kernels.jit.intrinsics import load_be64
from mqproc.layout import queue_table as table_layout
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import end_fillers, explained_by
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.index.files import IndexCommit, IndexFiles
from mqproc.store.lost_messages import LostMessages, store_time_at
from mqproc.util.units import DELAYS_MS, MIB, delays_ms_of

# Scan of a step: a bounded range of one segment as units by queue and index entries

STEP_BYTES_MAX: Final = 8 * MIB
STEP_RECORDS_MAX: Final = 65_536
# Usually two and a few; a step with more ends earlier.
ENTRIES_PER_RECORD: Final = 4

# Runs with fewer units than this on average are short.
SHORT_RUN_UNITS: Final = 16
# Limits of a step of several pieces.
WIDE_PIECES_MAX: Final = 16
WIDE_RECORDS_MAX: Final = 4 * STEP_RECORDS_MAX
WIDE_RUNS_MAX: Final = 65_536

# The piece is complete; the next one may follow in the same step.
_PIECE_DONE: Final = frozenset({StopReason.LIMIT, StopReason.RECORDS})
# After these the log continues where the scan ended.
CONTINUING: Final = frozenset({StopReason.LIMIT, StopReason.RECORDS, StopReason.BLANK, StopReason.ENTRIES_FULL})


def index_entries(options: Options) -> IndexEntries:
    """Entries that the index of a store has."""
    if not options.message_index_enable:
        return IndexEntries.NONE
    return IndexEntries.KEYS_AND_TAGS if options.message_index_tags else IndexEntries.KEYS


def runs_are_short(runs: int, records: int) -> bool:
    """Whether writing a run, which may include opening a file, costs more than its units."""
    return SHORT_RUN_UNITS * runs > records


class ScanSource(Protocol):
    """Source of scans for dispatch."""

    def scan(self, start: int, stop: int, pieces: int = 1) -> ScanResult:
        """Scan records of [start, stop), at most to the end of the segment or step.

        A step has up to `pieces` pieces of the log, if the source supports that. The result is valid until the next
        call. Raises FileNotFoundError if the segment is deleted, and CorruptStoreError.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a step: a piece has up to `piece_bytes` and `piece_records`.

    Several pieces together have up to `wide_records`; 0 = a step is one piece. `between_pieces` is called between them,
    and regularly while a step writes to many queues.
    """

    piece_bytes: int = STEP_BYTES_MAX
    piece_records: int = STEP_RECORDS_MAX
    wide_records: int = 0
    between_pieces: Callable[[], None] = lambda: None


LIMITS: Final = StepLimits()


class DispatchScan:
    """Scans in this process."""

    def __init__(
        self,
        table: QueueTable,
        segments: LogSegments,
        limits: StepLimits = LIMITS,
        *,
        entries: IndexEntries = IndexEntries.KEYS,
        zeros: Zeros = np.zeros,
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """Allocate the results with `zeros`; `table` numbers the queues, `delays_ms` is per level."""
        self._table = table
        self._segments = segments
        self._limits = limits
        self._entries = entries
        records_max = max(limits.piece_records, limits.wide_records)
        entries_max = ENTRIES_PER_RECORD * records_max
        self._buffers = DispatchBuffers(table.capacity, records_max, entries_max, zeros, delays_ms)

    def scan(self, start: int, stop: int, pieces: int = 1) -> ScanResult:
        piece_bytes = self._limits.piece_bytes
        if pieces == 1 or stop - start <= piece_bytes:
            return self.scan_below(start, start + piece_bytes, stop)
        base = self._segments.start_of(start)
        end = min(stop, base + self._segments.segment_size)
        self._buffers.begin()
        at = start
        for piece in range(pieces):
            if piece:
                self._limits.between_pieces()
            self._add(at, at + piece_bytes, stop)
            found = self._buffers.progress()
            at = base + found.stopped_at
            has_room = found.records < self._buffers.records_max and found.runs < WIDE_RUNS_MAX
            is_worthwhile = has_room and runs_are_short(found.runs, found.records)
            if found.reason not in _PIECE_DONE or at >= end or not is_worthwhile:
                break
        return self._buffers.finish()

    def scan_below(self, start: int, limit: int, stop: int) -> ScanResult:
        """Scan one piece: records that begin below `limit`, which lies in the segment or at its end."""
        self._buffers.begin()
        self._add(start, limit, stop)
        return self._buffers.finish()

    def _add(self, start: int, limit: int, stop: int) -> None:
        base = self._segments.start_of(start)
        stopped_at = self._buffers.add(
            self._segments.view(base),
            *self._table.arrays,
            start=start - base,
            limit=limit - base,
            stop=min(stop - base, self._segments.segment_size),
            segment_start=base,
            records_max=self._limits.piece_records,
            entries=self._entries,
        )
        self._segments.note_read(start, stopped_at - (start - base))

    def result(self) -> ScanResult:
        """Result of the last scan, even if it was made by a process that shares the arrays."""
        return self._buffers.result()


# At least this many steps fit into `max_dispatch_behind_bytes`.
STEPS_BEHIND_MIN: Final = 16
# A step stays small if more than one in this many runs begins a new file.
NEW_FILES_PART: Final = 16
ROWS_AT_ONCE: Final = 512


class DispatchResult(msgspec.Struct, frozen=True):
    """Result of a step. `position` is the new `dispatched`.

    A `reason` outside CONTINUING means that dispatch cannot pass `position`; nothing of the record there was written.
    `store_timestamp_ms` is that of the last dispatched record, 0 for none.
    """

    position: int
    records: int
    entries: int
    store_timestamp_ms: int
    reason: StopReason

    @property
    def stuck(self) -> bool:
        return self.reason not in CONTINUING


@dataclass(frozen=True, slots=True)
class QueueGap:
    """Queue offsets [first, stop) that neither a record nor a hole of the log explains.

    The previous unit's record ends at `physical_end` (0 without one), the next one's begins at `physical_stop`.
    """

    number: int
    first: int
    stop: int
    physical_end: int
    physical_stop: int


class Dispatch:
    """Dispatch of one store: the only writer of ConsumeQueues, index and `max_offset` words."""

    def __init__(
        self,
        io: StoreIO,
        options: Options,
        table: QueueTable,
        segments: LogSegments,
        queues: ConsumeQueueFiles,
        index: IndexFiles,
        *,
        holes: Sequence[tuple[int, int]] = (),
        repair: bool = False,
        put_entries: bool = True,
        only: Collection[int] | None = None,
        log_begin: int = 0,
        scans: ScanSource | None = None,
        limits: StepLimits = LIMITS,
    ) -> None:
        """Dispatch to these files; damaged ranges of the log, `holes`, are replaced by fillers.

        For recovery: `repair` compares with existing units, writes only differences and collects `gaps`; without
        `put_entries` index entries are only counted; `only` limits the queues written, by number; units before the
        first record of a log that begins above 0 (`log_begin`) have expired. `scans` provides scans; None = in this
        process, with these `limits`.
        """
        self._io = io
        self._table = table
        self._segments = segments
        self._queues = queues
        self.index = index
        self._commit: IndexCommit | None = index.commit()
        self._holes = sorted(holes)
        self._repair = repair
        self._puts_entries = put_entries
        self._only = only
        self._log_begin = log_begin
        self.repaired_units = 0
        self.gaps: list[QueueGap] = []
        self.on_lost: Callable[[LostMessages], object] = lambda lost: None
        """Called after fillers for lost messages were written."""
        # Without entries no index state would be stored for publication.
        self._takes_single = options.message_index_enable
        entries, delays_ms = index_entries(options), delays_ms_of(options.message_delay_level)
        self.single = SingleRecordBuffers(*table.arrays, delays_ms, entries)
        self._scans = scans or DispatchScan(table, segments, limits, entries=entries, delays_ms=delays_ms)
        self._between_pieces = limits.between_pieces
        # Undispatched bytes hold producers back (back-pressure), so one step must not be too large.
        room = options.max_dispatch_behind_bytes // (STEPS_BEHIND_MIN * limits.piece_bytes)
        self._wide_pieces = max(1, min(WIDE_PIECES_MAX, room)) if limits.wide_records else 1
        self._pieces = 1
        # State of the index before a failed step: unlike units, entries are not idempotent.
        self._undo: IndexCommit | None = None

    @property
    def index_commit(self) -> IndexCommit:
        """State of the index after the last successful step."""
        if self._commit is None:
            self._commit = self.index.commit()
        return self._commit

    def step_single(self, dispatched: int, confirmed: int, cells: NDArray[np.int64]) -> bool:
        """Dispatch the only record of [dispatched, confirmed), for which a reader may be waiting.

        It stores in the control file's `cells` what `publish_step` publishes. Returns False if there are several
        records or more is needed: then call `step`. Raises as `step`.
        """
        segments, single = self._segments, self.single
        base = segments.start_of(dispatched)
        if not self._takes_single or self._holes or self._undo or confirmed > base + segments.segment_size:
            return False
        # Without an open index file the unit would be written here and again by `step`.
        if not self.index.has_file:
            return False
        try:
            log = segments.view(base)
        except FileNotFoundError:
            return False
        if not single.scan(log, dispatched - base, confirmed - base, base):
            return False
        segments.note_read(dispatched, confirmed - dispatched)
        runs, run = single.runs, single.run
        self._remove_previous(runs)
        self._write(run[RUN_QUEUE], run[RUN_FIRST_OFFSET], single.unit)
        self._remove_outlived(runs)
        self._io.crash_point("dispatch.units_written")
        if not self.index.put_single(single, cells):
            return False
        self._commit = None
        self._io.crash_point("dispatch.entries_put")
        publish_queues(self._table.cells, runs)
        self._io.crash_point("dispatch.queues_published")
        return True

    def step(self, dispatched: int, confirmed: int) -> DispatchResult:
        """Dispatch records from `dispatched` on, none at or above `confirmed`.

        Raises OSError (a full disk…); then nothing is published and the step can be repeated.
        """
        self.undo()
        start, stop = self._between_holes(dispatched, confirmed)
        if start >= stop:
            return DispatchResult(start, 0, 0, 0, StopReason.LIMIT)
        try:
            result = self._scans.scan(start, stop, self._pieces)
        except FileNotFoundError:
            return DispatchResult(start, 0, 0, 0, StopReason.BAD_RECORD)
        self._remove_previous(result.runs)
        created_before = self._queues.files_created
        self._write_units(result, start)
        self._choose_pieces(result, self._queues.files_created - created_before)
        self._remove_outlived(result.runs)
        self._io.crash_point("dispatch.units_written")
        self._put_entries(result)
        self._io.crash_point("dispatch.entries_put")
        publish_queues(self._table.cells, result.runs)
        self._io.crash_point("dispatch.queues_published")
        segment_start = self._segments.start_of(start)
        position = segment_start + result.stopped_at
        if result.reason is StopReason.BLANK:
            position = segment_start + self._segments.segment_size
        end = self._after_hole(position)
        return DispatchResult(end, result.records, result.entries, result.store_timestamp_ms, result.reason)

    def undo(self) -> None:
        """Remove the index entries of a failed step; the next step does this, too."""
        if self._undo is not None:
            self.index.roll_back(self._undo)
            self._undo = None

    def add_hole(self, start: int, stop: int) -> None:
        """Skip [start, stop) from now on."""
        bisect.insort(self._holes, (start, stop))

    def close_deleted(self, minimum: int) -> None:
        """Close files that retention deletes for this minimum of the log, and deleted queues' files.

        Their space stays in use until then.
        """
        self._segments.forget_below(minimum)
        self._queues.forget_deleted(self._kept_of)

    def _kept_of(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        table = self._table
        number = table.find(topic, queue_id)
        return (table.generation(number), table.min_offset(number)) if number >= 0 else None

    def close(self) -> None:
        """Close the files; the table and the segments are the caller's."""
        self._queues.close()
        self.index.close()

    def _between_holes(self, dispatched: int, confirmed: int) -> tuple[int, int]:
        """(start, stop) of the next range without holes, up to `confirmed`."""
        if not self._holes:
            return dispatched, confirmed
        start = self._after_hole(dispatched)
        following = bisect.bisect_left(self._holes, (start, start))
        if following < len(self._holes):
            confirmed = min(confirmed, self._holes[following][0])
        return start, confirmed

    def _after_hole(self, position: int) -> int:
        for start, stop in self._holes:
            if start <= position < stop:
                position = stop
        return position

    def _choose_pieces(self, result: ScanResult, files_created: int) -> None:
        """Choose the number of pieces of the next step.

        Each run costs a write and, with many queues, opening a file. While runs are short, a step covers more of the
        log, so that a queue's units form one run. New files cost most, and are the same number either way.
        """
        runs = len(result.runs)
        is_wide = runs_are_short(runs, result.records) and NEW_FILES_PART * files_created < runs
        self._pieces = self._wide_pieces if is_wide else 1

    def _write_units(self, result: ScanResult, start: int) -> None:
        """Write each run, after fillers for records of its queue lost in a hole before `start`."""
        holes = self._holes and self._holes[: bisect.bisect_left(self._holes, (start, start))]
        ends: dict[int, int] = {}
        is_plain = not holes and not self._repair
        only, units, write = self._only, result.units, self._write
        runs = result.runs
        rows = runs.tolist() if len(runs) <= ROWS_AT_ONCE else _rows(runs, self._between_pieces)
        for number, first, count, offset, _end, _time in rows:
            if only is not None and number not in only:
                continue
            run = units[offset : offset + count * UNIT_SIZE]
            if not is_plain:
                expected = max(ends.get(number, 0), self._table.max_offset(number))
                if first < expected and self._log_begin > 0:
                    self._end_expired(number, first)
                if first > expected:
                    # Holes lie before `start`: only a queue's first run of a step can follow one.
                    self._explain_gap(number, expected, first, load_be64(run, 0), () if number in ends else holes)
                elif self.gaps and first < expected:
                    self.gaps[:] = without(self.gaps, number, first, first + count)
                ends[number] = max(first + count, ends.get(number, 0))
            write(number, first, run)

    def _write(self, number: int, first: int, units: NDArray[np.uint8]) -> None:
        topic, queue_id = self._table.name(number)
        generation = self._table.generation(number) if self._table.deletions else number
        if self._repair:
            self.repaired_units += self._queues.repair_run(topic, queue_id, first, units, generation)
        else:
            self._queues.write_run(topic, queue_id, first, units, generation)

    def _end_expired(self, number: int, first: int) -> None:
        """End expired units at the queue's first record: later units came with a foreign file."""
        if self._table.last_physical_end(number) <= self._log_begin:
            self._table.store(number, table_layout.MAX_OFFSET, first)

    def _explain_gap(
        self, number: int, first: int, stop: int, physical_offset: int, holes: Sequence[tuple[int, int]]
    ) -> None:
        """Write fillers for [first, stop) before the record at `physical_offset` if a hole is why."""
        physical_end = self._table.last_physical_end(number)
        expired = first == 0 and self._log_begin > 0
        size = self._segments.segment_size
        place = None if expired else explained_by(holes, stop - first, physical_end, physical_offset, size)
        if place is not None:
            self._write(number, first, end_fillers(stop - first, place, size))
            after_ms = self._table.words[table_layout.entry_word(number, table_layout.LAST_STORE_TIMESTAMP_MS)]
            before_ms = store_time_at(self._segments, physical_offset)
            self.on_lost(LostMessages(*self._table.name(number), first, stop, after_ms, before_ms))
        elif self._repair:
            self.gaps.append(QueueGap(number, first, stop, physical_end, physical_offset))

    def _remove_previous(self, runs: NDArray[np.int64]) -> None:
        """Remove leftovers of the deleted queue before the first unit of a new one of that name."""
        if self._table.deletions:
            first = self._of_queues(runs, table_layout.FIRST_OFFSET)
            nothing_published = self._of_queues(runs, table_layout.MAX_OFFSET) <= first
            self._remove_files(runs[(first > 0) & nothing_published])

    def _remove_outlived(self, runs: NDArray[np.int64]) -> None:
        """Remove units of queues that were deleted during the step.

        The writer stores the word that is checked here before it removes files.
        """
        if self._table.deletions:
            ends = runs[:, RUN_FIRST_OFFSET] + runs[:, RUN_COUNT]
            self._remove_files(runs[ends <= self._of_queues(runs, table_layout.FIRST_OFFSET)])

    def _of_queues(self, runs: NDArray[np.int64], word: int) -> NDArray[np.int64]:
        """A word of each run's queue: int64[runs]."""
        entries = table_layout.HEADER_WORDS + runs[:, RUN_QUEUE] * table_layout.ENTRY_WORDS
        found: NDArray[np.int64] = self._table.cells[entries + word]
        return found

    def _remove_files(self, runs: NDArray[np.int64]) -> None:
        for number in np.unique(runs[:, RUN_QUEUE]).tolist():
            if self._only is None or number in self._only:
                self._queues.remove(*self._table.name(number))

    def _put_entries(self, result: ScanResult) -> None:
        if result.entries == 0 or not self._puts_entries:
            return
        self._between_pieces()
        self._undo = self.index_commit
        self.index.put(result.hashes, result.offsets, result.times, result.entries)
        self._commit = self.index.commit()
        self._undo = None


def without(gaps: Iterable[QueueGap], number: int, first: int, stop: int) -> Iterator[QueueGap]:
    """Gaps without queue offsets [first, stop) of a queue.

    A later record of the log had these offsets, after one with a queue offset that is too high.
    """
    for gap in gaps:
        if gap.number != number or stop <= gap.first or gap.stop <= first:
            yield gap
            continue
        if gap.first < first:
            yield replace(gap, stop=first)
        if stop < gap.stop:
            yield replace(gap, first=stop)


def _rows(runs: NDArray[np.int64], between_pieces: Callable[[], None]) -> Iterator[list[int]]:
    """Rows of the runs, converted a few hundred at a time."""
    for start in range(0, len(runs), ROWS_AT_ONCE):
        yield from runs[start : start + ROWS_AT_ONCE].tolist()
        between_pieces()
