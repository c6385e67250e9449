"""Where in a queue a store time falls, by binary search: queues are ordered by their records' store times."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consume_queue import UNIT_DTYPE, ConsumeQueueFiles, as_units
from mqproc.store.reads.log_records import LogRecords
from mqproc.store.reads.queue_bounds import QueueBounds, Queues

UNREADABLE: Final = -1
# A probe that meets a unit without a record looks behind it for one that has: at so many more units, then at so many at
# a time. A hole in the log may have taken any number of a queue's messages.
_NEIGHBOURS: Final = 256
_CHUNK_UNITS: Final = 8192
# Fillers are passed over at no cost worth telling; so many units with a damaged record are looked at about, no more.
_DAMAGED_MAX: Final = 16_384
_NO_UNITS: Final = np.empty(0, UNIT_DTYPE)


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
        if not len(units) or units["size"][0] == FILLER_SIZE:
            return UNREADABLE
        return self._records.store_timestamp_ms(int(units["physical_offset"][0]))

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
        """(offset, store time) of the first unit in [offset, stop) with a record; None without.

        A unit that points below the log's beginning is older than any time.
        """
        begin = self._records.visible().begin
        count, damaged = 1, 0
        while offset < stop and damaged < _DAMAGED_MAX:
            units = self._units(queue, bounds, offset, min(count, stop - offset))
            if not len(units):
                # The file is not there: the ones behind it may be.
                offset = self._files.following_file(offset)
                damaged += 1
                continue
            for place in np.flatnonzero(units["size"] != FILLER_SIZE).tolist():
                physical_offset = int(units["physical_offset"][place])
                if 0 <= physical_offset < begin:
                    return offset + place, UNREADABLE
                time_ms = self._records.store_timestamp_ms(physical_offset)
                if time_ms != UNREADABLE:
                    return offset + place, time_ms
                damaged += 1
            offset += len(units)
            count = _NEIGHBOURS if count == 1 else _CHUNK_UNITS
        return None

    def _units(self, queue: tuple[str, int], bounds: QueueBounds, offset: int, count: int) -> NDArray[np.void]:
        """Units, `UNIT_DTYPE`; none where the file is not there."""
        try:
            return as_units(self._files.read_units(*queue, offset, count, bounds.number))
        except FileNotFoundError:
            return _NO_UNITS
