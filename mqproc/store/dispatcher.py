"""Dispatch (reput): records of the log become ConsumeQueue units and index entries, in bounded steps.

Order of a step: units, index entries, the `max_offset` words. The caller then publishes `dispatched`. Killed anywhere
in between, the successor rolls the index back to the last commit and does the step again: a unit's place is its queue
offset, so units are only written over by themselves.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mqproc.config import MIB, Options
from mqproc.io import StoreIO
from mqproc.kernels.dispatch import DispatchBuffers, ScanResult, StopReason, publish_queues
from mqproc.layout import record
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.consume_queue import ConsumeQueueFiles, fillers
from mqproc.store.index_files import IndexCommit, IndexFiles
from mqproc.store.queue_table import QueueTable
from mqproc.store.segments import LogSegments

STEP_BYTES_MAX: Final = 8 * MIB
STEP_RECORDS_MAX: Final = 65_536
# Two entries a record and some more; a step with more of them just ends earlier.
STEP_ENTRIES_MAX: Final = 4 * STEP_RECORDS_MAX

# After these the log goes on where the step ended.
GOING_ON: Final = frozenset({StopReason.LIMIT, StopReason.RECORDS, StopReason.BLANK, StopReason.ENTRIES_FULL})


@dataclass(frozen=True, slots=True)
class DispatchStep:
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
        step_bytes: int = STEP_BYTES_MAX,
        step_records: int = STEP_RECORDS_MAX,
    ) -> None:
        """`holes` are ranges [start, stop) of damage in the log, which are jumped over. Fillers mark their units."""
        self._io = io
        self._table = table
        self._segments = segments
        self._queues = queues
        self.index = index
        self.index_commit = index.commit()
        """Where the index stands after the last step that went well."""
        self._with_index = options.message_index_enable
        self._holes = sorted(holes)
        self._step_bytes = step_bytes
        self._buffers = DispatchBuffers(table.capacity, step_records, STEP_ENTRIES_MAX)
        # Where the index stood before a step that failed; entries have no place of their own as units have.
        self._undo: IndexCommit | None = None

    def step(self, dispatched: int, confirmed: int) -> DispatchStep:
        """Dispatch records from `dispatched` on, none at or above `confirmed`.

        Raises OSError (a full disk…), after which nothing is published and the same step can be tried again.
        """
        if self._undo is not None:
            self.index.roll_back(self._undo)
            self._undo = None
        start, stop = self._between_holes(dispatched, confirmed)
        if start >= stop:
            return DispatchStep(start, 0, 0, 0, StopReason.LIMIT)
        segment_start = self._segments.start_of(start)
        segment_end = segment_start + self._segments.segment_size
        result = self._buffers.scan(
            self._segments.view(segment_start),
            self._table.bytes_view,
            self._table.cells,
            self._table.slots,
            start=start - segment_start,
            limit=start - segment_start + self._step_bytes,
            stop=min(stop, segment_end) - segment_start,
            segment_start=segment_start,
            with_entries=self._with_index,
        )
        self._segments.touched(result.stopped_at - (start - segment_start))
        self._write_units(result, start)
        self._io.crash_point("dispatch.units_written")
        self._put_entries(result.entries)
        self._io.crash_point("dispatch.entries_put")
        publish_queues(self._table.cells, result.runs)
        self._io.crash_point("dispatch.queues_published")
        position = segment_start + result.stopped_at
        if result.reason is StopReason.BLANK:
            position = segment_end
        return DispatchStep(
            position=self._behind_hole(position),
            records=result.records,
            entries=result.entries,
            store_timestamp_ms=result.store_timestamp_ms,
            reason=result.reason,
        )

    def close(self) -> None:
        """Close the files; the table and the segments are the caller's."""
        self._queues.close()
        self.index.close()

    def _between_holes(self, dispatched: int, confirmed: int) -> tuple[int, int]:
        """(start, stop) of a range without holes: `dispatched` or the end of its hole, and the next hole's start."""
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

    def _write_units(self, result: ScanResult, start: int) -> None:
        """Write each run, and fillers before it for what a hole before `start` has swallowed of its queue."""
        holes = self._holes[: bisect.bisect_left(self._holes, (start, start))]
        swallowed_max = sum(hole_stop - hole_start for hole_start, hole_stop in holes) // record.FIXED_SIZE_V4
        ends: dict[int, int] = {}
        for number, first, count, offset, _end, _time in result.runs.tolist():
            topic, queue_id = self._table.name(number)
            if holes:
                missing = first - ends.get(number, self._table.max_offset(number))
                ends[number] = first + count
                # More than the holes have room for is another fault, which fillers must not cover up.
                if 0 < missing <= swallowed_max:
                    gap = fillers(missing, holes[-1][0])
                    self._queues.write_run(topic, queue_id, first - missing, gap, generation=number)
            run = result.units[offset : offset + count * UNIT_SIZE]
            self._queues.write_run(topic, queue_id, first, run, generation=number)

    def _put_entries(self, count: int) -> None:
        if count == 0:
            return
        buffers = self._buffers
        self._undo = self.index_commit
        self.index.put(buffers.entry_hashes, buffers.entry_offsets, buffers.entry_times, count)
        self.index_commit = self.index.commit()
        self._undo = None
