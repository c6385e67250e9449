"""What a partition of a read is: ranges of the log of one or several stores. Light, as it travels with every task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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


class LogPartition(InputPartition):
    """Ranges for one task, each with the number of its store in `stores`."""

    def __init__(self, stores: list[StoreSelection], ranges: list[tuple[int, LogRange]]) -> None:
        super().__init__(None)
        self.stores = stores
        self.ranges = ranges

    @property
    def size(self) -> int:
        """Bytes of log."""
        return sum(each.stop - each.start for _store, each in self.ranges)
