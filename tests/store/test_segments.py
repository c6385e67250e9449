"""Reading a row of segments: what is asked of the disk before it is needed, which pages stay this process's."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mqproc.io.store_io import StoreIO
from mqproc.paths import segment_name
from mqproc.store.commitlog.segments import AHEAD_BYTES, PAGES_AROUND_BYTES, RESIDENT_BYTES_MAX, LogSegments

SEGMENT = 3 * AHEAD_BYTES
STEP = AHEAD_BYTES // 4


class AskingIO(StoreIO):
    """Writes down which positions of the log are asked for, and how often pages are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self.let_go = 0

    def release_pages(self, mapping: mmap.mmap, offset: int, size: int) -> None:
        super().release_pages(mapping, offset, size)
        self.let_go += 1

    def read_ahead(self, fd: int, offset: int, size: int) -> None:
        start = int(Path(self.path_of(fd)).name) + offset
        self.asked.append((start, start + size))


def log(tmp_path: Path, *numbers: int) -> tuple[AskingIO, LogSegments]:
    for number in numbers:
        (tmp_path / segment_name(number * SEGMENT)).touch()
    io = AskingIO()
    return io, LogSegments(io, tmp_path, SEGMENT)


def test_each_byte_is_asked_for_once_and_before_it_is_read(tmp_path: Path) -> None:
    io, segments = log(tmp_path, 0, 1)
    stop = 2 * SEGMENT - 1000
    for position in range(0, stop, STEP):
        segments.read_ahead(position, stop)
        assert io.asked[-1][1] >= min(position + STEP, stop)
    assert [start for start, _stop in io.asked] == [0, *(end for _start, end in io.asked[:-1])]
    assert io.asked[-1][1] == stop
    assert all((start // SEGMENT) == (end - 1) // SEGMENT and end - start <= AHEAD_BYTES for start, end in io.asked)


def test_after_a_jump_it_goes_on_there(tmp_path: Path) -> None:
    io, segments = log(tmp_path, 0, 2)
    segments.read_ahead(100, 3 * SEGMENT)
    segments.read_ahead(SEGMENT, 3 * SEGMENT)
    segments.read_ahead(2 * SEGMENT + 5, 2 * SEGMENT + 50)
    segments.read_ahead(100, 3 * SEGMENT)
    assert io.asked == [
        (100, 100 + AHEAD_BYTES),
        (2 * SEGMENT + 5, 2 * SEGMENT + 50),
        (100, 100 + AHEAD_BYTES),
    ]


def mapped(tmp_path: Path) -> tuple[AskingIO, LogSegments]:
    """A log of one segment, whose pages can be let go."""
    with (tmp_path / segment_name(0)).open("wb") as file:
        file.truncate(SEGMENT)
    io, segments = log(tmp_path)
    segments.view(0)
    return io, segments


def times_until_let_go(io: AskingIO, touch: Callable[[int], None]) -> int:
    """How often one may read until pages are let go."""
    times = 0
    while not io.let_go:
        touch(times)
        times += 1
    io.let_go = 0
    return times


def test_pages_are_let_go_when_too_many_may_be_present(tmp_path: Path) -> None:
    io, segments = mapped(tmp_path)
    windows = RESIDENT_BYTES_MAX // PAGES_AROUND_BYTES
    for _ in range(2):
        assert times_until_let_go(io, lambda n: segments.note_read(n * PAGES_AROUND_BYTES)) == windows + 1
    two = 2 * PAGES_AROUND_BYTES
    assert times_until_let_go(io, lambda n: segments.note_read(n * two, two)) == windows // 2 + 1
    # Two windows each time, though it is as long as one.
    across = PAGES_AROUND_BYTES // 2
    assert (
        times_until_let_go(io, lambda n: segments.note_read(n * two + across, PAGES_AROUND_BYTES)) == windows // 2 + 1
    )
    assert times_until_let_go(io, lambda n: segments.note_read(0, RESIDENT_BYTES_MAX + 1)) == 1


def test_what_is_read_again_counts_once(tmp_path: Path) -> None:
    """As by the pulls of several queues whose records lie between each other."""
    io, segments = mapped(tmp_path)
    for _ in range(100):
        segments.note_read(1000, RESIDENT_BYTES_MAX // 2)
    assert not io.let_go
    segments.note_read(SEGMENT // 2, RESIDENT_BYTES_MAX // 2)
    assert io.let_go == 1


def test_of_records_far_apart_only_what_is_around_each_counts(tmp_path: Path) -> None:
    io, segments = mapped(tmp_path)
    far = np.arange(0, SEGMENT, 16 * PAGES_AROUND_BYTES, dtype=np.int64)
    assert len(far) * PAGES_AROUND_BYTES < RESIDENT_BYTES_MAX < far[-1]
    segments.note_reads(far)
    assert not io.let_go
    rest = RESIDENT_BYTES_MAX // PAGES_AROUND_BYTES - len(far)
    segments.note_reads(np.arange(rest + 1, dtype=np.int64) * PAGES_AROUND_BYTES + 5)
    assert not io.let_go, "every 16th counts already"
    segments.note_reads(np.arange(SEGMENT - RESIDENT_BYTES_MAX, SEGMENT, PAGES_AROUND_BYTES, dtype=np.int64))
    assert io.let_go == 1
