"""Where in a queue a store time falls, by binary search: queues are ordered by their records' store times."""

from __future__ import annotations

from typing import Final

from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consume_queue import ConsumeQueueFiles, as_units
from mqproc.store.reads.log_records import LogRecords
from mqproc.store.reads.queue_bounds import QueueBounds, Queues

UNREADABLE: Final = -1
# A probe that meets a unit without a record looks at so many units behind it for one that has.
_NEIGHBOURS = 256


class QueueTimes:
    """Store times in the queues of one store. Times are Unix ms."""

    def __init__(self, queues: Queues, files: ConsumeQueueFiles, records: LogRecords) -> None:
        self._queues = queues
        self._files = files
        self._records = records

    def store_time_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time of the record at a queue offset, −1 when there is none."""
        bounds = self._queues.bounds(topic, queue_id)
        if bounds is None or not bounds.min_offset <= offset < bounds.max_offset:
            return UNREADABLE
        units = self._units((topic, queue_id), bounds, offset, 1)
        return self._time_of(*units[0]) if units else UNREADABLE

    def offset_at(self, topic: str, queue_id: int, time_ms: int, *, upper: bool = False) -> int:
        """RocketMQ's getOffsetInQueueByTime: the first message at or after a time, or the maximum offset.

        With `upper` the last message at or before the time, or the minimum offset. 0 for an unknown queue.
        """
        bounds = self._queues.bounds(topic, queue_id)
        if bounds is None:
            return 0
        while True:
            if upper:
                found = max(bounds.min_offset, self.first_above((topic, queue_id), bounds, time_ms + 1) - 1)
            else:
                found = self.first_above((topic, queue_id), bounds, time_ms)
            # Retention may have moved the minimum over what was looked at.
            again = self._queues.bounds(topic, queue_id) or bounds
            if again.min_offset == bounds.min_offset:
                return found
            bounds = again

    def first_above(self, queue: tuple[str, int], bounds: QueueBounds, time_ms: int) -> int:
        """The first offset in [min_offset, max_offset] whose store time is ≥ `time_ms`; max_offset when none is."""
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
        """(offset, store time) of the first unit in [offset, stop) with a record, among the next ones; None without.

        A unit that points below the log's beginning is older than any time.
        """
        begin = self._records.visible().begin
        for count in (1, _NEIGHBOURS):
            for index, (physical_offset, size) in enumerate(
                self._units(queue, bounds, offset, min(count, stop - offset))
            ):
                if 0 <= physical_offset < begin and size != FILLER_SIZE:
                    return offset + index, UNREADABLE
                time_ms = self._time_of(physical_offset, size)
                if time_ms != UNREADABLE:
                    return offset + index, time_ms
        return None

    def _time_of(self, physical_offset: int, size: int) -> int:
        if size == FILLER_SIZE:
            return UNREADABLE
        return self._records.store_timestamp_ms(physical_offset)

    def _units(self, queue: tuple[str, int], bounds: QueueBounds, offset: int, count: int) -> list[tuple[int, int]]:
        """(physical offset, size) of units; none where the file is not there."""
        try:
            units = as_units(self._files.read_units(*queue, offset, count, bounds.number))
        except FileNotFoundError:
            return []
        return list(zip(units["physical_offset"].tolist(), units["size"].tolist(), strict=True))
