"""Partitions of a read: ranges of logs and slices of queues, which travel with tasks.

A stream cuts the messages between two offsets into the same partitions each time:

    queue a  ├── 1 ──┼── 2 ──┼── 3 ──┤       each partition has a share of every queue, since messages stored together
    queue b  ├── 1 ──┼── 2 ──┼── 3 ──┤       are read together; small queues are packed whole
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import InputPartition

from mqproc.errors import BadRequestError
from mqproc.spark.options import Queue, ReadSelection


@dataclass(frozen=True, slots=True)
class LogRange:
    """Positions [start, stop) of the segment at log position `segment`.

    A record belongs to the range in which it begins. Without `exact_start` the first record begins after `start`, where
    the previous range proves it; likewise for the end. With `open_end` the log ends where its records do.
    """

    segment: int
    start: int
    stop: int
    limit: int
    segment_size: int
    exact_start: bool = False
    exact_stop: bool = False
    open_end: bool = False


@dataclass(frozen=True, slots=True)
class StoreSelection:
    """A store and its selection with resolved offsets, as a task needs them.

    `uri` is a folder or URL; `deleted` maps each deleted queue to (log position, next offset) at its deletion.
    """

    uri: str
    segment_size: int
    selection: ReadSelection
    deleted: Mapping[Queue, tuple[int, int]] = dataclasses.field(default_factory=dict)
    queue_file_bytes: int = 0
    """Size of ConsumeQueue files, to read slices."""


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """Messages [start, stop) of a queue, located by its units."""

    topic: str
    queue_id: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Slices = list[tuple[int, QueueSlice]]
"""Slices with the index of their store."""


@dataclass(slots=True)
class LogPartition(InputPartition):
    """Ranges and slices for one task, each with an index into `stores`."""

    stores: list[StoreSelection]
    ranges: list[tuple[int, LogRange]]
    slices: Slices = dataclasses.field(default_factory=list)


# Splitting slices

PARTITIONS_USUALLY: Final = 64
"""Default limit on partitions, as each task costs tens of milliseconds; large micro-batches have more."""
RECORDS_MIN: Final = 50_000
RECORDS_MAX: Final = 2_000_000
# More tasks than this take longer to start than to read so few messages each.
_SMALL_MAX: Final = 1000
_SMALL_RECORDS: Final = 1000
# With fewer messages per queue and partition, opening files repeatedly would dominate.
_SLICE_MIN: Final = 256


def partitioned(slices: Slices, records_max: int, partitions_min: int) -> list[Slices]:
    """Split slices into partitions of at most `records_max` messages (0: chosen here).

    Raises BadRequestError when that makes too many partitions.
    """
    total = sum(len(queue_slice) for _store, queue_slice in slices)
    if not total:
        return []
    limit = records_max or min(RECORDS_MAX, max(RECORDS_MIN, -(-total // PARTITIONS_USUALLY)))
    count = min(total, max(-(-total // limit), partitions_min))
    if count > _SMALL_MAX and total // count < _SMALL_RECORDS:
        raise BadRequestError(
            f"{total:,} messages make {count:,} partitions; the limit is {_SMALL_MAX:,} of fewer than "
            f"{_SMALL_RECORDS:,} messages: set maxRecordsPerPartition higher, or minPartitions or "
            "maxOffsetsPerTrigger lower"
        )
    if count == 1 or total // count >= _SLICE_MIN * len(slices):
        return [_share(slices, number, count) for number in range(count)]
    return _pack(slices, -(-total // count))


def _share(slices: Slices, number: int, count: int) -> Slices:
    """Share `number` of `count` shares of each slice."""
    found = []
    for store, queue_slice in slices:
        start, stop = (queue_slice.start + len(queue_slice) * part // count for part in (number, number + 1))
        if start < stop:
            found.append((store, dataclasses.replace(queue_slice, start=start, stop=stop)))
    return found


def _pack(slices: Slices, limit: int) -> list[Slices]:
    """Pack slices in order, cut where a partition is full."""
    packed: list[Slices] = [[]]
    room = limit
    for store, queue_slice in slices:
        starts = [queue_slice.start, *range(queue_slice.start + room, queue_slice.stop, limit), queue_slice.stop]
        for start, stop in itertools.pairwise(starts):
            if not room:
                packed.append([])
                room = limit
            packed[-1].append((store, dataclasses.replace(queue_slice, start=start, stop=stop)))
            room -= stop - start
    return packed
