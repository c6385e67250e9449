"""Dispatch (reput): records of the log become ConsumeQueue units and index entries, in bounded steps.

Order of a step: units, index entries, the `max_offset` words. The caller then publishes `dispatched`. Killed anywhere
in between, the successor rolls the index back to the last commit and does the step again: a unit's place is its queue
offset, so units are only written over by themselves.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.config import Options
from mqproc.delay_levels import delays_ms_of
from mqproc.io import StoreIO
from mqproc.kernels.dispatch import (
    RUN_COUNT,
    RUN_FIRST_OFFSET,
    RUN_QUEUE,
    StopReason,
)
from mqproc.kernels.dispatch_alone import AloneBuffers
from mqproc.kernels.dispatch_buffers import ScanResult
from mqproc.kernels.intrinsics import load_be64
from mqproc.kernels.publish import publish_queues
from mqproc.layout import queue_table as table_layout
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.consume_queue import ConsumeQueueFiles
from mqproc.store.end_fillers import end_fillers
from mqproc.store.index_files import IndexCommit, IndexFiles
from mqproc.store.queue_extent import explained_by
from mqproc.store.queue_table import QueueTable
from mqproc.store.segments import LogSegments
from mqproc.store.step_scan import (
    GOING_ON,
    STEP_BYTES_MAX,
    STEP_RECORDS_MAX,
    WIDE_PIECES_MAX,
    Scans,
    StepScan,
    runs_are_short,
)

# So many steps at least fit into what dispatch may be behind.
STEPS_BEHIND_MIN: Final = 16
# A step stays small where more than one run in so many begins a file.
NEW_FILES_PART: Final = 16
ROWS_AT_ONCE: Final = 512


class DispatchStep(msgspec.Struct, frozen=True):
    """What a step did. `position` is the new `dispatched`.

    With a `reason` outside GOING_ON dispatch cannot pass `position`: nothing of the record there was written.
    `store_timestamp_ms` is the last dispatched record's, 0 when the step had none.
    """

    position: int
    records: int
    entries: int
    store_timestamp_ms: int
    reason: StopReason

    @property
    def stuck(self) -> bool:
        return self.reason not in GOING_ON


@dataclass(frozen=True, slots=True)
class Gap:
    """Queue offsets [first, stop) of a queue that no record and no hole of the log explains.

    The record of the unit before them ends at `physical_end`, 0 when there is none, and the next one's begins at
    `physical_stop`.
    """

    number: int
    first: int
    stop: int
    physical_end: int
    physical_stop: int


class Dispatch:
    """Dispatch over one store's files. The only writer of ConsumeQueue and index bytes and of `max_offset` words."""

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
        mend: bool = False,
        put_entries: bool = True,
        only: Collection[int] | None = None,
        log_begin: int = 0,
        scans: Scans | None = None,
        step_bytes: int = STEP_BYTES_MAX,
        step_records: int = STEP_RECORDS_MAX,
        wide_records: int = 0,
        breathe: Callable[[], None] = lambda: None,
    ) -> None:
        """`holes` are ranges [start, stop) of damage in the log, which are jumped over. Fillers mark their units.

        For recovery: `mend` looks at the units that are there, writes only what differs, and notes `gaps`; without
        `put_entries` index entries are only counted; `only` are the numbers of the queues to write, None = all. What a
        log that begins above 0 lacks of a queue's beginning has expired. `scans` tell what the log has; None = this
        process scans, in steps of `step_bytes` and `step_records` at most, or of `wide_records` while runs are short.
        `breathe` is called now and then by a step that writes to many queues.
        """
        self._io = io
        self._table = table
        self._segments = segments
        self._queues = queues
        self.index = index
        self._commit: IndexCommit | None = index.commit()
        self._holes = sorted(holes)
        self._mend = mend
        self._puts_entries = put_entries
        self._only = only
        self._log_begin = log_begin
        self.mended_units = 0
        self.gaps: list[Gap] = []
        self._scans = scans or StepScan(
            table,
            segments,
            with_entries=options.message_index_enable,
            step_bytes=step_bytes,
            step_records=step_records,
            wide_records=wide_records,
            breathe=breathe,
            delays_ms=delays_ms_of(options.message_delay_level),
        )
        self._breathe = breathe
        # Who sends is held back by what is not dispatched: that must not move by too much at a time.
        room = options.max_dispatch_behind_bytes // (STEPS_BEHIND_MIN * step_bytes)
        self._wide_pieces = max(1, min(WIDE_PIECES_MAX, room)) if wide_records else 1
        self._pieces = 1
        # Without entries nothing is put that would say where the index stands.
        self._takes_alone = options.message_index_enable
        self._alone = AloneBuffers(
            table.bytes_view,
            table.cells,
            table.slots,
            delays_ms_of(options.message_delay_level),
        )
        # Where the index stood before a step that failed; entries have no place of their own as units have.
        self._undo: IndexCommit | None = None

    @property
    def index_commit(self) -> IndexCommit:
        """Where the index stands after the last step that went well."""
        if self._commit is None:
            self._commit = self.index.commit()
        return self._commit

    def step_alone(self, dispatched: int, confirmed: int, cells: NDArray[np.int64]) -> bool:
        """Dispatch the one record of [dispatched, confirmed), and say in the control file's `cells` what `publish_step`
        is to publish. A queue's reader may wait for just that.

        False when it is not one record, or takes more than that: `step` does it then. Raises as `step`.
        """
        segments, alone = self._segments, self._alone
        base = segments.start_of(dispatched)
        if not self._takes_alone or self._holes or self._undo or confirmed > base + segments.segment_size:
            return False
        # What has no key makes none: without this each unit would be written here, and by `step` once more.
        if not self.index.has_file:
            return False
        try:
            log = segments.view(base)
        except FileNotFoundError:
            return False
        if not alone.scan(log, dispatched - base, confirmed - base, base):
            return False
        segments.touched(dispatched, confirmed - dispatched)
        runs, run = alone.runs, alone.run
        self._make_way(runs)
        self._write(run[RUN_QUEUE], run[RUN_FIRST_OFFSET], alone.unit)
        self._remove_outlived(runs)
        self._io.crash_point("dispatch.units_written")
        if not self.index.put_alone(alone, cells):
            return False
        self._commit = None
        self._io.crash_point("dispatch.entries_put")
        publish_queues(self._table.cells, runs)
        self._io.crash_point("dispatch.queues_published")
        return True

    def step(self, dispatched: int, confirmed: int) -> DispatchStep:
        """Dispatch records from `dispatched` on, none at or above `confirmed`.

        Raises OSError (a full disk…), after which nothing is published and the same step can be tried again.
        """
        self.undo()
        start, stop = self._between_holes(dispatched, confirmed)
        if start >= stop:
            return DispatchStep(start, 0, 0, 0, StopReason.LIMIT)
        try:
            result = self._scans.scan(start, stop, self._pieces)
        except FileNotFoundError:
            return DispatchStep(start, 0, 0, 0, StopReason.BAD_RECORD)
        self._make_way(result.runs)
        made = self._queues.files_made
        self._write_units(result, start)
        self._choose_pieces(result, self._queues.files_made - made)
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
        return DispatchStep(
            position=self._behind_hole(position),
            records=result.records,
            entries=result.entries,
            store_timestamp_ms=result.store_timestamp_ms,
            reason=result.reason,
        )

    def undo(self) -> None:
        """Take back the entries that a failed step has put; the next step would do it too."""
        if self._undo is not None:
            self.index.roll_back(self._undo)
            self._undo = None

    def add_hole(self, start: int, stop: int) -> None:
        """Jump over [start, stop) from now on."""
        bisect.insort(self._holes, (start, stop))

    def let_go_of_deleted(self, minimum: int) -> None:
        """Let go of files that retention deletes when the log's minimum is `minimum`, and of those of queues that are
        deleted: else they keep their space.
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
        """(start, stop) of a range without holes: `dispatched` or the end of its hole, and the next hole's start."""
        if not self._holes:
            return dispatched, confirmed
        start = self._behind_hole(dispatched)
        following = bisect.bisect_left(self._holes, (start, start))
        if following < len(self._holes):
            confirmed = min(confirmed, self._holes[following][0])
        return start, confirmed

    def _behind_hole(self, position: int) -> int:
        for start, stop in self._holes:
            if start <= position < stop:
                position = stop
        return position

    def _choose_pieces(self, result: ScanResult, files_made: int) -> None:
        """A run costs a write and, with many queues, the opening of a file. While runs are short, a step takes more of
        the log when dispatch is behind, so that a queue's units of all of it are one run. New files cost most, and are
        the same number either way.
        """
        runs = len(result.runs)
        is_wide = runs_are_short(runs, result.records) and NEW_FILES_PART * files_made < runs
        self._pieces = self._wide_pieces if is_wide else 1

    def _write_units(self, result: ScanResult, start: int) -> None:
        """Write each run, and fillers before it for what a hole before `start` has swallowed of its queue."""
        holes = self._holes and self._holes[: bisect.bisect_left(self._holes, (start, start))]
        ends: dict[int, int] = {}
        is_plain = not holes and not self._mend
        only, units, write = self._only, result.units, self._write
        runs = result.runs
        rows = runs.tolist() if len(runs) <= ROWS_AT_ONCE else _rows(runs, self._breathe)
        for number, first, count, offset, _end, _time in rows:
            if only is not None and number not in only:
                continue
            run = units[offset : offset + count * UNIT_SIZE]
            if not is_plain:
                expected = max(ends.get(number, 0), self._table.max_offset(number))
                if first < expected and self._log_begin > 0:
                    self._end_expired(number, first)
                if first > expected:
                    # Holes lie before `start`: only a queue's first run of a step can be behind one.
                    self._explain_gap(number, expected, first, load_be64(run, 0), () if number in ends else holes)
                elif self.gaps and first < expected:
                    self.gaps[:] = without(self.gaps, number, first, first + count)
                ends[number] = max(first + count, ends.get(number, 0))
            write(number, first, run)

    def _write(self, number: int, first: int, units: NDArray[np.uint8]) -> None:
        topic, queue_id = self._table.name(number)
        generation = self._table.generation(number) if self._table.deletions else number
        if self._mend:
            self.mended_units += self._queues.mend_run(topic, queue_id, first, units, generation)
        else:
            self._queues.write_run(topic, queue_id, first, units, generation)

    def _end_expired(self, number: int, first: int) -> None:
        """Units of expired records end where the queue's first record in the log is: what more of them there are came
        with a file of another queue.
        """
        if self._table.last_physical_end(number) <= self._log_begin:
            self._table.store(number, table_layout.MAX_OFFSET, first)

    def _explain_gap(
        self, number: int, first: int, stop: int, physical_offset: int, holes: Sequence[tuple[int, int]]
    ) -> None:
        """Queue offsets [first, stop) have no record before the one at `physical_offset`: fillers, if a hole is why."""
        physical_end = self._table.last_physical_end(number)
        expired = first == 0 and self._log_begin > 0
        size = self._segments.segment_size
        place = None if expired else explained_by(holes, stop - first, physical_end, physical_offset, size)
        if place is not None:
            self._write(number, first, end_fillers(stop - first, place, size))
        elif self._mend:
            self.gaps.append(Gap(number, first, stop, physical_end, physical_offset))

    def _make_way(self, runs: NDArray[np.int64]) -> None:
        """Before the first unit of a queue that was made again: remove what came to lie there of the deleted one."""
        if self._table.deletions:
            first = self._of_queues(runs, table_layout.FIRST_OFFSET)
            nothing_published = self._of_queues(runs, table_layout.MAX_OFFSET) <= first
            self._remove_files(runs[(first > 0) & nothing_published])

    def _remove_outlived(self, runs: NDArray[np.int64]) -> None:
        """Queues may be deleted while their units are written: these must not stay, the writer has removed the others.

        The writer stores the word that is looked at here before it removes files.
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
        self._breathe()
        self._undo = self.index_commit
        self.index.put(result.hashes, result.offsets, result.times, result.entries)
        self._commit = self.index.commit()
        self._undo = None


def without(gaps: Iterable[Gap], number: int, first: int, stop: int) -> Iterator[Gap]:
    """Gaps but for queue offsets [first, stop) of a queue: a record further on in the log had them, behind one whose
    queue offset is too high.
    """
    for gap in gaps:
        if gap.number != number or stop <= gap.first or gap.stop <= first:
            yield gap
            continue
        if gap.first < first:
            yield replace(gap, stop=first)
        if stop < gap.stop:
            yield replace(gap, first=stop)


def _rows(runs: NDArray[np.int64], breathe: Callable[[], None]) -> Iterator[list[int]]:
    """Each run's row, a few hundred made at a time."""
    for start in range(0, len(runs), ROWS_AT_ONCE):
        yield from runs[start : start + ROWS_AT_ONCE].tolist()
        breathe()
