"""Rebuild of queues and index from the log, with the engine's own dispatch.

`DispatchStep` plans the ranges to dispatch. `Rebuild` dispatches one range: it creates missing queues, skips and
records damage, and stops early on a full disk, where the dispatcher of the started group continues. For long ranges
`ScanAhead` scans the log in other processes.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import multiprocessing
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mqproc.kernels import record_check, scan
from mqproc.kernels.dispatch import IndexEntries, ScanResult, StopReason
from mqproc.kernels.jit.intrinsics import load_be64
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.dispatch import (
    CONTINUING,
    STEP_BYTES_MAX,
    STEP_RECORDS_MAX,
    Dispatch,
    DispatchScan,
    QueueGap,
    ScanSource,
    StepLimits,
    index_entries,
)
from mqproc.store.durable_marks import DurableMark
from mqproc.store.recovery.index import IndexStep
from mqproc.store.recovery.log import OnProgress, OpenStore, Resync
from mqproc.store.recovery.queues import QueueRecovery, queue_of_record
from mqproc.util.signals import deferred_signals, reset_signals_in_child
from mqproc.util.units import DELAYS_MS, MIB, delays_ms_of

# Parallel scan. Scanner processes scan pieces of a range a few steps ahead of dispatch, which takes them in order.
#
#     scanner 0:  piece 0 ──▶ piece 2 ──▶ …        shared arrays        dispatch:  piece 0, 1, 2, 3 …
#     scanner 1:  piece 1 ──▶ piece 3 ──▶ …   ───────────────────────▶    writes units, puts entries
#
# Pieces are cut at fixed sizes; a scanner starts at the first intact record of its piece. Its result is used only if
# dispatch arrives exactly there, so it equals what dispatch would have found itself. Otherwise, and where a scanner
# stopped (damage, a queue missing in the table), dispatch scans the piece. Scanners change nothing and may be killed.


if TYPE_CHECKING:
    _Pipe = Connection[Any, Any]

# Dispatch takes about as long for a piece as a scanner.
_SCANNERS_MAX: Final = 2
# Absorbs short delays on either side.
_PIECES_PER_SCANNER: Final = 4
# Scanning a piece takes a fraction of a second even on a slow disk.
_ANSWER_TIMEOUT_S: Final = 60.0
_NO_RECORD_BEGIN: Final = -1


@dataclass(frozen=True, slots=True)
class Scanners:
    """Number of scanner processes (0: none) and the minimum range that they scan."""

    count: int = 0
    # Smaller ranges are done before a process has started.
    range_bytes_min: int = 64 * MIB
    piece_bytes: int = STEP_BYTES_MAX


NO_SCANNERS: Final = Scanners()


def usable_scanners() -> Scanners:
    """One scanner for each processor beyond the one that dispatch uses, within a limit."""
    return Scanners(min(len(os.sched_getaffinity(0)) - 1, _SCANNERS_MAX))


class ScanAhead:
    """Parallel scan of [start, stop) for one dispatch. Close it to end the scanners."""

    def __init__(
        self,
        table: QueueTable,
        segments: LogSegments,
        start: int,
        stop: int,
        scanners: Scanners,
        report: Callable[[str], None],
        *,
        entries: IndexEntries = IndexEntries.KEYS,
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """Fork the scanners. `report` gets a line if they cannot start or end early."""
        self._segments = segments
        self._report = report
        self._starts, self._limits = _pieces(start, stop, segments.segment_size, scanners.piece_bytes)
        self._local = DispatchScan(table, segments, entries=entries, delays_ms=delays_ms)
        # Indexed by piece modulo their number: arrays are reused only after their previous result was taken.
        self._scans = [
            DispatchScan(table, segments, entries=entries, zeros=self._shared_zeros, delays_ms=delays_ms)
            for _ in range(_PIECES_PER_SCANNER * scanners.count)
        ]
        self._sent = 0
        self._current = _NO_RECORD_BEGIN
        self._pipes: list[_Pipe] = []
        self._processes: list[BaseProcess] = []
        try:
            for _ in range(scanners.count):
                self._start()
        except OSError as error:
            self._stop_scanners(str(error))
        except BaseException:
            self.close()
            raise

    def scan(self, start: int, stop: int, pieces: int = 1) -> ScanResult:
        """As `ScanSource`; a scanner's piece is one step."""
        piece = bisect.bisect_right(self._limits, start)
        if piece > self._current:
            self._current = piece
            if self._pipes and self._result_start(piece) == start:
                result = self._scans[piece % len(self._scans)].result()
                end = self._segments.start_of(start) + result.stopped_at
                # A scanner ignores known damage, and its table may be older than dispatch's.
                if result.reason in CONTINUING and (end < stop or stop == self._limits[-1]):
                    return result
        return self._local.scan_below(start, self._limits[piece], stop)

    def close(self) -> None:
        """End the scanners, including busy scanners."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []

    def _result_start(self, piece: int) -> int:
        """Start of a piece's result, or _NO_RECORD_BEGIN; also sends pieces to free scanners."""
        pipe = self._pipes[piece % len(self._pipes)]
        try:
            self._sent = max(self._sent, piece)
            while self._sent < min(piece + len(self._scans), len(self._limits)):
                self._pipes[self._sent % len(self._pipes)].send(self._sent)
                self._sent += 1
            while pipe.poll(_ANSWER_TIMEOUT_S):
                found, begin = pipe.recv()
                if found == piece:
                    return int(begin)
            why = f"no answer in {_ANSWER_TIMEOUT_S:.0f} s"
        except (EOFError, ConnectionResetError, BrokenPipeError):
            wait([process.sentinel for process in self._processes], _ANSWER_TIMEOUT_S)
            codes = [process.exitcode for process in self._processes if not process.is_alive()]
            why = f"exit code {', '.join(map(str, codes))}"
        self._stop_scanners(why)
        return _NO_RECORD_BEGIN

    def _stop_scanners(self, why: str) -> None:
        self._report(f"recovery: parallel scan of the log stopped: {why}")
        self.close()

    def _shared_zeros(self, count: int, dtype: DTypeLike) -> NDArray[Any]:
        size = count * np.dtype(dtype).itemsize
        return np.frombuffer(self._segments.io.shared_memory(size), dtype, count)

    def _start(self) -> None:
        local, remote = multiprocessing.Pipe()
        others = [*self._pipes, local]
        process = multiprocessing.get_context("fork").Process(target=self._serve, args=(remote, others), daemon=True)
        with deferred_signals(forking=True):
            process.start()
            self._pipes.append(local)
            self._processes.append(process)
        remote.close()

    # In the scanner process

    def _serve(self, pipe: _Pipe, others: Sequence[_Pipe]) -> None:
        """Main function of a scanner: receive piece numbers, send the starts of their results."""
        # A copy of dispatch's end would hide that dispatch is gone.
        for other in others:
            other.close()
        reset_signals_in_child()
        resync = Resync(self._segments)
        try:
            while True:
                piece = pipe.recv()
                pipe.send((piece, self._scan_piece(piece, resync)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return

    def _scan_piece(self, piece: int, resync: Resync) -> int:
        """Scan a piece into its arrays; return the start of its first record, or _NO_RECORD_BEGIN."""
        limit = self._limits[piece]
        # Dispatch prefetches too, but scanners are further ahead.
        self._segments.read_ahead(self._starts[piece], self._limits[-1])
        begin = resync.next_record(self._starts[piece], limit)
        if begin is None:
            return _NO_RECORD_BEGIN
        self._scans[piece % len(self._scans)].scan_below(begin, limit, self._limits[-1])
        return begin


def _pieces(start: int, stop: int, segment_size: int, piece_bytes: int) -> tuple[list[int], list[int]]:
    """(starts, limits) of the pieces of [start, stop); no piece crosses a segment's end."""
    starts, limits = [], []
    while start < stop:
        starts.append(start)
        segment_end = start - start % segment_size + segment_size
        start = min(start + piece_bytes, segment_end, stop)
        limits.append(start)
    return starts, limits


_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True)
class RebuildResult:
    """Result of dispatching from `start` to `position`; `no_room`: stopped by a full disk."""

    start: int
    position: int
    records: int = 0
    entries: int = 0
    repaired_units: int = 0
    gaps: list[QueueGap] = field(default_factory=list)
    no_room: OSError | None = None

    def add(self, other: RebuildResult) -> None:
        """Add the result of a later range."""
        self.start = min(self.start, other.start)
        self.position = other.position
        self.records += other.records
        self.entries += other.entries
        self.repaired_units += other.repaired_units
        self.gaps = [*self.gaps, *other.gaps]
        self.no_room = other.no_room


class Rebuild:
    """Dispatches ranges of the log of a stopped store."""

    def __init__(self, store: OpenStore, scanners: Scanners, on_progress: OnProgress) -> None:
        self._store = store
        self._table = store.table
        self._segments = store.segments
        self._scanners = scanners
        self._on_progress = on_progress
        self._resync = Resync(store.segments)

    def run(
        self,
        start: int,
        stop: int,
        *,
        counted: IndexEntries | None = None,
        only: Collection[int] | None = None,
    ) -> RebuildResult:
        """Dispatch [start, stop); with `counted` these index entries are only counted.

        With `only`, units are written only for these queue numbers. Raises CorruptStoreError, OSError.
        """
        store = self._store
        entries = index_entries(store.options) if counted is None else counted
        with contextlib.ExitStack() as stack:
            dispatch = Dispatch(
                store.io,
                store.options,
                store.table,
                store.segments,
                store.queues,
                store.index,
                holes=store.ledger.ranges,
                repair=True,
                put_entries=counted is None,
                only=only,
                log_begin=store.log.begin,
                scans=self._scans(stack, start, stop, entries),
            )
            return self._run(dispatch, start, stop)

    def _scans(self, stack: contextlib.ExitStack, start: int, stop: int, entries: IndexEntries) -> ScanSource:
        delays_ms = delays_ms_of(self._store.options.message_delay_level)
        # For short ranges use small arrays: allocating large arrays would take longer than the scan.
        if not self._scanners.count or stop - start < self._scanners.range_bytes_min:
            limits = StepLimits(piece_records=min(STEP_RECORDS_MAX, (stop - start) // record.BODY + 1))
            return DispatchScan(self._table, self._segments, limits, entries=entries, delays_ms=delays_ms)
        ahead = ScanAhead(
            self._table,
            self._segments,
            start,
            stop,
            self._scanners,
            self._store.report,
            entries=entries,
            delays_ms=delays_ms,
        )
        return stack.enter_context(contextlib.closing(ahead))

    def _run(self, dispatch: Dispatch, start: int, stop: int) -> RebuildResult:
        done = RebuildResult(start, start, gaps=dispatch.gaps)
        try:
            while done.position < stop:
                self._on_progress(done.position - start, stop - start)
                self._segments.read_ahead(done.position, stop)
                step = dispatch.step(done.position, stop)
                done.records += step.records
                done.entries += step.entries
                queue = self._queue_at(step.position) if step.reason is StopReason.UNKNOWN_QUEUE else None
                if queue is not None:
                    # A queue of a deleted topic continues at its old end, or where another program restarted it.
                    number = self._table.create_queue(*queue)
                    base = self._segments.start_of(step.position)
                    place = step.position - base + record.QUEUE_OFFSET
                    self._table.begin_at(number, load_be64(self._segments.view(base), place))
                elif step.stuck:
                    hole = self._resync.hole_at(step.position, stop)
                    self._store.ledger.add(hole, self._store.now_ms())
                    dispatch.add_hole(hole.start, hole.stop)
                done.position = step.position
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            dispatch.undo()
            done.no_room = error
        done.repaired_units = dispatch.repaired_units
        return done

    def advance_next_offsets(self, start: int, stop: int) -> None:
        """Raise the queues' next offsets for records of [start, stop) that could not be dispatched."""
        next_offsets = np.zeros(self._table.capacity, np.int64)
        out = np.zeros(scan.SCAN_SIZE, np.int64)
        position = start
        while position < stop:
            position = next((last for first, last in self._store.ledger.ranges if first <= position < last), position)
            base = self._segments.start_of(position)
            view = self._segments.view(base)
            end = min(len(view), stop - base)
            table = self._table.bytes_view, self._table.cells, self._table.slots
            reason = scan.update_next_offsets(view, position - base, end, base, *table, next_offsets, out)
            if out[scan.FIRST_UNKNOWN] >= 0 and (queue := self._queue_at(base + int(out[scan.FIRST_UNKNOWN]))):
                self._table.create_queue(*queue)
                continue
            position = base + (len(view) if reason == record_check.BLANK else int(out[scan.STOPPED_AT]))
            if reason not in (record_check.BLANK, record_check.REACHED_STOP):
                position = self._resync.hole_at(position, stop).stop
        for number in np.flatnonzero(next_offsets).tolist():
            raised = max(int(next_offsets[number]), self._table.next_offset(number))
            self._table.store(number, table_layout.NEXT_OFFSET, raised)

    def _queue_at(self, physical_offset: int) -> tuple[str, int] | None:
        base = self._segments.start_of(physical_offset)
        return queue_of_record(self._segments.view(base), physical_offset - base)


# Plan of a recovery's dispatch: brings queues and index to the end of the log and dispatches no range twice.
#
#     index                 log position                    queues' limit                  end
#     below lost queues      index ├────── all, with entries ──────┼───── all, with entries ─────┤
#     between            lost queues ├─ lost queues ─┤ index ├─ all ─┼───── all, with entries ─────┤
#     ahead              lost queues ├────────── lost queues ──────────┼─ all ─┤ index ├─ all, … ────┤
#
# At the limit, lost queues get fillers for units whose records are no longer in the log.


@dataclass(slots=True)
class DispatchStep:
    """Dispatch of one recovery. `index`: None if disabled; `mark`: that of the queues."""

    store: OpenStore
    rebuild: Rebuild
    queues: QueueRecovery
    index: IndexStep | None
    mark: DurableMark
    rebuilt: set[int] = field(default_factory=set)
    """Numbers of queues rebuilt below the mark."""
    implausible: list[QueueGap] = field(default_factory=list)
    """Gaps of rebuilt queues before implausible records."""

    def run(self, index_at: int) -> RebuildResult:
        """Dispatch to the end of the log. The index is complete below `index_at`.

        On a full disk both end at the result's position. Raises OSError, also for a full disk while lost queues exist.
        """
        log, limit = self.store.log, self.queues.limit
        done = RebuildResult(limit, limit)
        if self.queues.lost:
            done.add(self._bring_lost(index_at))
            index_at = max(index_at, limit)
        if limit < index_at:
            required = IndexEntries.NONE if self.index is None else self.index.required
            counted = self.rebuild.run(limit, index_at, counted=required)
            # RocketMQ puts some entries twice.
            is_compared = limit == log.begin and counted.no_room is None
            if self.index is not None and is_compared and self.index.count_entries() < counted.entries:
                self.store.report(f"recovery: index: entries are missing below {index_at:,}; it is rebuilt")
                self._cut_index(log.begin)
                index_at = log.begin
            counted.entries = 0
            done.add(counted)
        if done.no_room is None:
            # Units are compared, so dispatching them again is harmless; entries must be put only once.
            done.add(self.rebuild.run(index_at, log.end))
        else:
            # Both continue at one position: entries above it would be put twice.
            self._cut_index(done.position)
        return done

    def rebuild_queues(self, lost: dict[int, int], stop: int) -> RebuildResult:
        """Rebuild queues up to `stop`, each from the position in `lost`. Raises OSError."""
        self.mark.lower(min(lost.values()))
        # If all are lost above `stop`, nothing below it needs to be dispatched.
        done = self.rebuild.run(min(stop, *lost.values()), stop, counted=IndexEntries.NONE, only=lost)
        if done.no_room is not None:
            raise done.no_room
        self.rebuilt.update(lost)
        return done

    def _bring_lost(self, index_at: int) -> RebuildResult:
        """Bring lost queues to the limit, and the index on the way if it ends below that."""
        lost, limit = self.queues.lost, self.queues.limit
        done = RebuildResult(limit, limit)
        self.mark.lower(min(lost.values()))
        if min(lost.values()) < (alone := min(index_at, limit)):
            done.add(self.rebuild_queues(lost, alone))
        if index_at < limit:
            done.add(self.rebuild.run(index_at, limit))
            if done.no_room is not None:
                raise done.no_room
        self.rebuilt.update(lost)
        self.implausible = self.queues.implausible(done.gaps)
        # Units below the limit without records are lost, or the records skip them. Fill gaps between records, and the
        # ends that the last run knew.
        self.queues.fill(done.gaps, self.store.ledger.ranges, keep_units=True)
        done.gaps = []
        self.queues.top_up(self.store.ledger.ranges)
        return done

    def _cut_index(self, position: int) -> None:
        if self.index is not None:
            self.index.cut(position)
