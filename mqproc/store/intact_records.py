"""A pass over everything intact in a log, whatever else is wrong with the store: pieces of whole records, and holes.

Neither queues nor index are asked, no segment needs to be whole. Of a store that runs only what is published counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels import scan
from mqproc.kernels.record_check import REASON_NAMES
from mqproc.store.damage import MISSING_SEGMENT
from mqproc.store.log_search import find_record_in, scan_piece
from mqproc.store.verify.inventory import Inventory
from mqproc.store.verify.log_views import LogViews

_PIECE_BYTES: Final = 4 << 20
_LET_GO_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole records view[start:stop] of the segment that begins at `base` in the log; valid until the next one."""

    view: NDArray[np.uint8]
    base: int
    start: int
    stop: int
    records: int


@dataclass(frozen=True, slots=True)
class LostRange:
    """Log positions [start, stop) where records should be and none are.

    Its bytes from `written_stop` on are zeros, so that nothing may be lost when no record follows.
    """

    start: int
    stop: int
    reason: str
    written_stop: int


@dataclass(frozen=True, slots=True)
class Blank:
    """The log goes on in the next segment: a BLANK at this log position says so."""

    position: int


class IntactRecords:
    """Passes over one log."""

    def __init__(self, io: StoreIO, inventory: Inventory, begin: int, end: int | None) -> None:
        """From log position `begin`, where a record begins, to `end` (None: where the records end)."""
        self._inventory = inventory
        self._views = LogViews(io, inventory)
        self._begin = begin
        self._end = end
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)

    def pieces(self, on_progress: Callable[[int], None] = lambda position: None) -> Iterator[Piece | LostRange]:
        """Every piece and every lost range, in order. Zeros behind the last record are no lost range."""
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
                if isinstance(found, Piece):
                    yield found
                    on_progress(found.base + found.stop)
            cursor = base + self._views.segment_size
        for each in lost:
            if each.written_stop > each.start:
                yield dataclasses.replace(each, stop=each.written_stop)

    def in_segment(self, base: int, at: int = 0) -> Iterator[Piece | LostRange | Blank]:
        """What lies in one segment from its byte `at` on, up to its BLANK or end; nothing when it is not there."""
        view = self._views.view(base)
        if view is None:
            return
        segment_size = self._views.segment_size
        stop = len(view) if self._end is None else min(len(view), self._end - base)
        let_go = at
        while at < stop:
            self._views.read_ahead(base, at, stop)
            reason = scan_piece(view, at, stop, base, _PIECE_BYTES, self._out)
            end = int(self._out[scan.STOPPED_AT])
            if end > at:
                yield Piece(view, base, at, end, int(self._out[scan.COUNT]))
                at = end
            if at - let_go > _LET_GO_BYTES:
                self._views.let_go(base, let_go, at - let_go)
                let_go = at
            if reason == scan.BLANK:
                yield Blank(base + at)
                break
            if reason != scan.REACHED_STOP:
                lost = self._lost(view, base, at, stop, reason)
                yield lost
                at = lost.stop - base
        self._views.let_go(base, let_go, at - let_go)
        if len(view) < segment_size and at == len(view):
            yield LostRange(base + at, base + segment_size, "short segment", base + at)

    def close(self) -> None:
        """Close the segments."""
        self._views.close()

    def _lost(self, view: NDArray[np.uint8], base: int, at: int, stop: int, reason: int) -> LostRange:
        """No record begins at `at`: from there to the next record or BLANK, else to the segment's end."""
        following = find_record_in(self._views.written_ranges(base, at + 1, stop), view, base, self._out)
        if following >= 0:
            return LostRange(base + at, base + following, REASON_NAMES[reason], base + following)
        written = at
        for start, end in self._views.written_ranges(base, at, stop):
            if view[start:end].any():
                written = start + int(np.flatnonzero(view[start:end])[-1]) + 1
        end = self._views.segment_size if stop == len(view) else stop
        return LostRange(base + at, base + end, REASON_NAMES[reason], base + written)
