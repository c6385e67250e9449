"""What a writer leaves behind: nothing unpublished may come back, and its successor counts what was published."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mqproc.errors import DiskFullError
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.store.commitlog.takeover import TailNotClearedError, clear_unpublished, take_over
from tests.store.engine import Engine

TIME_MS = 1_700_000_000_000


class FaultyIO(StoreIO):
    """Counts syncs; fails the calls that are named in `failing`."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[str] = set()
        self.zero_errno = errno.EIO
        self.synced: list[str] = []
        self.zeroed: list[tuple[int, int]] = []
        self._names: dict[int, str] = {}

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        fd = super().open(path, write=write, create=create, mode=mode)
        self._names[fd] = path.name
        return fd

    def pwrite(self, fd: int, data: object, offset: int) -> None:
        if "half pwrite" in self.failing:
            self.failing.remove("half pwrite")
            super().pwrite(fd, memoryview(data)[: len(data) // 2], offset)  # type: ignore[arg-type]
            raise OSError(errno.ENOSPC, "No space left on device")
        super().pwrite(fd, data, offset)  # type: ignore[arg-type]

    def zero(self, fd: int, offset: int, size: int) -> None:
        if "zero" in self.failing:
            raise OSError(self.zero_errno, os.strerror(self.zero_errno))
        self.zeroed.append((offset, size))
        super().zero(fd, offset, size)

    def sync(self, fd: int) -> None:
        if "sync" in self.failing:
            raise OSError(errno.EIO, "Input/output error")
        self.synced.append(self._names[fd])
        super().sync(fd)


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture
def engine(tmp_path: Path, io: FaultyIO) -> Engine:
    engine = Engine(tmp_path, io=io)
    engine.append("T", [b"first"], TIME_MS)
    return engine


def test_a_failed_write_is_taken_back_on_disk_too(engine: Engine, io: FaultyIO) -> None:
    end = engine.written
    io.failing, io.synced = {"half pwrite"}, []
    with pytest.raises(DiskFullError):
        engine.append("T", [b"x" * 1000])
    assert io.synced == [f"{0:020d}"]
    assert engine.words[words_of.RESERVED_END] == end
    assert not any(engine.log_bytes(end, engine.segments.segment_size))


def test_a_writer_ends_when_it_cannot_take_back(engine: Engine, io: FaultyIO) -> None:
    """It must not go on: it would append among bytes that it refused."""
    end = engine.written
    io.failing = {"half pwrite", "zero"}
    with pytest.raises(TailNotClearedError, match=rf"\[{end}, "):
        engine.append("T", [b"x" * 1000])
    assert engine.words[words_of.RESERVED_END] > end, "the successor must know what lies there"
    assert engine.appender.end == end
    assert engine.appender.staged_bytes == 0


def test_a_store_is_read_only_when_what_was_taken_back_cannot_be_synced(engine: Engine, io: FaultyIO) -> None:
    end = engine.written
    io.failing = {"half pwrite", "sync"}
    with pytest.raises(FailedSyncError):
        engine.append("T", [b"x" * 1000])
    assert engine.words[words_of.WRITER_SYNC_ERRNO] == errno.EIO
    assert engine.paths.read_only.exists()
    assert not any(engine.log_bytes(end, engine.segments.segment_size))


def test_a_file_system_that_is_read_only_by_now_makes_the_store_so_and_ends_no_writer(
    engine: Engine, io: FaultyIO
) -> None:
    end = engine.written
    io.failing, io.zero_errno = {"half pwrite", "zero"}, errno.EROFS
    with pytest.raises(FailedSyncError):
        engine.append("T", [b"x" * 1000])
    assert engine.words[words_of.WRITER_SYNC_ERRNO] == errno.EROFS
    assert engine.words[words_of.RESERVED_END] > end
    _take_over(engine)
    assert engine.written == engine.words[words_of.TABLE_AT] == end


def _take_over(engine: Engine, *, sync_flush: bool = False) -> None:
    take_over(engine.io, engine.syncs, engine.words, engine.segments, engine.table, sync_flush=sync_flush)


def test_a_successor_clears_what_was_reserved_and_syncs_it(engine: Engine, io: FaultyIO) -> None:
    end = engine.written
    engine.appender.add(engine.plan("T", [b"lost" * 100]), TIME_MS + 9)
    engine.appender.write_out()
    io.synced = []
    _take_over(engine)
    assert io.synced == [f"{0:020d}"]
    assert engine.words[words_of.RESERVED_END] == end
    assert not any(engine.log_bytes(end, engine.segments.segment_size))


class KilledAfterOneZero(StoreIO):
    """The process ends before a second range is zeroed."""

    zeroed = False

    def zero(self, fd: int, offset: int, size: int) -> None:
        if self.zeroed:
            raise KeyboardInterrupt
        self.zeroed = True
        super().zero(fd, offset, size)


def test_a_successor_that_is_killed_leaves_no_records_behind_zeros(engine: Engine) -> None:
    """Without a mark a start would take the zeros for damage."""
    end = engine.written
    engine.appender.add(engine.plan("T", [b"lost" * 7000] * 5), TIME_MS + 9)
    engine.appender.write_out()
    last = engine.segments.start_of(engine.words[words_of.RESERVED_END] - 1)
    assert last >= 2 * engine.segments.segment_size
    with pytest.raises(KeyboardInterrupt):
        clear_unpublished(KilledAfterOneZero(), engine.syncs, engine.words, engine.segments)
    assert any(engine.segments.view(0)[end : end + 4])
    assert not any(engine.segments.view(last))


def test_a_successor_counts_what_was_published(engine: Engine) -> None:
    """Killed right behind the store of `written`: time, next offsets and `table_at` are those of the step before."""
    table_at = engine.words[words_of.TABLE_AT]
    engine.append("T", [b"x"] * 8, TIME_MS + 5)
    engine.words[words_of.TABLE_AT] = table_at
    engine.words[words_of.WRITTEN_STORE_TIMESTAMP_MS] = TIME_MS
    for number in range(4):
        engine.table.store(number, table_layout.NEXT_OFFSET, 0)
    _take_over(engine)
    assert engine.words[words_of.WRITTEN_STORE_TIMESTAMP_MS] == TIME_MS + 5
    assert engine.words[words_of.TABLE_AT] == engine.written
    assert sum(engine.table.next_offset(number) for number in range(4)) == 9


def test_a_successor_syncs_every_segment_that_was_not(tmp_path: Path, io: FaultyIO) -> None:
    engine = Engine(tmp_path, io=io, flush_disk_type="SYNC_FLUSH")
    engine.append("T", [b"x" * 30000] * 5, TIME_MS)
    io.synced = []
    _take_over(engine, sync_flush=True)
    assert io.synced == [f"{start:020d}" for start in (0, 65536, 131072)]
    assert engine.words[words_of.WRITER_SYNCED] == engine.written
    assert engine.words[words_of.WRITER_SYNCED_STORE_TIMESTAMP_MS] == TIME_MS


def test_a_failed_sync_is_not_tried_again_by_the_successor(tmp_path: Path, io: FaultyIO) -> None:
    engine = Engine(tmp_path, io=io, flush_disk_type="SYNC_FLUSH")
    engine.append("T", [b"x"], TIME_MS)
    io.failing = {"sync"}
    _take_over(engine, sync_flush=True)
    assert engine.words[words_of.WRITER_SYNC_ERRNO] == errno.EIO
    assert engine.paths.read_only.exists()
    io.failing, io.synced = set(), []
    _take_over(engine, sync_flush=True)
    assert io.synced == []
    assert engine.words[words_of.WRITER_SYNCED] == 0
