"""Consecutive mapped files: lookup by offset, mapped size, and readers of deleted files."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout.record_codec import decode_records
from mqproc.paths import StorePaths
from mqproc.store.commitlog.flush import CommitLogFlush, make_segment
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.cooperative import finish
from mqproc.store.read.records import Conditions, LogRecords, Visible
from tests.support.fakes import FaultyIO
from tests.support.store_builders import EVERYTHING, Engine, LiveStore

SIZE = 1024
APPEND = 16


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    found = StorePaths(tmp_path)
    for folder in (found.commit_log, found.own):
        StoreIO().make_folder(folder)
    return found


def row(paths: StorePaths, starts: Sequence[int], size: int = SIZE) -> LogSegments:
    """Files of `size` bytes, filled by appends of 16 bytes that contain their own offset."""
    io = StoreIO()
    segments = LogSegments(io, paths.commit_log, size)
    for start in starts:
        make_segment(io, paths, start, size)
        fd = io.open(segments.path(start), write=True)
        for at in range(0, size, APPEND):
            io.pwrite(fd, b"%016d" % (start + at), at)
        io.close(fd)
    return segments


def there(segments: LogSegments, offset: int) -> bytes:
    """The append at an offset."""
    place = offset % SIZE - offset % APPEND
    return segments.view(segments.start_of(offset))[place : place + APPEND].tobytes()


@pytest.mark.parametrize(
    ("offset", "start"), [(0, 0), (100, 0), (1024, 1024), (1124, 1024), (2048, 2048), (2148, 2048)]
)
def test_offset_is_found_in_its_file(paths: StorePaths, offset: int, start: int) -> None:
    segments = row(paths, range(0, 4 * SIZE, SIZE))
    assert segments.start_of(offset) == start
    assert there(segments, offset) == b"%016d" % (offset - offset % APPEND)


def test_offset_after_last_file_is_not_found(paths: StorePaths) -> None:
    segments = row(paths, range(0, 4 * SIZE, SIZE))
    assert there(segments, 4095) == b"%016d" % 4080
    with pytest.raises(FileNotFoundError):
        segments.view(segments.start_of(4096))


def test_appends_of_1024_times_16_bytes_make_16_files(paths: StorePaths) -> None:
    segments = row(paths, range(0, 1024 * APPEND, SIZE))
    assert len(segments.starts()) == 16
    assert [there(segments, offset) for offset in range(0, 1024 * APPEND, APPEND)] == [
        b"%016d" % offset for offset in range(0, 1024 * APPEND, APPEND)
    ]


def test_offset_below_first_file_is_not_found(paths: StorePaths) -> None:
    segments = row(paths, range(SIZE, 4 * SIZE, SIZE))
    records = LogRecords(segments, lambda: Visible(0, 4 * SIZE))
    assert records.segment(0) is None
    assert records.segment(123) is None
    found = records.segment(1025)
    assert found is not None
    assert found[0] == 1024
    assert segments.starts()[0] == 1024


def test_reader_below_first_file_begins_in_it(tmp_path: Path) -> None:
    store = LiveStore(tmp_path, mapped_file_size_commit_log=1024, enabled_append_prop_crc=False)
    store.append("T", [b"%3d" % number * 50 for number in range(20)], queues=1)
    store.dispatch()
    store.engine.segments.path(0).unlink()
    store.engine.words[words_of.MIN_PHYSICAL_OFFSET] = 1024
    for offset in (-1, 0, 123, 1024):
        found = finish(
            store.reading.scan(Conditions(), offset, max_messages=1, max_bytes=EVERYTHING, max_scan_bytes=EVERYTHING)
        )
        assert [message.physical_offset for message in decode_records(found.records[0])] == [1024]
    store.close()


def test_files_created_in_any_order_are_contiguous(paths: StorePaths) -> None:
    segments = row(paths, [3072, 0, 2048, 1024])
    assert segments.starts() == [0, 1024, 2048, 3072]
    for offset in (0, 1023, 1024, 2148, 4095):
        assert there(segments, offset) == b"%016d" % (offset - offset % APPEND)


def mapped_bytes(folder: Path) -> int:
    """Address space in which this process maps files of a folder."""
    gc.collect()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [line.split()[0].split("-") for line in lines]
    return sum(int(last, 16) - int(first, 16) for first, last in ranges)


@pytest.mark.parametrize(("mapped_max", "mapped"), [(64, 10), (4, 4)])
def test_mapped_memory_is_size_times_count_up_to_limit(paths: StorePaths, mapped_max: int, mapped: int) -> None:
    size = 4096
    row(paths, range(0, 10 * size, size), size)
    segments = LogSegments(StoreIO(), paths.commit_log, size, mapped_max)
    assert mapped_bytes(paths.commit_log) == 0
    for start in segments.starts():
        segments.view(start)
    assert mapped_bytes(paths.commit_log) == mapped * size
    segments.close()
    assert mapped_bytes(paths.commit_log) == 0


def test_released_file_stays_for_its_holder(paths: StorePaths) -> None:
    """Read the appended data back; a closed map stays valid while a view is held."""
    segments = row(paths, [0])
    view = segments.view(0)
    assert view[:APPEND].tobytes() == b"%016d" % 0
    segments.close()
    assert mapped_bytes(paths.commit_log) == 4096
    assert view[SIZE - APPEND :].tobytes() == b"%016d" % (SIZE - APPEND)
    del view
    assert mapped_bytes(paths.commit_log) == 0


def test_deleted_file_is_readable_by_its_holder_only(paths: StorePaths) -> None:
    segments = row(paths, [0, 1024])
    view = segments.view(0)
    segments.path(0).unlink()
    segments.forget_below(1024)
    assert view[SIZE - APPEND :].tobytes() == b"%016d" % (SIZE - APPEND)
    with pytest.raises(FileNotFoundError):
        segments.view(0)
    assert segments.starts() == [1024]


def test_flush_syncs_all_files_before_position_moves(tmp_path: Path) -> None:
    """One flush syncs four files, oldest first, and only then advances the position.

    RocketMQ syncs one file per call.
    """
    io = FaultyIO()
    engine = Engine(tmp_path, io=io, mapped_file_size_commit_log=1024, flush_commit_log_least_pages=0)
    engine.append("T", [b"x" * 700] * 4)
    assert engine.segments.start_of(engine.written) == 3 * 1024
    seen: list[int] = []
    io.before_sync = lambda path: seen.append(engine.words[words_of.FLUSHER_SYNCED])
    io.tried()
    flush = CommitLogFlush(io, engine.paths, engine.options, engine.words, engine.segments, 0)
    assert flush.flush(1) == engine.written
    assert io.tried() == [f"{start:020d}" for start in (0, 1024, 2048, 3072)]
    assert seen == [0, 0, 0, 0]
    assert engine.words[words_of.FLUSHER_SYNCED] == engine.written
