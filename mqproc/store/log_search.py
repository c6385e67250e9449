"""Reading a segment piece by piece, and looking for what lies in it without touching what was never written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels import scan
from mqproc.kernels.record_check import record_size
from mqproc.layout import record

# A record is mostly near. Where written data ends is not asked: the file system may look at every page up to there.
_LOOK_BYTES: Final = 256 << 10


def written_ranges(io: StoreIO, fd: int, position: int, limit: int) -> Iterator[tuple[int, int]]:
    """Small ranges (start, stop) of [position, limit) that hold everything ever written there, ascending."""
    while position < limit and (data := io.next_data(fd, position)) is not None:
        # A size's first bytes are zeros too, and may lie in what was never written.
        start, stop = max(position, data - record.MAGIC), min(data + _LOOK_BYTES, limit)
        if start < stop:
            yield start, stop
        position = stop


def find_record_in(
    ranges: Iterable[tuple[int, int]], view: NDArray[np.uint8], base: int, out: NDArray[np.int64]
) -> int:
    """`scan.find_record` in one range after the other: where a record or the BLANK begins, −1 = nowhere."""
    for start, stop in ranges:
        # The largest byte is found in half the time of any().
        if not view[start:stop].max(initial=0):
            # Most of a segment may be zeros that were written. No magic begins with one, so a record can only begin
            # where its own lies behind them.
            start = max(start, stop - record.MAGIC)
        at = int(scan.find_record(view, start, stop, base, out))
        if at >= 0:
            return at
    return -1


def scan_piece(view: NDArray[np.uint8], at: int, stop: int, base: int, piece_bytes: int, out: NDArray[np.int64]) -> int:
    """`scan.scan_records` of one piece of view[at:stop], of one record at least; returns why it ended."""
    reason = int(scan.scan_records(view, at, min(at + piece_bytes, stop), base, scan.VERIFY_ALL, out))
    if reason == scan.REACHED_STOP and out[scan.STOPPED_AT] == at:
        # Longer than a piece, or it reaches over `stop`: records belong to where they begin.
        size = int(record_size(view, at, len(view)))
        reason = int(scan.scan_records(view, at, at + size, base, scan.VERIFY_ALL, out))
    return reason
