"""The messages between two offsets as partitions: the same ones whenever the same two offsets are given.

queue a  ├── 1 ──┼── 2 ──┼── 3 ──┤       a partition has its share of every queue, since what was stored together
queue b  ├── 1 ──┼── 2 ──┼── 3 ──┤       is read together; where queues have few messages each, some whole queues
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from mqproc.spark.ranges import QueueSlice

PARTITIONS_USUALLY: Final = 64
"""Each task costs tens of milliseconds: so many are enough for any machine, as long as none is larger than the last
of these."""
RECORDS_MIN: Final = 50_000
RECORDS_MAX: Final = 2_000_000
# Below so many messages of a queue in each partition, opening its files over and over is most of the work.
_SLICE_MIN: Final = 256

Slices = list[tuple[int, QueueSlice]]
"""Each with the number of its store."""


def partitioned(slices: Slices, records_max: int, partitions_min: int) -> list[Slices]:
    """Slices cut and packed: at most `records_max` messages each (0: chosen here), as many as `partitions_min`."""
    total = sum(len(of) for _store, of in slices)
    if not total:
        return []
    most = records_max or min(RECORDS_MAX, max(RECORDS_MIN, -(-total // PARTITIONS_USUALLY)))
    count = min(total, max(-(-total // most), partitions_min))
    if count == 1 or total // count >= _SLICE_MIN * len(slices):
        return [_share(slices, number, count) for number in range(count)]
    return _packed(slices, -(-total // count))


def _share(slices: Slices, number: int, count: int) -> Slices:
    """Share `number` of `count` of each slice."""
    found = []
    for store, of in slices:
        start = of.start + len(of) * number // count
        stop = of.start + len(of) * (number + 1) // count
        if start < stop:
            found.append((store, QueueSlice(of.topic, of.queue_id, start, stop)))
    return found


def _packed(slices: Sequence[tuple[int, QueueSlice]], most: int) -> list[Slices]:
    """One slice after the other, cut where a partition is full."""
    packed: list[Slices] = [[]]
    room = most
    for store, of in slices:
        starts = [of.start, *range(of.start + room, of.stop, most), of.stop]
        for start, stop in itertools.pairwise(starts):
            if not room:
                packed.append([])
                room = most
            packed[-1].append((store, QueueSlice(of.topic, of.queue_id, start, stop)))
            room -= stop - start
    return packed
