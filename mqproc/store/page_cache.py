"""Drop cached pages of queue and index files that are as old as dropped log pages.

A growing file takes a fresh page for each 4 KiB. On a virtual machine with memory ballooning a fresh page costs more
than writing to it, so pages that are unlikely to be read again are returned for reuse. Only synced pages are dropped;
later reads come from disk.

The distance is measured in bytes of the log (`page_cache_behind_bytes`): each object records the positions in its files
for a dispatch position, and drops what lies below them once dispatch has advanced by that distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io.store_io import StoreIO
from mqproc.layout import index_file
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import index_name_time_ms, segment_name
from mqproc.store.consumequeue.table import QueueTable
from mqproc.util.units import LARGE_PAGE_BYTES, PAGE_BYTES

# Dropping less of a queue is not worth a call.
QUEUE_STEP_BYTES: Final = 16 * PAGE_BYTES


def drop_range(io: StoreIO, path: Path, start: int, stop: int) -> int:
    """Drop the cached whole pages within [start, stop) of a file; returns their bytes."""
    start = -(-start // PAGE_BYTES) * PAGE_BYTES
    stop -= stop % PAGE_BYTES
    if stop <= start:
        return 0
    try:
        fd = io.open(path)
    except FileNotFoundError:
        return 0
    try:
        io.drop_cache(fd, start, stop - start)
    finally:
        io.close(fd)
    return stop - start


class QueuePages:
    """Pages of all ConsumeQueues. Units that existed before this object was created are ignored."""

    def __init__(self, io: StoreIO, folder: Path, file_bytes: int, table: QueueTable, behind_bytes: int) -> None:
        self._io = io
        self._folder = folder
        self._file_bytes = file_bytes
        self._table = table
        self._behind_bytes = behind_bytes
        self._dropped: NDArray[np.int64] | None = None
        self._mark = 0
        self._mark_offsets = np.zeros(0, np.int64)

    def drop(self, dispatched: int, synced: NDArray[np.int64]) -> int:
        """Drop old pages below the durable offsets `synced` int64[queues]; returns the bytes."""
        if self._behind_bytes == 0:
            return 0
        if self._dropped is None:
            self._dropped = synced.copy()
            self._remember(dispatched, synced)
        if dispatched - self._mark < self._behind_bytes:
            return 0
        before = np.zeros(len(self._mark_offsets), np.int64)
        before[: len(self._dropped)] = self._dropped
        due = np.flatnonzero((self._mark_offsets - before) * UNIT_SIZE >= QUEUE_STEP_BYTES)
        size = sum(self._drop(number, int(before[number]), int(self._mark_offsets[number])) for number in due.tolist())
        before[due] = self._mark_offsets[due]
        self._dropped = before
        self._remember(dispatched, synced)
        return size

    def _remember(self, dispatched: int, synced: NDArray[np.int64]) -> None:
        self._mark = dispatched
        self._mark_offsets = synced.copy()

    def _drop(self, number: int, first: int, stop: int) -> int:
        """Drop units [first, stop) of one queue."""
        topic, queue_id = self._table.name(number)
        folder = self._folder / topic / str(queue_id)
        size = 0
        for start, begin, end in _file_ranges(first * UNIT_SIZE, stop * UNIT_SIZE, self._file_bytes):
            size += drop_range(self._io, folder / segment_name(start), begin, end)
        return size


def _file_ranges(first: int, stop: int, file_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(start of the file, begin and end within it) for each file of a byte range."""
    while first < stop:
        start = first - first % file_bytes
        end = min(stop, start + file_bytes)
        # Include the last page of a file: rounding down would leave one page of each.
        yield start, first - start, -(-(end - start) // PAGE_BYTES) * PAGE_BYTES if end < stop else end - start
        first = end


class IndexPages:
    """Pages of the items of index files. Slots stay: every query and every entry reads them."""

    def __init__(self, io: StoreIO, folder: Path, slots: int, behind_bytes: int) -> None:
        self._io = io
        self._folder = folder
        self._slots = slots
        self._behind_bytes = behind_bytes
        self._dropped: tuple[int, int] | None = None
        self._mark = 0
        self._mark_at = (0, 0)

    def drop(self, dispatched: int, file_ms: int, items: int) -> int:
        """Drop old pages; items are durable up to number `items` of the file `file_ms`.

        Returns the bytes of the ranges; the end of the previous call's range counts twice.
        """
        if self._behind_bytes == 0:
            return 0
        if self._dropped is None:
            self._dropped = (file_ms, items)
            self._mark, self._mark_at = dispatched, (file_ms, items)
        if dispatched - self._mark < self._behind_bytes:
            return 0
        size = sum(self._drop(path, file, self._dropped, self._mark_at) for path, file in self._files())
        self._dropped = self._mark_at
        self._mark, self._mark_at = dispatched, (file_ms, items)
        return size

    def _files(self) -> list[tuple[Path, int]]:
        found = ((name, index_name_time_ms(name)) for name in self._io.names(self._folder))
        return [(self._folder / name, time_ms) for name, time_ms in found if time_ms is not None]

    def _drop(self, path: Path, file_ms: int, first: tuple[int, int], stop: tuple[int, int]) -> int:
        """Drop items of one file in [first, stop), each given as (file's time, item)."""
        if not first[0] <= file_ms <= stop[0]:
            return 0
        items_start = index_file.items_start(self._slots)
        begin = index_file.item_offset(self._slots, first[1]) if file_ms == first[0] else items_start
        # A large page is dropped only as a whole: include the one that the previous call had to leave.
        begin = max(items_start, begin - begin % LARGE_PAGE_BYTES)
        if file_ms == stop[0]:
            return drop_range(self._io, path, begin, index_file.item_offset(self._slots, stop[1]))
        return drop_range(self._io, path, begin, self._io.size_of(path) + PAGE_BYTES)
