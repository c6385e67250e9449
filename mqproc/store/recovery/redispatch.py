"""Recovery's dispatch: a range of the log into queues and index, around whatever is damaged in it.

The engine's own steps, with what a running group needs other roles for: queues that are not in the table are made, and
where no record begins the log is searched for the next one and the damage is written down. A full disk ends it early:
the group may start, and its dispatcher goes on there.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from mqproc.config import Options
from mqproc.delay_levels import delays_ms_of
from mqproc.io import StoreIO
from mqproc.kernels import scan
from mqproc.kernels.dispatch import StopReason
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.record_check import signed_topic_length, topic_length_at, topic_length_size
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.store.consume_queue import ConsumeQueueFiles
from mqproc.store.damage import DamageLedger
from mqproc.store.dispatcher import Dispatch, Gap
from mqproc.store.index_files import IndexFiles
from mqproc.store.queue_table import QueueTable
from mqproc.store.recovery.log_recovery import Told
from mqproc.store.recovery.resync import Resync
from mqproc.store.recovery.scan_ahead import ScanAhead, Scanners
from mqproc.store.segments import LogSegments
from mqproc.store.step_scan import STEP_RECORDS_MAX, Scans, StepScan

# A folder's name has no slash and no NUL, and these two are other folders.
_NO_FOLDER: Final = re.compile(rb"[/\x00]|\A\.\.?\Z")
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True)
class Redispatched:
    """What the range from `start` on gave. `position` is its end, or where a full disk (`no_room`) stopped it."""

    start: int
    position: int
    records: int = 0
    entries: int = 0
    mended_units: int = 0
    gaps: list[Gap] = field(default_factory=list)
    no_room: OSError | None = None

    def add(self, other: Redispatched) -> None:
        """Take in what a range gave that was gone over after it."""
        self.start = min(self.start, other.start)
        self.position = other.position
        self.records += other.records
        self.entries += other.entries
        self.mended_units += other.mended_units
        self.gaps = [*self.gaps, *other.gaps]
        self.no_room = other.no_room


class Redispatch:
    """Dispatch over a stopped store."""

    def __init__(
        self,
        io: StoreIO,
        options: Options,
        table: QueueTable,
        segments: LogSegments,
        queues: ConsumeQueueFiles,
        index: IndexFiles,
        ledger: DamageLedger,
        log_begin: int,
        now_ms: Callable[[], int],
        report: Callable[[str], None],
        scanners: Scanners,
        told: Told,
    ) -> None:
        self._io = io
        self._options = options
        self._table = table
        self._segments = segments
        self._queues = queues
        self._index = index
        self._ledger = ledger
        self._log_begin = log_begin
        self._now_ms = now_ms
        self._report = report
        self._scanners = scanners
        self._told = told
        self._resync = Resync(segments)

    def run(
        self, start: int, stop: int, *, put_entries: bool = True, only: Collection[int] | None = None
    ) -> Redispatched:
        """Dispatch [start, stop); without `put_entries` into queues alone, index entries are only counted.

        `only` are the numbers of the queues to write; nothing else is looked at. Raises CorruptStoreError, OSError.
        """
        with contextlib.ExitStack() as stack:
            dispatch = Dispatch(
                self._io,
                self._options,
                self._table,
                self._segments,
                self._queues,
                self._index,
                holes=self._ledger.ranges,
                mend=True,
                put_entries=put_entries,
                only=only,
                log_begin=self._log_begin,
                scans=self._scans(stack, start, stop, with_entries=self._options.message_index_enable and only is None),
            )
            return self._run(dispatch, start, stop)

    def _scans(self, stack: contextlib.ExitStack, start: int, stop: int, *, with_entries: bool) -> Scans:
        delays_ms = delays_ms_of(self._options.message_delay_level)
        # A short range's arrays are small: to make and to free large ones takes longer than such a range.
        if not self._scanners.count or stop - start < self._scanners.range_bytes_min:
            return StepScan(
                self._table,
                self._segments,
                with_entries=with_entries,
                step_records=min(STEP_RECORDS_MAX, (stop - start) // record.BODY + 1),
                delays_ms=delays_ms,
            )
        ahead = ScanAhead(
            self._table,
            self._segments,
            start,
            stop,
            self._scanners,
            self._report,
            with_entries=with_entries,
            delays_ms=delays_ms,
        )
        return stack.enter_context(contextlib.closing(ahead))

    def _run(self, dispatch: Dispatch, start: int, stop: int) -> Redispatched:
        done = Redispatched(start, start, gaps=dispatch.gaps)
        try:
            while done.position < stop:
                self._told(done.position - start, stop - start)
                self._segments.read_ahead(done.position, stop)
                step = dispatch.step(done.position, stop)
                done.records += step.records
                done.entries += step.entries
                queue = self._queue_at(step.position) if step.reason is StopReason.UNKNOWN_QUEUE else None
                if queue is not None:
                    # A queue of a deleted topic goes on where it stood, or where another program began it again.
                    number = self._table.create_queue(*queue)
                    self._table.begin_at(number, self._queue_offset_at(step.position))
                elif step.stuck:
                    self._jump(dispatch, step.position, stop)
                done.position = step.position
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            dispatch.undo()
            done.no_room = error
        done.mended_units = dispatch.mended_units
        return done

    def count_on(self, start: int, stop: int) -> None:
        """Raise the next offsets of queues by records of [start, stop) that could not be dispatched."""
        next_offsets = np.zeros(self._table.capacity, np.int64)
        out = np.zeros(scan.SCAN_SIZE, np.int64)
        position = start
        while position < stop:
            position = next((last for first, last in self._ledger.ranges if first <= position < last), position)
            base = self._segments.start_of(position)
            view = self._segments.view(base)
            reason = self._count_segment(view, position - base, min(len(view), stop - base), base, next_offsets, out)
            if out[scan.FIRST_UNKNOWN] >= 0 and (queue := self._queue_at(base + int(out[scan.FIRST_UNKNOWN]))):
                self._table.create_queue(*queue)
                continue
            position = base + (len(view) if reason == scan.BLANK else int(out[scan.STOPPED_AT]))
            if reason not in (scan.BLANK, scan.REACHED_STOP):
                position = self._resync.hole_at(position, stop).stop
        for number in np.flatnonzero(next_offsets).tolist():
            raised = max(int(next_offsets[number]), self._table.next_offset(number))
            self._table.store(number, table_layout.NEXT_OFFSET, raised)

    def _count_segment(
        self, view: np.ndarray, start: int, stop: int, base: int, next_offsets: np.ndarray, out: np.ndarray
    ) -> int:
        table = self._table
        return int(
            scan.update_next_offsets(
                view, start, stop, base, table.bytes_view, table.cells, table.slots, next_offsets, out
            )
        )

    def _jump(self, dispatch: Dispatch, position: int, stop: int) -> None:
        """No record begins here: write the hole down, then go on behind it."""
        hole = self._resync.hole_at(position, stop)
        self._ledger.add(hole, self._now_ms())
        dispatch.add_hole(hole.start, hole.stop)

    def _queue_offset_at(self, physical_offset: int) -> int:
        base = self._segments.start_of(physical_offset)
        return load_be64(self._segments.view(base), physical_offset - base + record.QUEUE_OFFSET)

    def _queue_at(self, physical_offset: int) -> tuple[str, int] | None:
        """(topic, queue id) of the record at an offset, whose sizes hold; None when they can be nobody's.

        The topic becomes a folder: what a record without a whole CRC says must not lead out of the store.
        """
        base = self._segments.start_of(physical_offset)
        view, at = self._segments.view(base), physical_offset - base
        width = topic_length_size(view, at)
        length_at = topic_length_at(view, at)
        start = length_at + width
        name = bytes(view[start : start + signed_topic_length(view, length_at, width)])
        queue_id = load_be32(view, at + record.QUEUE_ID)
        if not 0 < len(name) <= table_layout.TOPIC_BYTES_MAX or queue_id < 0 or _NO_FOLDER.search(name):
            return None
        try:
            return name.decode(), queue_id
        except UnicodeDecodeError:
            return None
