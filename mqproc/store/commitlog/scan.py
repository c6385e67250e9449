"""Scan of a log for all intact records, whatever else is damaged.

It uses neither queues nor index and accepts short segments. In a running store only the published part counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io.store_io import StoreIO
from mqproc.kernels import record_check, scan
from mqproc.kernels.record_check import REASON_NAMES
from mqproc.store.commitlog.segments import find_record_in, scan_piece
from mqproc.store.damage import MISSING_SEGMENT
from mqproc.store.verify.inventory import Inventory
from mqproc.store.verify.log import SegmentViews

_PIECE_BYTES: Final = 4 << 20
_LET_GO_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class RecordRun:
    """Whole records view[start:stop] of the segment at `base`; valid until the next item."""

    view: NDArray[np.uint8]
    base: int
    start: int
    stop: int
    records: int


@dataclass(frozen=True, slots=True)
class LostRange:
    """Log positions [start, stop) that should hold records but do not.

    The bytes from `written_stop` on are zeros, so nothing may be lost if no record follows.
    """

    start: int
    stop: int
    reason: str
    written_stop: int


@dataclass(frozen=True, slots=True)
class Blank:
    """A BLANK at this log position: the log continues in the next segment."""

    position: int


class IntactRecords:
    """Scans of one log."""

    def __init__(self, io: StoreIO, inventory: Inventory, begin: int, end: int | None) -> None:
        """Scan from `begin`, where a record begins, to `end` (None: to the last record)."""
        self._inventory = inventory
        self._views = SegmentViews(io, inventory)
        self._begin = begin
        self._end = end
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)

    def pieces(self, on_progress: Callable[[int], None] = lambda position: None) -> Iterator[RecordRun | LostRange]:
        """All runs and lost ranges in log order. Zeros after the last record are not a lost range."""
        lost: list[LostRange] = []
        cursor = self._begin
        for base in sorted(self._inventory.segments):
            if self._end is not None and base >= self._end:
                break
            if base > cursor:
                lost.append(LostRange(cursor, base, MISSING_SEGMENT, cursor))
            for found in self.in_segment(base, max(0, self._begin - base)):
                if isinstance(found, LostRange):
                    lost.append(found)
                    continue
                yield from lost
                lost.clear()
                if isinstance(found, RecordRun):
                    yield found
                    on_progress(found.base + found.stop)
            cursor = base + self._views.segment_size
        for item in lost:
            if item.written_stop > item.start:
                yield dataclasses.replace(item, stop=item.written_stop)

    def in_segment(self, base: int, at: int = 0) -> Iterator[RecordRun | LostRange | Blank]:
        """Content of one segment from byte `at` to its BLANK or end; empty for a missing one."""
        view = self._views.view(base)
        if view is None:
            return
        segment_size = self._views.segment_size
        stop = len(view) if self._end is None else min(len(view), self._end - base)
        dropped_to = at
        while at < stop:
            self._views.read_ahead(base, at, stop)
            reason = scan_piece(view, at, stop, base, _PIECE_BYTES, self._out)
            end = int(self._out[scan.STOPPED_AT])
            if end > at:
                yield RecordRun(view, base, at, end, int(self._out[scan.COUNT]))
                at = end
            if at - dropped_to > _LET_GO_BYTES:
                self._views.release(base, dropped_to, at - dropped_to)
                dropped_to = at
            if reason == record_check.BLANK:
                yield Blank(base + at)
                break
            if reason != record_check.REACHED_STOP:
                lost = self._lost(view, base, at, stop, reason)
                yield lost
                at = lost.stop - base
        self._views.release(base, dropped_to, at - dropped_to)
        if len(view) < segment_size and at == len(view):
            yield LostRange(base + at, base + segment_size, "short segment", base + at)

    def close(self) -> None:
        self._views.close()

    def _lost(self, view: NDArray[np.uint8], base: int, at: int, stop: int, reason: int) -> LostRange:
        """The range from `at`, where no record begins, to the next record, BLANK or segment end."""
        following = find_record_in(self._views.written_ranges(base, at + 1, stop), view, base, self._out)
        if following >= 0:
            return LostRange(base + at, base + following, REASON_NAMES[reason], base + following)
        written = at
        for start, end in self._views.written_ranges(base, at, stop):
            if view[start:end].any():
                written = start + int(np.flatnonzero(view[start:end])[-1]) + 1
        end = self._views.segment_size if stop == len(view) else stop
        return LostRange(base + at, base + end, REASON_NAMES[reason], base + written)
