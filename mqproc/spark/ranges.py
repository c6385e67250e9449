"""What a partition of a read is: ranges of logs, or slices of queues. Light, as it travels with every task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from mqproc.spark.options import Queue, Selection


@dataclass(frozen=True, slots=True)
class LogRange:
    """Positions [start, stop) of the segment that begins at log position `segment`.

    A record belongs to the range that it begins in. Without `exact_start` records begin somewhere behind `start`, and
    the range before this one proves where; the same holds for the end. `limit`: where the log ends in this segment.
    With `open_end` nobody knows that: the log ends where its records do.
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
    """A store with what of it is wanted, its offsets found out: what a task must know beside its ranges.

    `uri` is its folder or URL; `deleted` by queue where log and offsets ended when it was deleted.
    """

    uri: str
    segment_size: int
    selection: Selection
    deleted: Mapping[Queue, tuple[int, int]] = dataclasses.field(default_factory=dict)
    queue_file_bytes: int = 0
    """Length of its ConsumeQueue files, for slices."""


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """Messages [start, stop) of a queue, found by its units: nothing else of the log is looked at."""

    topic: str
    queue_id: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class LogPartition(InputPartition):
    """Ranges and slices for one task, each with the number of its store in `stores`."""

    def __init__(
        self,
        stores: list[StoreSelection],
        ranges: list[tuple[int, LogRange]],
        slices: Sequence[tuple[int, QueueSlice]] = (),
    ) -> None:
        super().__init__(None)
        self.stores = stores
        self.ranges = ranges
        self.slices = list(slices)

    @property
    def size(self) -> int:
        """Bytes of log that the ranges have."""
        return sum(each.stop - each.start for _store, each in self.ranges)

    @property
    def rows(self) -> int:
        """Messages that the slices have."""
        return sum(len(each) for _store, each in self.slices)
