"""Search by time: queue offsets of a store time, and ranges and counts of messages.

A clock that is set back makes store times descend. The writer and recovery note from which log position on they
ascend. There the search is binary; before it every record is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
# A probe that finds no record at a unit continues at the following units: first this many, then chunks. A hole in the
# log may contain any number of a queue's messages.
_NEIGHBOURS: Final = 256
_CHUNK_UNITS: Final = 8192
# Approximate limit of units with damaged records in one probe. Fillers cost almost nothing.
_DAMAGED_MAX: Final = 16_384
_DAMAGED_PER_SLICE: Final = 1024
_NO_UNITS: Final = np.empty(0, UNIT_DTYPE)


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """Store times in the queues of one store. Times are Unix ms."""

    queues: Queues
    files: ConsumeQueueFiles
    records: LogRecords
    ordered_from: Callable[[], int] = lambda: 0
    """Returns the log position from which store times ascend."""

    def store_time_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time of the record at a queue offset, −1 if none exists."""
        bounds = self.queues.bounds(topic, queue_id)
        if bounds is None or not bounds.min_offset <= offset < bounds.max_offset:
            return UNREADABLE
        units = self._units((topic, queue_id), bounds, offset, 1)
        if not len(units) or units["size"][0] == FILLER_SIZE:
            return UNREADABLE
        return self.records.store_timestamp_ms(int(units["physical_offset"][0]))

    def offset_at(self, topic: str, queue_id: int, time_ms: int, *, upper: bool = False) -> Slices[int]:
        """RocketMQ's getOffsetInQueueByTime: first message at or after a time, or the maximum.

        With `upper` the last message at or before the time, or the minimum offset. 0 for an unknown queue.
        """
        queue = topic, queue_id
        bounds = self.queues.bounds(*queue)
        if bounds is None:
            return 0
        while True:
            split = self.ordered_offset(queue, bounds)
            if upper:
                found = (yield from self.first_above(queue, bounds, time_ms + 1, split)) - 1
                if found < split:
                    found = yield from self._last_below(queue, bounds, time_ms + 1, split)
                found = max(bounds.min_offset, found)
            else:
                found = yield from self._first_match(queue, bounds, time_ms, split)
                if found < 0:
                    found = yield from self.first_above(queue, bounds, time_ms, split)
            # Retention may have raised the minimum meanwhile.
            current = self.queues.bounds(topic, queue_id) or bounds
            if current.min_offset == bounds.min_offset:
                return found
            bounds = current

    def ordered_offset(self, queue: tuple[str, int], bounds: QueueBounds) -> int:
        """Queue offset from which store times ascend, `max_offset` without one."""
        position = self.ordered_from()
        if position <= self.records.visible().begin:
            return bounds.min_offset
        return self.files.first_at_or_above(*queue, bounds.min_offset, bounds.max_offset, position, bounds.number)

    def first_above(self, queue: tuple[str, int], bounds: QueueBounds, time_ms: int, low: int) -> Slices[int]:
        """First offset ≥ `low` with a store time ≥ `time_ms`, else max_offset; times ascend."""
        high = bounds.max_offset
        while low < high:
            middle = (low + high) // 2
            found = yield from self._readable(queue, bounds, middle, high)
            if found is None:
                high = middle
            elif found[1] < time_ms:
                low = found[0] + 1
            else:
                high = middle
        return low

    def _first_match(self, queue: tuple[str, int], bounds: QueueBounds, time_ms: int, stop: int) -> Slices[int]:
        """First offset < `stop` with a store time ≥ `time_ms`, −1 = none; reads every record."""
        limits = _limits(time_ms, TIME_MAX, born_time=False)
        limits.messages = 1
        walk = self._counting_walk(queue, bounds, bounds.min_offset, limits)
        yield from walk_to(walk, stop, queue, self.queues)
        return walk.next_offset - 1 if walk.count else -1

    def _last_below(self, queue: tuple[str, int], bounds: QueueBounds, time_ms: int, stop: int) -> Slices[int]:
        """Last offset < `stop` with a store time < `time_ms`, −1 = none; reads every record."""
        while stop > bounds.min_offset:
            start = max(bounds.min_offset, stop - SLICE_UNITS)
            limits = _limits(TIME_MIN, time_ms, born_time=False)
            walk = self._counting_walk(queue, bounds, start, limits)
            yield from walk_to(walk, stop, queue, self.queues)
            if walk.count:
                # Again, up to the last of them.
                limits.messages = walk.count
                walk = self._counting_walk(queue, bounds, start, limits)
                yield from walk_to(walk, stop, queue, self.queues)
                return walk.next_offset - 1
            stop = start
        return -1

    def _counting_walk(self, queue: tuple[str, int], bounds: QueueBounds, start: int, limits: WalkLimits) -> QueueWalk:
        limits.verify, limits.copy = VERIFY_NOTHING, False
        return QueueWalk(self.records, self.files, queue, bounds.number, start, compile_filter(queue[0]), limits)

    def _readable(
        self, queue: tuple[str, int], bounds: QueueBounds, offset: int, stop: int
    ) -> Slices[tuple[int, int] | None]:
        """(offset, store time) of the first unit in [offset, stop) with a record; None without one.

        A unit that points below the log's beginning is older than any time.
        """
        begin = self.records.visible().begin
        count, damaged = 1, 0
        while offset < stop and damaged < _DAMAGED_MAX:
            units = self._units(queue, bounds, offset, min(count, stop - offset))
            if not len(units):
                # The file is missing; later files may exist.
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
                if damaged % _DAMAGED_PER_SLICE == 0:
                    yield
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
            queue = topic, queue_id
            looked_at += 1
            if looked_at % _SPANS_PER_SLICE == 0:
                yield
            spans = yield from self._spans(queue, bounds, begin_ms, end_ms, born_time=born_time)
            for start, stop, _sure in spans:
                if queue_id == first_queue:
                    start = max(start, first_offset)
                if count >= max_messages or size >= max_bytes:
                    return RecordPage(count, parts, (queue_id, start), complete=False)
                limits = _limits(begin_ms, end_ms, born_time=born_time)
                limits.messages, limits.bytes = max_messages - count, max_bytes - size
                walk = QueueWalk(self.records, self.files, queue, bounds.number, start, chosen, limits)
                halt = yield from walk_to(walk, stop, queue, self.queues)
                # Every answer has at least one record of any size; the first one of a later span must fit.
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
        for number, queue_id in enumerate(self.queues.ids(topic), 1):
            if number % _SPANS_PER_SLICE == 0:
                yield
            bounds = self.queues.bounds(topic, queue_id)
            if bounds is None:
                continue
            spans = yield from self._spans((topic, queue_id), bounds, begin_ms, end_ms, born_time=born_time)
            for start, stop, sure in spans:
                if by_units and sure:
                    count += max(0, stop - start)
                    continue
                limits = _limits(begin_ms, end_ms, born_time=born_time)
                limits.verify, limits.copy = VERIFY_NOTHING, False
                walk = QueueWalk(self.records, self.files, (topic, queue_id), bounds.number, start, chosen, limits)
                yield from walk_to(walk, stop, (topic, queue_id), self.queues)
                count += walk.count
        return count

    def _spans(
        self, queue: tuple[str, int], bounds: QueueBounds, begin_ms: int, end_ms: int, *, born_time: bool
    ) -> Slices[list[tuple[int, int, bool]]]:
        """Queue offsets [start, stop) that may hold a time range, and whether all of them do."""
        low, high = bounds.min_offset, bounds.max_offset
        if end_ms <= begin_ms:
            return []
        if born_time or (begin_ms <= TIME_MIN and end_ms >= TIME_MAX):
            return [(low, high, not born_time)]
        split = self.times.ordered_offset(queue, bounds)
        start, stop = split, high
        if begin_ms > TIME_MIN:
            start = yield from self.times.first_above(queue, bounds, begin_ms, split)
        if end_ms < TIME_MAX:
            stop = yield from self.times.first_above(queue, bounds, end_ms, start)
        return [(low, split, False), (start, stop, True)] if low < split else [(start, stop, True)]


def walk_to(walk: QueueWalk, stop: int, queue: tuple[str, int], queues: Queues) -> Slices[WalkEnd]:
    """Walk to `stop` or a limit in slices, skipping damage, missing files and deletions."""
    halt = WalkEnd.DONE
    while walk.next_offset < stop:
        halt = walk.run(min(stop, walk.next_offset + SLICE_UNITS))
        if halt is WalkEnd.DAMAGE:
            walk.step_over_damage(stop)
            halt = WalkEnd.DONE
        elif halt is WalkEnd.NO_UNITS and (bounds := queues.bounds(*queue)) is not None:
            # As in a pull, continue in the next file.
            walk.next_offset = max(bounds.min_offset, walk.next_file_offset)
            halt = WalkEnd.DONE
        elif halt not in (WalkEnd.DONE, WalkEnd.LOOKED):
            break
        yield
    return halt


def _limits(begin_ms: int, end_ms: int, *, born_time: bool) -> WalkLimits:
    begin_ms, end_ms = max(begin_ms, TIME_MIN), min(end_ms, TIME_MAX)
    if born_time:
        return WalkLimits(look_bytes=SLICE_LOOK_BYTES, born_begin_ms=begin_ms, born_end_ms=end_ms)
    return WalkLimits(look_bytes=SLICE_LOOK_BYTES, store_begin_ms=begin_ms, store_end_ms=end_ms)
