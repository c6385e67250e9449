"""What was ever written of a file: zeroed behind its valid part, or read to know that it can be."""

from __future__ import annotations

import numpy as np

from mqproc.io import StoreIO

_CHUNK_BYTES = 1 << 20


def dirty_end(io: StoreIO, fd: int, position: int) -> int:
    """End of the last byte at or behind `position` that is not zero; `position` when there is none.

    Space that was never written is passed over at once.
    """
    io.read_only_what_is_asked(fd)
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
    """[start, stop) of what was written next at or behind a position; None when nothing was.

    Allocated space counts as written where pages of it are in memory, and whoever reads a log's end brings in those
    behind it. So a long range is asked for again without its clean pages: reading them all would take seconds.
    """
    data = io.next_data(fd, position)
    if data is not None and (hole := io.next_hole(fd, data)) - data > _CHUNK_BYTES:
        io.drop_cache(fd, data, hole - data)
        data = io.next_data(fd, position)
    return None if data is None else (data, io.next_hole(fd, data))


def clear_behind(io: StoreIO, fd: int, position: int) -> int:
    """Make an open file read as zeros from `position` on; how far behind it there was anything else. Not synced."""
    dirty = dirty_end(io, fd, position)
    if dirty > position:
        io.zero(fd, position, dirty - position)
    return dirty - position


def read_written(io: StoreIO, fd: int) -> None:
    """Read all that was ever written of a file: what cannot be read is an OSError here, and the end of who maps it."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    position = 0
    while (data := io.next_data(fd, position)) is not None:
        position = io.next_hole(fd, data)
        for start in range(data, position, _CHUNK_BYTES):
            io.pread_into(fd, buffer[: min(_CHUNK_BYTES, position - start)], start)
