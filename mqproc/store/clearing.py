"""Zeroing what lies behind the valid part of a file, and nothing when it is zeros already."""

from __future__ import annotations

import numpy as np

from mqproc.io import StoreIO

_CHUNK_BYTES = 1 << 20


def dirty_end(io: StoreIO, fd: int, position: int) -> int:
    """End of the last byte at or behind `position` that is not zero; `position` when there is none.

    Space that was never written is passed over at once.
    """
    end = position
    while (data := io.next_data(fd, position)) is not None:
        hole = io.next_hole(fd, data)
        for start in range(data, hole, _CHUNK_BYTES):
            filled = np.flatnonzero(np.frombuffer(io.pread(fd, min(_CHUNK_BYTES, hole - start), start), np.uint8))
            if len(filled):
                end = start + int(filled[-1]) + 1
        position = hole
    return end


def clear_behind(io: StoreIO, fd: int, position: int) -> int:
    """Make an open file read as zeros from `position` on; how far behind it there was anything else. Not synced."""
    dirty = dirty_end(io, fd, position)
    if dirty > position:
        io.zero(fd, position, dirty - position)
    return dirty - position
