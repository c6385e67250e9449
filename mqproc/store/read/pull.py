"""Pulls (RocketMQ's getMessage): the next records of a queue, with RocketMQ's statuses.

`pull` verifies CRCs, compares tags exactly or evaluates an SQL92 filter, crosses file borders and skips damage; if few
records match it ends after UNITS_MAX units or LOOK_BYTES_MAX of records. `get_message` answers as RocketMQ does: tags
by hash, no CRC, one ConsumeQueue file per call, at most 32 messages and 256 KiB, unknown queues are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.kernels.gather import (
    BASE,
    BORN_BEGIN_MS,
    BORN_END_MS,
    COPY,
    COUNT,
    COUNT_LIMIT,
    LOG_STOP,
    OUT_AT,
    QUEUE,
    STORE_BEGIN_MS,
    STORE_END_MS,
    TIME_MAX,
    TIME_MIN,
    UNIT,
    UNIT_STOP,
    VERIFY,
    gather,
)
from mqproc.kernels.record_check import VERIFY_ALL, VERIFY_NOTHING
from mqproc.layout.consume_queue import UNIT_SIZE, place_of
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.records import LogRecords
from mqproc.store.read.unit_walk import (
    NOT_COUNTED,
    FilterProgram,
    Miss,
    PullCounters,
    QueueWalk,
    WalkEnd,
    WalkLimits,
    compile_filter,
    compile_subscription,
)
from mqproc.store.read.views import QueueBounds, Queues, RocketmqQueues
from mqproc.types import PullStatus
from mqproc.util.units import MIB

UNITS_MAX = 1 << 20
"""Limit of units per pull; a filter that matches nothing costs some milliseconds."""
LOOK_BYTES_MAX = 8 << 20
"""Limit of the cost of non-matching records per pull; see `WalkLimits.look_bytes`."""

# Smaller size limits count as this one, as in RocketMQ.
ROCKETMQ_BYTES_MIN = 100

_NO_RECORDS = np.empty(0, np.uint8)


class Pulled(msgspec.Struct, frozen=True):
    """Answer of a pull: `count` consecutive records in `records` uint8[n]."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    count: int = 0
    records: NDArray[np.uint8] = msgspec.field(default_factory=lambda: _NO_RECORDS)
    detail: str = ""


class QueuePulls:
    """Pulls from the queues of one store."""

    def __init__(self, queues: Queues, files: ConsumeQueueFiles, records: LogRecords, options: Options) -> None:
        self._queues = queues
        self._rocketmq_queues = RocketmqQueues(queues, files)
        self._files = files
        self._records = records
        self._options = options

    def pull(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int,
        max_bytes: int,
        tags: Sequence[str] = (),
        *,
        sql: str = "",
        counts: PullCounters = NOT_COUNTED,
    ) -> Pulled:
        """Records of a queue from `offset` on. The first one is returned whatever its size.

        `counts` counts pulls that return records, and these records.
        """
        chosen = compile_filter(topic, tuple(tags), sql)
        bounds = self._queues.bounds(topic, queue_id)
        if bounds is None:
            return Pulled(PullStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0)
        outside = out_of_bounds(offset, bounds)
        if outside is not None:
            return outside
        limits = WalkLimits(
            messages=max(max_messages, 1),
            bytes=min(max(max_bytes, 1), self._options.max_pull_bytes),
            look_bytes=LOOK_BYTES_MAX,
        )
        queue = topic, queue_id
        walk = QueueWalk(self._records, self._files, queue, bounds.number, offset, chosen, limits, counts)
        # Without a filter, at most one unit per message is needed.
        units = UNITS_MAX if tags or sql else min(UNITS_MAX, limits.messages)
        try:
            return self._pull_units(walk, queue, bounds, offset, units)
        except BaseException:
            walk.uncount()
            raise

    def _pull_units(
        self, walk: QueueWalk, queue: tuple[str, int], bounds: QueueBounds, offset: int, units: int
    ) -> Pulled:
        stop = min(bounds.max_offset, offset + units)
        halt = walk.run(stop)
        if walk.miss is Miss.REMOVED and not walk.count:
            # Retention may have raised the minimum meanwhile.
            outside = out_of_bounds(offset, self._queues.bounds(*queue) or bounds)
            if outside is not None:
                return outside
        if halt is WalkEnd.DONE and walk.miss is Miss.REMOVED and not walk.count:
            # Units of deleted segments cost nothing: continue to the first one with a record.
            stop = min(bounds.max_offset, offset + UNITS_MAX)
            halt = walk.run(stop)
        return self._answer(walk, halt, queue, bounds, stop)

    def get_message(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int,
        max_bytes: int,
        expression: str = "*",
        counts: PullCounters = NOT_COUNTED,
    ) -> Pulled:
        """RocketMQ's answer. `expression` is a subscription: `a || b`, or `*` for all."""
        bounds = self._rocketmq_queues.bounds(topic, queue_id)
        outside = out_of_bounds(offset, bounds)
        if outside is not None:
            return outside
        options = self._options
        limits = WalkLimits(
            messages=max(min(max_messages, options.max_transfer_count_on_message_in_memory), 1),
            bytes=min(max(max_bytes, ROCKETMQ_BYTES_MIN), options.max_transfer_bytes_on_message_in_memory),
            verify=VERIFY_NOTHING,
            segment_by_segment=True,
        )
        queue, chosen = (topic, queue_id), compile_subscription(expression)
        walk = QueueWalk(self._records, self._files, queue, bounds.number, offset, chosen, limits, counts)
        scan_units = -(-max(options.max_filter_message_size, max_messages * UNIT_SIZE) // UNIT_SIZE)
        stop = min(bounds.max_offset, offset + scan_units, self._files.next_file_offset(offset))
        try:
            halt = walk.run(stop)
            while halt is WalkEnd.DAMAGE:
                walk.skip_as_removed()
                halt = walk.run(stop)
            return self._answer(walk, halt, queue, bounds, stop)
        except BaseException:
            walk.uncount()
            raise

    def _answer(self, walk: QueueWalk, halt: WalkEnd, queue: tuple[str, int], bounds: QueueBounds, stop: int) -> Pulled:
        count = walk.count
        if count:
            records = walk.gathered
            return Pulled(PullStatus.FOUND, walk.next_offset, bounds.min_offset, bounds.max_offset, count, records)
        if halt is WalkEnd.NO_UNITS:
            # A ConsumeQueue file is missing: retention may have raised the minimum meanwhile.
            bounds = self._queues.bounds(*queue) or bounds
            if (outside := out_of_bounds(walk.next_offset, bounds)) is not None:
                return outside
            following = self._files.next_file_offset(walk.next_offset)
            return Pulled(PullStatus.OFFSET_FOUND_NULL, following, bounds.min_offset, bounds.max_offset)
        status, detail = PullStatus.NO_MATCHED_MESSAGE, ""
        if halt is WalkEnd.DAMAGE:
            status, detail = PullStatus.CORRUPT, str(walk.step_over_damage(stop))
        elif walk.miss is Miss.REMOVED:
            status = PullStatus.MESSAGE_WAS_REMOVING
        return Pulled(status, walk.next_offset, bounds.min_offset, bounds.max_offset, detail=detail)


def out_of_bounds(offset: int, bounds: QueueBounds) -> Pulled | None:
    """The answer to an offset outside a queue's bounds, None for one inside."""
    low, high = bounds.min_offset, bounds.max_offset
    if high == 0:
        return Pulled(PullStatus.NO_MESSAGE_IN_QUEUE, 0, low, high)
    if offset < low:
        return Pulled(PullStatus.OFFSET_TOO_SMALL, low, low, high)
    if offset == high:
        return Pulled(PullStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
    if offset > high:
        return Pulled(PullStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
    return None


# Read-ahead

# Number of queues that are remembered as warm; beyond it the memory is cleared.
QUEUES_REMEMBERED_MAX = 65_536
UNITS_AHEAD = 4096
LOG_BYTES_AHEAD = 32 * MIB


class ReadAhead:
    """Starts reading the units and the log of a queue from disk before its first pull."""

    def __init__(self, io: StoreIO, files: ConsumeQueueFiles, segments: LogSegments) -> None:
        self._io = io
        self._files = files
        self._segments = segments
        self._seen: set[tuple[str, int]] = set()

    def before_pull(self, topic: str, queue_id: int, bounds: QueueBounds, offset: int) -> None:
        """Start reading the data of a pull from `offset` on, at the queue's first pull."""
        queue = (topic, queue_id)
        if queue in self._seen or not bounds.min_offset <= offset < bounds.max_offset:
            return
        if len(self._seen) >= QUEUES_REMEMBERED_MAX:
            self._seen.clear()
        self._seen.add(queue)
        stop = min(bounds.max_offset, offset + UNITS_AHEAD)
        try:
            place = offset * UNIT_SIZE % self._files.file_bytes
            start = offset * UNIT_SIZE - place
            self._will_need(self._files.path(topic, queue_id, start), place, (stop - offset) * UNIT_SIZE)
            first = self._physical_offset(queue, bounds, offset)
            base = self._segments.start_of(first)
            size = self._physical_offset(queue, bounds, stop - 1) - first
            self._will_need(self._segments.path(base), first - base, min(max(size, 1), LOG_BYTES_AHEAD))
        except (FileNotFoundError, IndexError):
            return  # Retention was faster; the pull reports it.

    def _physical_offset(self, queue: tuple[str, int], bounds: QueueBounds, offset: int) -> int:
        return max(0, int(as_units(self._files.read_units(*queue, offset, 1, bounds.number))[0]["physical_offset"]))

    def _will_need(self, path: Path, offset: int, size: int) -> None:
        with self._io.opened(path) as fd:
            self._io.read_ahead(fd, offset, size)


# Single records

RECORD_BYTES_MAX = 64 << 10
"""Size limit of a record: for larger records the saved steps do not matter."""

_NOTHING = np.zeros(0, np.uint8)
_NO_WORDS = np.zeros(0, np.int64)


class SingleRecordPulls:
    """Fast path for a pull that was held at the end of a queue and gets its next record.

    After a wait each Python step costs ten times as much as in a busy process, and `QueuePulls.pull` takes forty. This
    takes a third, for one case: the offset is the queue's last one, and the record is small, intact and passes. In all
    other cases it returns None without side effects. `counts` counts the records.
    """

    def __init__(self, table: QueueTable, files: ConsumeQueueFiles, records: LogRecords, counts: PullCounters) -> None:
        self._table = table
        self._files = files
        self._visible = records.visible
        self._segments = records.segments
        self._counts = counts  # Keeps the memory alive whose addresses the state has.
        self._unit = np.zeros(UNIT_SIZE, np.uint8)
        self._unit_bytes = self._unit.data
        state = self._state = counts.state.copy()
        state[UNIT_STOP] = state[COPY] = state[COUNT_LIMIT] = 1
        state[VERIFY] = VERIFY_ALL
        state[BORN_BEGIN_MS] = state[STORE_BEGIN_MS] = TIME_MIN
        state[BORN_END_MS] = state[STORE_END_MS] = TIME_MAX
        self._cells = state.data

    def pull(self, topic: str, queue_id: int, offset: int, chosen: FilterProgram) -> Pulled | None:
        """The answer of a pull from `offset` on with any limits; None if this path does not apply.

        `chosen` filters by tags alone. Raises as a pull.
        """
        bounds = self._table.bounds(topic, queue_id)
        if bounds is None:
            return None
        number, min_offset, max_offset = bounds
        if not min_offset <= offset == max_offset - 1:
            return None
        segments = self._segments
        try:
            unit = self._files.raw_units(topic, queue_id, offset, 1, number)
            if len(unit) != UNIT_SIZE:
                return None
            physical_offset, size = place_of(unit)
            begin, end = self._visible()
            if not (begin <= physical_offset < end and 0 < size <= RECORD_BYTES_MAX):
                return None
            start = physical_offset - physical_offset % segments.segment_size
            view = segments.view(start)
        except FileNotFoundError:
            return None
        segments.note_read(physical_offset, size)
        out = np.empty(size, np.uint8)
        self._unit_bytes[:] = unit
        cells = self._cells
        cells[UNIT] = cells[OUT_AT] = cells[COUNT] = 0
        cells[BASE], cells[LOG_STOP], cells[QUEUE] = start, end, number
        tags = chosen.codes, chosen.tags, chosen.ends
        gather(self._unit, view, *tags, _NO_WORDS, _NOTHING, _NO_WORDS, out, self._state)
        if not cells[COUNT]:
            return None
        return Pulled(PullStatus.FOUND, max_offset, min_offset, max_offset, 1, out)
