"""Reading a row of segments in order: what is asked of the disk before it is needed."""

from __future__ import annotations

from pathlib import Path

from mqproc.io import StoreIO
from mqproc.paths import segment_name
from mqproc.store.segments import AHEAD_BYTES, LogSegments

SEGMENT = 3 * AHEAD_BYTES
STEP = AHEAD_BYTES // 4


class AskingIO(StoreIO):
    """Writes down which positions of the log are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def will_need(self, fd: int, offset: int, size: int) -> None:
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
