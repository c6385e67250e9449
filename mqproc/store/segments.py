"""A row of CommitLog segments, for reading: which files there are, their descriptors and maps, both bounded.

A segment's name is the offset of its first byte, so the segment of an offset is found by arithmetic. Maps are whole
segments, but pages stay present only near where one reads: present pages count as this process's memory.
"""

from __future__ import annotations

import itertools
import mmap
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io import Kind, StoreIO
from mqproc.kernels.views import as_kernel_array
from mqproc.paths import segment_name, segment_start

# Segments mapped at once by one process. Address space only: pages are let go by `touched`.
MAPPED_SEGMENTS_MAX = 64
# A process lets go of the log's pages when it may have this many bytes of them present, unless it says otherwise.
PRESENT_BYTES_MAX = 32 << 20
# So much of a log that is read in order is asked for before it is needed.
AHEAD_BYTES = 32 << 20
# What the kernel maps around one fault, at a multiple of it.
PAGES_AROUND_BYTES = 64 << 10


class LogSegments:
    """The segments below one folder. Raises FileNotFoundError where a file has been deleted by retention."""

    def __init__(
        self,
        io: StoreIO,
        folder: Path,
        segment_size: int,
        mapped_max: int = MAPPED_SEGMENTS_MAX,
        *,
        whole: bool = True,
        still: bool = False,
        present_bytes_max: int = PRESENT_BYTES_MAX,
    ) -> None:
        """With `whole` false a file may be shorter than a segment: its view ends where it does.

        With `still` a view need not show what is appended later; then holes of it never take room (`map_as_it_is`).
        All pages are let go when those that were read may be more than `present_bytes_max`.
        """
        self.io = io
        self.folder = folder
        self.segment_size = segment_size
        self._mapped_max = mapped_max
        self._whole = whole
        self._still = still
        self._present_bytes_max = present_bytes_max
        self._maps: OrderedDict[int, tuple[mmap.mmap, NDArray[np.uint8]]] = OrderedDict()
        # The numbers of the stretches of PAGES_AROUND_BYTES of the log that may be present.
        self._present: set[int] = set()
        self._asked_to = 0

    def starts(self) -> list[int]:
        """Offsets of the segments that are there now, ascending; other names in the folder are passed over."""
        found = (segment_start(name) for name in self.io.names(self.folder))
        return [start for start in found if start is not None]

    def start_of(self, physical_offset: int) -> int:
        """Start of the segment that holds an offset."""
        return physical_offset - physical_offset % self.segment_size

    def path(self, start: int) -> Path:
        return self.folder / segment_name(start)

    def view(self, start: int) -> NDArray[np.uint8]:
        """uint8[segment size], mapped read-only. Raises CorruptStoreError when the file is short, if it may not be."""
        found = self._maps.get(start)
        if found is None:
            found = self._map(start)
        self._maps.move_to_end(start)
        return found[1]

    @property
    def present_bytes(self) -> int:
        """So much of the log may be present in this process's memory."""
        return len(self._present) * PAGES_AROUND_BYTES

    def touched(self, position: int, size: int = 1) -> None:
        """Say that [position, position + size) was read; lets go of all pages when too many may be present.

        What several read one after the other, as the queues of a topic do that lie between each other, counts once.
        """
        if size <= self._present_bytes_max:
            first, last = position // PAGES_AROUND_BYTES, (position + max(size, 1) - 1) // PAGES_AROUND_BYTES
            if first != last or first not in self._present:
                self._present.update(range(first, last + 1))
                self._let_go_of_many()
        else:
            self.let_go_all()

    def touched_at(self, positions: NDArray[np.int64]) -> None:
        """The same of the beginnings of records that lie far apart."""
        self._present.update((positions // PAGES_AROUND_BYTES).tolist())
        self._let_go_of_many()

    def _let_go_of_many(self) -> None:
        if self.present_bytes > self._present_bytes_max:
            self.let_go_all()

    def read_ahead(self, position: int, stop: int) -> None:
        """Let the disk begin with what lies behind a position, in a log that is read in order up to `stop`.

        A little at a time: one call reaches no further than the segment's end.
        """
        first = self._asked_to if position <= self._asked_to <= position + AHEAD_BYTES else position
        base = self.start_of(first)
        last = min(position + AHEAD_BYTES, base + self.segment_size, stop)
        if first - position >= AHEAD_BYTES // 2 or first >= last:
            return
        try:
            fd = self.io.open(self.path(base))
        except FileNotFoundError:
            return
        try:
            self.io.will_need(fd, first - base, last - first)
        finally:
            self.io.close(fd)
        self._asked_to = last

    def let_go(self, start: int, offset: int, size: int) -> None:
        """Let go of the mapped pages of [offset, offset + size) of the segment at `start`."""
        found = self._maps.get(start)
        if found is not None and size > 0:
            self.io.unmap_pages(found[0], offset, size)

    def let_go_all(self) -> None:
        """Let go of all mapped pages; the views stay valid and fault them in again."""
        for mapping, _view in self._maps.values():
            self.io.unmap_pages(mapping, 0, len(mapping))
        self._present.clear()

    def forget_below(self, physical_offset: int) -> None:
        """Drop the maps of segments that end at or below an offset. Views that someone still holds stay valid."""
        for start in [start for start in self._maps if start + self.segment_size <= physical_offset]:
            del self._maps[start]

    def close(self) -> None:
        """Drop all maps; they go with their last view."""
        self._maps.clear()

    def _map(self, start: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
        fd = self.io.open(self.path(start))
        try:
            # What lies behind a file's end is a SIGBUS when it is read.
            size = min(self.io.size(fd), self.segment_size)
            if size < self.segment_size and self._whole:
                raise CorruptStoreError(f"{self.path(start)}: {size:,} bytes; a segment has {self.segment_size:,}")
            # Of no bytes there is no map.
            map_file = self.io.map_as_it_is if self._still else self.io.map
            mapping = map_file(fd, size) if size else self.io.shared_memory(mmap.PAGESIZE)
        finally:
            self.io.close(fd)
        while len(self._maps) >= self._mapped_max:
            self._maps.popitem(last=False)
        self._maps[start] = mapping, as_kernel_array(mapping, size)
        return self._maps[start]


def adopted_segment_size(io: StoreIO, folder: Path, configured: int) -> int:
    """The size that most segments have whose names fit it; without any, the configured one.

    Where no file's length fits its name, the names decide: a file that is missing, short, too long or in a wrong place
    misleads nobody.
    """
    files = [entry for entry in io.entries(folder) if entry.kind is Kind.FILE]
    found = [(start, entry.size) for entry in files if (start := segment_start(entry.name)) is not None]
    starts = [start for start, _size in found]
    whole = Counter(size for start, size in found if size > 0 and size % mmap.PAGESIZE == 0 and start % size == 0)
    if whole:
        fitting = {size: sum(start % size == 0 for start in starts) for size in whole}
        return max(whole, key=lambda size: (whole[size], fitting[size], size == configured, size))
    if 2 * sum(start % configured == 0 for start in starts) >= len(starts):
        return configured
    return min(later - earlier for earlier, later in itertools.pairwise(starts)) if len(starts) > 1 else configured
