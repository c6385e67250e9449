"""Search by time: queue offsets of a store time, and ranges and counts of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.record_check import VERIFY_NOTHING
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consumequeue.bounds import UNIT_DTYPE, as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.cooperative import RecordPage, Slices
from mqproc.store.read.records import LogRecords
from mqproc.store.read.unit_walk import QueueWalk, WalkEnd, WalkLimits, compile_filter
from mqproc.store.read.views import QueueBounds, Queues

UNREADABLE: Final = -1
# A probe that finds no record at a unit continues at the following ones: first this many units, then chunks. A hole in
# the log may have any number of a queue's messages.
_NEIGHBOURS: Final = 256
_CHUNK_UNITS: Final = 8192
# Approximate limit of units with damaged records in one probe. Fillers cost almost nothing.
_DAMAGED_MAX: Final = 16_384
_NO_UNITS: Final = np.empty(0, UNIT_DTYPE)


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """Store times in the queues of one store. Times are Unix ms."""

    queues: Queues
    files: ConsumeQueueFiles
    records: LogRecords

    def store_time_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time of the record at a queue offset, −1 if none exists."""
        bounds = self.queues.bounds(topic, queue_id)
        if bounds is None or not bounds.min_offset <= offset < bounds.max_offset:
            return UNREADABLE
        units = self._units((topic, queue_id), bounds, offset, 1)
        if not len(units) or units["size"][0] == FILLER_SIZE:
            return UNREADABLE
        return self.records.store_timestamp_ms(int(units["physical_offset"][0]))

    def offset_at(self, topic: str, queue_id: int, time_ms: int, *, upper: bool = False) -> int:
        """RocketMQ's getOffsetInQueueByTime: first message at or after a time, or the maximum.

        With `upper` the last message at or before the time, or the minimum offset. 0 for an unknown queue.
        """
        bounds = self.queues.bounds(topic, queue_id)
        if bounds is None:
            return 0
        while True:
            if upper:
                found = max(bounds.min_offset, self.first_above((topic, queue_id), bounds, time_ms + 1) - 1)
            else:
                found = self.first_above((topic, queue_id), bounds, time_ms)
            # Retention may have raised the minimum meanwhile.
            current = self.queues.bounds(topic, queue_id) or bounds
            if current.min_offset == bounds.min_offset:
                return found
            bounds = current

    def first_above(self, queue: tuple[str, int], bounds: QueueBounds, time_ms: int) -> int:
        """First offset in [min_offset, max_offset] with a store time ≥ `time_ms`, else max_offset."""
        low, high = bounds.min_offset, bounds.max_offset
        while low < high:
            middle = (low + high) // 2
            found = self._readable(queue, bounds, middle, high)
            if found is None:
                high = middle
            elif found[1] < time_ms:
                low = found[0] + 1
            else:
                high = middle
        return low

    def _readable(self, queue: tuple[str, int], bounds: QueueBounds, offset: int, stop: int) -> tuple[int, int] | None:
        """(offset, store time) of the first unit in [offset, stop) with a record; None without one.

        A unit that points below the log's beginning is older than any time.
        """
        begin = self.records.visible().begin
        count, damaged = 1, 0
        while offset < stop and damaged < _DAMAGED_MAX:
            units = self._units(queue, bounds, offset, min(count, stop - offset))
            if not len(units):
                # The file is missing; later ones may exist.
                offset = self.files.next_file_offset(offset)
                damaged += 1
                continue
            for place in np.flatnonzero(units["size"] != FILLER_SIZE).tolist():
                physical_offset = int(units["physical_offset"][place])
                if 0 <= physical_offset < begin:
                    return offset + place, UNREADABLE
                time_ms = self.records.store_timestamp_ms(physical_offset)
                if time_ms != UNREADABLE:
                    return offset + place, time_ms
                damaged += 1
            offset += len(units)
            count = _NEIGHBOURS if count == 1 else _CHUNK_UNITS
        return None

    def _units(self, queue: tuple[str, int], bounds: QueueBounds, offset: int, count: int) -> NDArray[np.void]:
        """Units as `UNIT_DTYPE`; empty if the file is missing."""
        try:
            return as_units(self.files.read_units(*queue, offset, count, bounds.number))
        except FileNotFoundError:
            return _NO_UNITS


# Ranges and counts

SLICE_UNITS = 1 << 16
SLICE_LOOK_BYTES = 8 << 20
"""Limit of the cost of non-matching records per slice; see `WalkLimits.look_bytes`."""

# A topic may have thousands of queues without messages of a time, each of which takes dozens of probes.
_SPANS_PER_SLICE = 8


@dataclass(frozen=True, slots=True)
class QueueRanges:
    """Ranges and counts over the queues of one store. Times are Unix ms, the end is excluded."""

    queues: Queues
    files: ConsumeQueueFiles
    records: LogRecords
    times: QueueTimes

    def range(
        self,
        topic: str,
        begin_ms: int,
        end_ms: int,
        *,
        tags: Sequence[str] = (),
        sql: str = "",
        born_time: bool = False,
        cursor: Sequence[int] = (),
        max_messages: int,
        max_bytes: int,
    ) -> Slices[RecordPage]:
        """Messages with begin_ms ≤ time < end_ms, by queue, from `cursor` (queue id, offset) on."""
        first_queue, first_offset = (int(cursor[0]), int(cursor[1])) if len(cursor) == 2 else (0, 0)
        chosen = compile_filter(topic, tuple(tags), sql)
        parts: list[NDArray[np.uint8]] = []
        count, size, looked_at = 0, 0, 0
        for queue_id in self.queues.ids(topic):
            bounds = self.queues.bounds(topic, queue_id) if queue_id >= first_queue else None
            if bounds is None:
                continue
            start, stop = self._span((topic, queue_id), bounds, begin_ms, end_ms, born_time=born_time)
            looked_at += 1
            if looked_at % _SPANS_PER_SLICE == 0:
                yield
            if queue_id == first_queue:
                start = max(start, first_offset)
            if count >= max_messages or size >= max_bytes:
                return RecordPage(count, parts, (queue_id, start), complete=False)
            limits = _limits(begin_ms, end_ms, born_time=born_time)
            limits.messages, limits.bytes = max_messages - count, max_bytes - size
            walk = QueueWalk(self.records, self.files, (topic, queue_id), bounds.number, start, chosen, limits)
            halt = yield from self._walk_to(walk, stop, (topic, queue_id))
            # Every answer has at least one record of any size; the first one of a later queue must fit.
            if walk.count and (count == 0 or size + len(walk.gathered) <= max_bytes):
                parts.append(walk.gathered)
                count, size = count + walk.count, size + len(walk.gathered)
            elif walk.count:
                return RecordPage(count, parts, (queue_id, start), complete=False)
            if halt is WalkEnd.LIMIT:
                return RecordPage(count, parts, (queue_id, walk.next_offset), complete=False)
        return RecordPage(count, parts)

    def count(
        self,
        topic: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        tags: Sequence[str] = (),
        sql: str = "",
        born_time: bool = False,
    ) -> Slices[int]:
        """Number of messages that `range` yields.

        By store time without a filter only border records are read, unless the log has damaged ranges: then units do
        not suffice, and each record is checked.
        """
        chosen = compile_filter(topic, tuple(tags), sql)
        by_units = not tags and not sql and not born_time and not self.records.have_holes()
        count = 0
        for queue_id in self.queues.ids(topic):
            bounds = self.queues.bounds(topic, queue_id)
            if bounds is None:
                continue
            start, stop = self._span((topic, queue_id), bounds, begin_ms, end_ms, born_time=born_time)
            if by_units:
                count += max(0, stop - start)
                yield
                continue
            limits = _limits(begin_ms, end_ms, born_time=born_time)
            limits.verify, limits.copy = VERIFY_NOTHING, False
            walk = QueueWalk(self.records, self.files, (topic, queue_id), bounds.number, start, chosen, limits)
            yield from self._walk_to(walk, stop, (topic, queue_id))
            count += walk.count
        return count

    def _walk_to(self, walk: QueueWalk, stop: int, queue: tuple[str, int]) -> Slices[WalkEnd]:
        """Walk to `stop` or a limit in slices, skipping damage, missing files and deletions."""
        halt = WalkEnd.DONE
        while walk.next_offset < stop:
            halt = walk.run(min(stop, walk.next_offset + SLICE_UNITS))
            if halt is WalkEnd.DAMAGE:
                walk.step_over_damage(stop)
                halt = WalkEnd.DONE
            elif halt is WalkEnd.NO_UNITS and (bounds := self.queues.bounds(*queue)) is not None:
                # As in a pull, continue in the next file.
                walk.next_offset = max(bounds.min_offset, self.files.next_file_offset(walk.next_offset))
                halt = WalkEnd.DONE
            elif halt not in (WalkEnd.DONE, WalkEnd.LOOKED):
                break
            yield
        return halt

    def _span(
        self, queue: tuple[str, int], bounds: QueueBounds, begin_ms: int, end_ms: int, *, born_time: bool
    ) -> tuple[int, int]:
        """Queue offsets [start, stop) of a time range; the whole queue for unordered born times."""
        start, stop = bounds.min_offset, bounds.max_offset
        if born_time or end_ms <= begin_ms:
            return start, stop if born_time and end_ms > begin_ms else start
        if begin_ms > TIME_MIN:
            start = self.times.first_above(queue, bounds, begin_ms)
        if end_ms < TIME_MAX:
            stop = self.times.first_above(queue, bounds, end_ms)
        return start, stop


def _limits(begin_ms: int, end_ms: int, *, born_time: bool) -> WalkLimits:
    begin_ms, end_ms = max(begin_ms, TIME_MIN), min(end_ms, TIME_MAX)
    if born_time:
        return WalkLimits(look_bytes=SLICE_LOOK_BYTES, born_begin_ms=begin_ms, born_end_ms=end_ms)
    return WalkLimits(look_bytes=SLICE_LOOK_BYTES, store_begin_ms=begin_ms, store_end_ms=end_ms)
