"""CommitLog segments for reading: the files of a log, and a bounded number of mappings.

A segment's name is the offset of its first byte, so the segment of an offset follows by arithmetic. Whole segments are
mapped, but resident pages count as the process's memory: callers report reads (`note_read`), and the pages are dropped
when too many may be resident.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.file_limits import SPARSE_FILE_BYTES_MAX
from mqproc.io.store_io import Kind, StoreIO
from mqproc.kernels import record_check, scan
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import record_size
from mqproc.layout import record
from mqproc.paths import segment_name, segment_start

# Segments that one process maps at a time. This costs address space only: `note_read` bounds the resident pages.
MAPPED_SEGMENTS_MAX = 64
# Default limit of the log's pages that may be resident in one process.
RESIDENT_BYTES_MAX = 32 << 20
# Distance of read-ahead during a sequential scan.
AHEAD_BYTES = 32 << 20
# The kernel maps this many bytes around a page fault, aligned to the same size.
PAGES_AROUND_BYTES = 64 << 10


class LogSegments:
    """The segments in one folder; methods raise FileNotFoundError for deleted segments."""

    def __init__(
        self,
        io: StoreIO,
        folder: Path,
        segment_size: int,
        mapped_max: int = MAPPED_SEGMENTS_MAX,
        *,
        whole: bool = True,
        static: bool = False,
        resident_bytes_max: int = RESIDENT_BYTES_MAX,
    ) -> None:
        """Configure the mappings.

        `whole`: a short segment is an error; else its view ends at the end of the file. `static`: views need not show
        later appends, and reads of holes then allocate no memory (`StoreIO.map_without_filling_holes`). All pages are
        dropped when more than `resident_bytes_max` may be resident.
        """
        self.io = io
        self.folder = folder
        self.segment_size = segment_size
        self._mapped_max = mapped_max
        self._whole = whole
        self._static = static
        self._resident_bytes_max = resident_bytes_max
        self._maps: OrderedDict[int, tuple[mmap.mmap, NDArray[np.uint8]]] = OrderedDict()
        # Numbers of the PAGES_AROUND_BYTES blocks of the log that may be resident.
        self._resident: set[int] = set()
        self._requested_to = 0

    def starts(self) -> list[int]:
        """Offsets of the existing segments, ascending; other file names are ignored."""
        found = (segment_start(name) for name in self.io.names(self.folder))
        return [start for start in found if start is not None]

    def start_of(self, physical_offset: int) -> int:
        """Start of the segment that holds an offset."""
        return physical_offset - physical_offset % self.segment_size

    def path(self, start: int) -> Path:
        return self.folder / segment_name(start)

    def view(self, start: int) -> NDArray[np.uint8]:
        """uint8[segment size], mapped read-only. Raises CorruptStoreError if short and `whole`."""
        found = self._maps.get(start)
        if found is None:
            found = self._map(start)
        self._maps.move_to_end(start)
        return found[1]

    @property
    def resident_bytes(self) -> int:
        """Upper bound of the log's bytes that are resident in this process."""
        return len(self._resident) * PAGES_AROUND_BYTES

    def note_read(self, position: int, size: int = 1) -> None:
        """Report a read of [position, position + size), which may drop all resident pages.

        Blocks that several readers touch, such as the interleaved queues of a topic, count once.
        """
        if size <= self._resident_bytes_max:
            first, last = position // PAGES_AROUND_BYTES, (position + max(size, 1) - 1) // PAGES_AROUND_BYTES
            if first != last or first not in self._resident:
                self._resident.update(range(first, last + 1))
                self._limit_resident()
        else:
            self.drop_all_pages()

    def note_reads(self, positions: NDArray[np.int64]) -> None:
        """Report reads of record headers at scattered positions."""
        self._resident.update((positions // PAGES_AROUND_BYTES).tolist())
        self._limit_resident()

    def _limit_resident(self) -> None:
        if self.resident_bytes > self._resident_bytes_max:
            self.drop_all_pages()

    def read_ahead(self, position: int, stop: int) -> None:
        """Start reading the log after `position` from disk, for a sequential scan up to `stop`.

        One call does not cross the end of the segment.
        """
        first = self._requested_to if position <= self._requested_to <= position + AHEAD_BYTES else position
        base = self.start_of(first)
        last = min(position + AHEAD_BYTES, base + self.segment_size, stop)
        if first - position >= AHEAD_BYTES // 2 or first >= last:
            return
        with contextlib.suppress(FileNotFoundError), self.io.opened(self.path(base)) as fd:
            self.io.read_ahead(fd, first - base, last - first)
            self._requested_to = last

    def drop_pages(self, start: int, offset: int, size: int) -> None:
        """Unmap the resident pages of [offset, offset + size) of the segment at `start`."""
        found = self._maps.get(start)
        if found is not None and size > 0:
            self.io.release_pages(found[0], offset, size)

    def drop_all_pages(self) -> None:
        """Unmap all resident pages; the views stay valid and fault them in again."""
        for mapping, _view in self._maps.values():
            self.io.release_pages(mapping, 0, len(mapping))
        self._resident.clear()

    def forget_below(self, physical_offset: int) -> None:
        """Drop the mappings of segments that end at or below an offset; used views stay valid."""
        for start in [start for start in self._maps if start + self.segment_size <= physical_offset]:
            del self._maps[start]

    def close(self) -> None:
        """Drop all mappings; the memory is released with the last view."""
        self._maps.clear()

    def _map(self, start: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
        with self.io.opened(self.path(start)) as fd:
            # Reading a mapped page beyond the end of the file raises SIGBUS.
            size = min(self.io.size(fd), self.segment_size)
            if size < self.segment_size and self._whole:
                raise CorruptStoreError(f"{self.path(start)}: {size:,} bytes; a segment has {self.segment_size:,}")
            # An empty file cannot be mapped.
            map_file = self.io.map_without_filling_holes if self._static else self.io.map
            mapping = map_file(fd, size) if size else self.io.shared_memory(mmap.PAGESIZE)
        while len(self._maps) >= self._mapped_max:
            self._maps.popitem(last=False)
        self._maps[start] = mapping, as_kernel_array(mapping, size)
        return self._maps[start]


def adopted_segment_size(io: StoreIO, folder: Path, configured: int) -> int:
    """Segment size of an existing log: the most common fitting length, else the configured one.

    If no file's length fits its name, the distance between the names decides, so that missing, short or oversized
    files do not mislead.
    """
    files = [(segment_start(entry.name), entry.size) for entry in io.entries(folder) if entry.kind is Kind.FILE]
    starts = [start for start, _size in files if start is not None]
    whole = Counter(size for start, size in files if start is not None and _fits(start, size))
    if whole:
        fitting = {size: sum(start % size == 0 for start in starts) for size in whole}
        return max(whole, key=lambda size: (whole[size], fitting[size], size == configured, size))
    if 2 * sum(start % configured == 0 for start in starts) >= len(starts):
        return configured
    return min(later - earlier for earlier, later in itertools.pairwise(starts)) if len(starts) > 1 else configured


def _fits(start: int, size: int) -> bool:
    """Whether a segment that begins at `start` may have this size."""
    return 0 < size <= SPARSE_FILE_BYTES_MAX and size % mmap.PAGESIZE == 0 and start % size == 0


# Search in a segment with sparse or damaged content

# A following record is usually near. The end of the written range is not queried: that may cost the file system a look
# at every page up to it.
_SEARCH_BYTES: Final = 256 << 10


def written_ranges(io: StoreIO, fd: int, position: int, limit: int) -> Iterator[tuple[int, int]]:
    """Small ranges (start, stop) that cover everything written in [position, limit), ascending."""
    while position < limit and (data := io.next_data(fd, position)) is not None:
        # The first bytes of a record's size are zeros and may lie in a hole.
        start, stop = max(position, data - record.MAGIC), min(data + _SEARCH_BYTES, limit)
        if start < stop:
            yield start, stop
        position = stop


def find_record_in(
    ranges: Iterable[tuple[int, int]], view: NDArray[np.uint8], base: int, out: NDArray[np.int64]
) -> int:
    """Position of the first record or BLANK in the ranges (`scan.find_record`), −1 without any."""
    for start, stop in ranges:
        # max() takes half the time of any().
        if not view[start:stop].max(initial=0):
            # All zeros. No magic begins with a zero byte, so a record can only begin where its magic follows the range.
            start = max(start, stop - record.MAGIC)
        at = int(scan.find_record(view, start, stop, base, out))
        if at >= 0:
            return at
    return -1


def scan_piece(view: NDArray[np.uint8], at: int, stop: int, base: int, piece_bytes: int, out: NDArray[np.int64]) -> int:
    """Run `scan.scan_records` over a piece of view[at:stop], at least one record."""
    reason = int(scan.scan_records(view, at, min(at + piece_bytes, stop), base, record_check.VERIFY_ALL, out))
    if reason == record_check.REACHED_STOP and out[scan.STOPPED_AT] == at:
        # The record is longer than a piece, or crosses `stop`: it belongs to the piece in which it begins.
        size = int(record_size(view, at, len(view)))
        reason = int(scan.scan_records(view, at, at + size, base, record_check.VERIFY_ALL, out))
    return reason
