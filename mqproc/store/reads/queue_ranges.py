"""A topic's messages of a time: by store time through binary search, by born time through all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.record_check import VERIFY_NOTHING
from mqproc.store.consume_queue import ConsumeQueueFiles
from mqproc.store.reads.log_records import LogRecords
from mqproc.store.reads.passing import passing
from mqproc.store.reads.queue_bounds import QueueBounds, Queues
from mqproc.store.reads.queue_times import QueueTimes
from mqproc.store.reads.unit_walk import Halt, Limits, Walk
from mqproc.store.slices import Batch, Slices

SLICE_UNITS = 1 << 16
SLICE_LOOK_BYTES = 8 << 20
"""What records that do not match may cost one slice; see `Limits.look_bytes`."""

# A topic may have thousands of queues with nothing of a time, which takes some dozens of looks into each to find out.
_SPANS_PER_SLICE = 8


class QueueRanges:
    """Ranges and counts over the queues of one store. Times are Unix ms, the end not included."""

    def __init__(self, queues: Queues, files: ConsumeQueueFiles, records: LogRecords, times: QueueTimes) -> None:
        self._queues = queues
        self._files = files
        self._records = records
        self._times = times

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
    ) -> Slices[Batch]:
        """Messages with begin_ms ≤ time < end_ms, queue by queue; `cursor` (queue id, queue offset) goes on."""
        first_queue, first_offset = (int(cursor[0]), int(cursor[1])) if len(cursor) == 2 else (0, 0)
        chosen = passing(topic, tuple(tags), sql)
        parts: list[NDArray[np.uint8]] = []
        count, size, looked_at = 0, 0, 0
        for queue_id in self._queues.ids(topic):
            bounds = self._queues.bounds(topic, queue_id) if queue_id >= first_queue else None
            if bounds is None:
                continue
            start, stop = self._span((topic, queue_id), bounds, begin_ms, end_ms, born_time=born_time)
            looked_at += 1
            if looked_at % _SPANS_PER_SLICE == 0:
                yield
            if queue_id == first_queue:
                start = max(start, first_offset)
            if count >= max_messages or size >= max_bytes:
                return Batch(count, parts, (queue_id, start), complete=False)
            limits = _limits(begin_ms, end_ms, born_time=born_time)
            limits.messages, limits.bytes = max_messages - count, max_bytes - size
            walk = Walk(self._records, self._files, (topic, queue_id), bounds.number, start, chosen, limits)
            halt = yield from self._walk_to(walk, stop, (topic, queue_id))
            # Every answer has one record at least, whatever its size; a later queue's first one must keep the limit.
            if walk.count and (count == 0 or size + len(walk.gathered) <= max_bytes):
                parts.append(walk.gathered)
                count, size = count + walk.count, size + len(walk.gathered)
            elif walk.count:
                return Batch(count, parts, (queue_id, start), complete=False)
            if halt is Halt.LIMIT:
                return Batch(count, parts, (queue_id, walk.next_offset), complete=False)
        return Batch(count, parts)

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
        """How many messages `range` would give. By store time without a filter only records at the borders are read.

        Unless the log has damaged ranges: then units tell nothing, and each record is looked for.
        """
        chosen = passing(topic, tuple(tags), sql)
        by_units = not tags and not sql and not born_time and not self._records.have_holes()
        count = 0
        for queue_id in self._queues.ids(topic):
            bounds = self._queues.bounds(topic, queue_id)
            if bounds is None:
                continue
            start, stop = self._span((topic, queue_id), bounds, begin_ms, end_ms, born_time=born_time)
            if by_units:
                count += max(0, stop - start)
                yield
                continue
            limits = _limits(begin_ms, end_ms, born_time=born_time)
            limits.verify, limits.copy = VERIFY_NOTHING, False
            walk = Walk(self._records, self._files, (topic, queue_id), bounds.number, start, chosen, limits)
            yield from self._walk_to(walk, stop, (topic, queue_id))
            count += walk.count
        return count

    def _walk_to(self, walk: Walk, stop: int, queue: tuple[str, int]) -> Slices[Halt]:
        """Walk up to `stop` or a limit in slices, stepping over damage, files that are not there, and what retention
        deletes meanwhile."""
        halt = Halt.DONE
        while walk.next_offset < stop:
            halt = walk.run(min(stop, walk.next_offset + SLICE_UNITS))
            if halt is Halt.DAMAGE:
                walk.step_over_damage(stop)
                halt = Halt.DONE
            elif halt is Halt.NO_UNITS and (bounds := self._queues.bounds(*queue)) is not None:
                # As for a pull: what lies in the files behind one that is lost is given all the same.
                walk.next_offset = max(bounds.min_offset, self._files.following_file(walk.next_offset))
                halt = Halt.DONE
            elif halt is Halt.LOOKED:
                halt = Halt.DONE
            elif halt is not Halt.DONE:
                break
            yield
        return halt

    def _span(
        self, queue: tuple[str, int], bounds: QueueBounds, begin_ms: int, end_ms: int, *, born_time: bool
    ) -> tuple[int, int]:
        """Queue offsets [start, stop) of a time; the whole queue by born time, which orders nothing."""
        start, stop = bounds.min_offset, bounds.max_offset
        if born_time or end_ms <= begin_ms:
            return start, stop if born_time and end_ms > begin_ms else start
        if begin_ms > TIME_MIN:
            start = self._times.first_above(queue, bounds, begin_ms)
        if end_ms < TIME_MAX:
            stop = self._times.first_above(queue, bounds, end_ms)
        return start, stop


def _limits(begin_ms: int, end_ms: int, *, born_time: bool) -> Limits:
    begin_ms, end_ms = max(begin_ms, TIME_MIN), min(end_ms, TIME_MAX)
    if born_time:
        return Limits(look_bytes=SLICE_LOOK_BYTES, born_begin_ms=begin_ms, born_end_ms=end_ms)
    return Limits(look_bytes=SLICE_LOOK_BYTES, store_begin_ms=begin_ms, store_end_ms=end_ms)
