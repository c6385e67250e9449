"""Segments: read-ahead, resident pages, and the search for a record."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mqproc.io.store_io import StoreIO
from mqproc.kernels import scan
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.paths import segment_name
from mqproc.store.commitlog.segments import (
    AHEAD_BYTES,
    PAGES_AROUND_BYTES,
    RESIDENT_BYTES_MAX,
    LogSegments,
    find_record_in,
)
from tests.support.records import BASE, small_log

SEGMENT = 3 * AHEAD_BYTES
STEP = AHEAD_BYTES // 4


class ReadAheadIO(StoreIO):
    """Records the requested ranges of the log, and counts releases of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[tuple[int, int]] = []
        self.released = 0

    def release_pages(self, mapping: mmap.mmap, offset: int, size: int) -> None:
        super().release_pages(mapping, offset, size)
        self.released += 1

    def read_ahead(self, fd: int, offset: int, size: int) -> None:
        start = int(Path(self.path_of(fd)).name) + offset
        self.requested.append((start, start + size))


def log(tmp_path: Path, *numbers: int) -> tuple[ReadAheadIO, LogSegments]:
    for number in numbers:
        (tmp_path / segment_name(number * SEGMENT)).touch()
    io = ReadAheadIO()
    return io, LogSegments(io, tmp_path, SEGMENT)


def test_read_ahead_requests_each_byte_once_before_its_use(tmp_path: Path) -> None:
    io, segments = log(tmp_path, 0, 1)
    stop = 2 * SEGMENT - 1000
    for position in range(0, stop, STEP):
        segments.read_ahead(position, stop)
        assert io.requested[-1][1] >= min(position + STEP, stop)
    assert [start for start, _stop in io.requested] == [0, *(end for _start, end in io.requested[:-1])]
    assert io.requested[-1][1] == stop
    assert all((start // SEGMENT) == (end - 1) // SEGMENT and end - start <= AHEAD_BYTES for start, end in io.requested)


def test_read_ahead_after_a_jump_continues_there(tmp_path: Path) -> None:
    io, segments = log(tmp_path, 0, 2)
    segments.read_ahead(100, 3 * SEGMENT)
    segments.read_ahead(SEGMENT, 3 * SEGMENT)
    segments.read_ahead(2 * SEGMENT + 5, 2 * SEGMENT + 50)
    segments.read_ahead(100, 3 * SEGMENT)
    assert io.requested == [
        (100, 100 + AHEAD_BYTES),
        (2 * SEGMENT + 5, 2 * SEGMENT + 50),
        (100, 100 + AHEAD_BYTES),
    ]


def mapped(tmp_path: Path) -> tuple[ReadAheadIO, LogSegments]:
    """Map a log of one segment."""
    with (tmp_path / segment_name(0)).open("wb") as file:
        file.truncate(SEGMENT)
    io, segments = log(tmp_path)
    segments.view(0)
    return io, segments


def times_until_released(io: ReadAheadIO, touch: Callable[[int], None]) -> int:
    """Return after how many reads pages are released."""
    times = 0
    while not io.released:
        touch(times)
        times += 1
    io.released = 0
    return times


def test_note_read_releases_pages_above_resident_limit(tmp_path: Path) -> None:
    io, segments = mapped(tmp_path)
    windows = RESIDENT_BYTES_MAX // PAGES_AROUND_BYTES
    for _ in range(2):
        assert times_until_released(io, lambda n: segments.note_read(n * PAGES_AROUND_BYTES)) == windows + 1
    two = 2 * PAGES_AROUND_BYTES
    assert times_until_released(io, lambda n: segments.note_read(n * two, two)) == windows // 2 + 1
    # A range as long as a window that touches two.
    across = PAGES_AROUND_BYTES // 2
    assert (
        times_until_released(io, lambda n: segments.note_read(n * two + across, PAGES_AROUND_BYTES)) == windows // 2 + 1
    )
    assert times_until_released(io, lambda n: segments.note_read(0, RESIDENT_BYTES_MAX + 1)) == 1


def test_note_read_same_pages_count_once(tmp_path: Path) -> None:
    """Pulls of several queues read interleaved records."""
    io, segments = mapped(tmp_path)
    for _ in range(100):
        segments.note_read(1000, RESIDENT_BYTES_MAX // 2)
    assert not io.released
    segments.note_read(SEGMENT // 2, RESIDENT_BYTES_MAX // 2)
    assert io.released == 1


def test_note_reads_distant_records_count_their_windows(tmp_path: Path) -> None:
    io, segments = mapped(tmp_path)
    far = np.arange(0, SEGMENT, 16 * PAGES_AROUND_BYTES, dtype=np.int64)
    assert len(far) * PAGES_AROUND_BYTES < RESIDENT_BYTES_MAX < far[-1]
    segments.note_reads(far)
    assert not io.released
    rest = RESIDENT_BYTES_MAX // PAGES_AROUND_BYTES - len(far)
    segments.note_reads(np.arange(rest + 1, dtype=np.int64) * PAGES_AROUND_BYTES + 5)
    assert not io.released, "every 16th window is counted already"
    segments.note_reads(np.arange(SEGMENT - RESIDENT_BYTES_MAX, SEGMENT, PAGES_AROUND_BYTES, dtype=np.int64))
    assert io.released == 1


# Search for a record

SEARCHED_BYTES = 1 << 16
RANGE_BYTES = 4096


def segment_with_record_at(at: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Build a segment of zeros with one record at `at`."""
    log = small_log(1, base=BASE + at)
    place, size = log.places[0]
    assert place == 0
    view = np.zeros(SEARCHED_BYTES, np.uint8)
    view[at : at + size] = np.frombuffer(log.segment[:size], np.uint8)
    return as_kernel_array(view)


@pytest.mark.parametrize("at", [0, 1, *range(3 * RANGE_BYTES - 8, 3 * RANGE_BYTES + 9), SEARCHED_BYTES - 2000])
def test_find_record_in_zeros_returns_its_offset(at: int) -> None:
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    view = segment_with_record_at(at)
    ranges = [(start, start + RANGE_BYTES) for start in range(0, SEARCHED_BYTES, RANGE_BYTES)]
    assert find_record_in(ranges, view, BASE, out) == scan.find_record(view, 0, SEARCHED_BYTES, BASE, out) == at


def test_find_record_in_empty_range_returns_minus_one() -> None:
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    view = segment_with_record_at(0)
    assert find_record_in([(5, 5), (SEARCHED_BYTES, SEARCHED_BYTES)], view, BASE, out) == -1


def test_find_record_in_zeros_skips_them() -> None:
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    view = as_kernel_array(np.zeros(SEARCHED_BYTES, np.uint8))
    searched = 0

    def find(view: Any, start: int, stop: int, base: int, out: Any) -> int:
        nonlocal searched
        searched += stop - start
        return -1

    with mock.patch.object(scan, "find_record", find):
        assert find_record_in([(0, SEARCHED_BYTES // 2), (SEARCHED_BYTES // 2, SEARCHED_BYTES)], view, BASE, out) == -1
    assert searched < 16
