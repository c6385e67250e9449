"""A pass over everything intact in a log, whatever else is wrong with the store: pieces of whole records, and holes.

Neither queues nor index are asked, no segment needs to be whole. Of a store that runs only what is published counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels import scan
from mqproc.kernels.record_check import REASON_NAMES, record_size
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
    """Log positions [start, stop) where records should be and none are."""

    start: int
    stop: int
    reason: str


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
        """Every piece and every lost range, in order. What lies behind the last record is no lost range."""
        lost: list[LostRange] = []
        cursor = self._begin
        for base in sorted(self._inventory.segments):
            if self._end is not None and base >= self._end:
                break
            if base > cursor:
                lost.append(LostRange(cursor, base, "missing segment"))
            for found in self._segment(base, max(0, self._begin - base)):
                if isinstance(found, LostRange):
                    lost.append(found)
                    continue
                yield from lost
                lost.clear()
                yield found
                on_progress(found.base + found.stop)
            cursor = base + self._views.segment_size

    def close(self) -> None:
        """Close the segments."""
        self._views.close()

    def _segment(self, base: int, at: int) -> Iterator[Piece | LostRange]:
        view = self._views.view(base)
        if view is None:
            return
        stop = len(view) if self._end is None else min(len(view), self._end - base)
        let_go = at
        while at < stop:
            self._views.read_ahead(base, at, stop)
            reason, end, count = self._scan(view, base, at, stop)
            if end > at:
                yield Piece(view, base, at, end, count)
                at = end
            if at - let_go > _LET_GO_BYTES:
                self._views.let_go(base, let_go, at - let_go)
                let_go = at
            if reason == scan.BLANK:
                break
            if reason != scan.REACHED_STOP:
                following = int(scan.find_record(view, at + 1, stop, base, self._out))
                end = following if following >= 0 else self._views.segment_size
                yield LostRange(base + at, base + end, REASON_NAMES[reason])
                at = end
        self._views.let_go(base, let_go, at - let_go)
        if len(view) < self._views.segment_size and at == len(view):
            yield LostRange(base + at, base + self._views.segment_size, "short segment")

    def _scan(self, view: NDArray[np.uint8], base: int, at: int, stop: int) -> tuple[int, int, int]:
        """(reason, where whole records end, how many) from a position on, of one piece."""
        out = self._out
        reason = int(scan.scan_records(view, at, min(at + _PIECE_BYTES, stop), base, scan.VERIFY_ALL, out))
        if reason == scan.REACHED_STOP and out[scan.STOPPED_AT] == at:
            # Longer than a piece.
            size = int(record_size(view, at, len(view)))
            reason = int(scan.scan_records(view, at, at + size, base, scan.VERIFY_ALL, out))
        return reason, int(out[scan.STOPPED_AT]), int(out[scan.COUNT])
