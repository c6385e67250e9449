"""Written ranges of a file: zero those after the valid part, or test that they are readable."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mqproc.io.store_io import StoreIO

_CHUNK_BYTES = 1 << 20


def dirty_end(io: StoreIO, fd: int, position: int) -> int:
    """End of the last nonzero byte at or after `position`; `position` if none exists.

    Holes are skipped.
    """
    io.disable_read_ahead(fd)
    end = position
    while (written := _next_written(io, fd, position)) is not None:
        data, hole = written
        for start in range(data, hole, _CHUNK_BYTES):
            chunk = np.frombuffer(io.pread(fd, min(_CHUNK_BYTES, hole - start), start), np.uint8)
            if chunk.max(initial=0):
                end = start + len(chunk) - int((chunk[::-1] != 0).argmax())
        position = hole
    return end


def _next_written(io: StoreIO, fd: int, position: int) -> tuple[int, int] | None:
    """Next written range [start, stop) at or after a position; None if none exists.

    Allocated space counts as written while its pages are cached, and reading the end of a log caches the pages that
    follow. So for a long range the clean pages are dropped first: reading them all would take seconds.
    """
    data = io.next_data(fd, position)
    if data is not None and (hole := io.next_hole(fd, data)) - data > _CHUNK_BYTES:
        io.drop_cache(fd, data, hole - data)
        data = io.next_data(fd, position)
    return None if data is None else (data, io.next_hole(fd, data))


def zero_tail(io: StoreIO, fd: int, position: int) -> int:
    """Zero an open file from `position` on, unsynced; returns the length of the cleared content."""
    dirty = dirty_end(io, fd, position)
    if dirty > position:
        io.zero(fd, position, dirty - position)
    return dirty - position


def read_through(io: StoreIO, path: Path) -> None:
    """Read all written bytes of a file. Raises OSError where mapping it would raise SIGBUS."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with io.opened(path) as fd:
        position = 0
        while (data := io.next_data(fd, position)) is not None:
            position = io.next_hole(fd, data)
            for start in range(data, position, _CHUNK_BYTES):
                io.pread_into(fd, buffer[: min(_CHUNK_BYTES, position - start)], start)
