"""Writer takeover: unpublished records are cleared, published ones are counted."""

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
from tests.support.store_builders import Engine

TIME_MS = 1_700_000_000_000


class TakeoverIO(StoreIO):
    """Records syncs and zeroed ranges, and fails the calls named in `failing`."""

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
def io() -> TakeoverIO:
    return TakeoverIO()


@pytest.fixture
def engine(tmp_path: Path, io: TakeoverIO) -> Engine:
    engine = Engine(tmp_path, io=io)
    engine.append("T", [b"first"], TIME_MS)
    return engine


def test_append_failed_write_is_cleared_on_disk(engine: Engine, io: TakeoverIO) -> None:
    end = engine.written
    io.failing, io.synced = {"half pwrite"}, []
    with pytest.raises(DiskFullError):
        engine.append("T", [b"x" * 1000])
    assert io.synced == [f"{0:020d}"]
    assert engine.words[words_of.RESERVED_END] == end
    assert not any(engine.log_bytes(end, engine.segments.segment_size))


def test_append_failed_rollback_raises_tail_not_cleared(engine: Engine, io: TakeoverIO) -> None:
    """It must not continue: it would append among rejected bytes."""
    end = engine.written
    io.failing = {"half pwrite", "zero"}
    with pytest.raises(TailNotClearedError, match=rf"\[{end}, "):
        engine.append("T", [b"x" * 1000])
    assert engine.words[words_of.RESERVED_END] > end, "the successor must clear this range"
    assert engine.appender.end == end
    assert engine.appender.staged_bytes == 0


def test_append_failed_sync_of_rollback_makes_store_read_only(engine: Engine, io: TakeoverIO) -> None:
    end = engine.written
    io.failing = {"half pwrite", "sync"}
    with pytest.raises(FailedSyncError):
        engine.append("T", [b"x" * 1000])
    assert engine.words[words_of.WRITER_SYNC_ERRNO] == errno.EIO
    assert engine.paths.read_only.exists()
    assert not any(engine.log_bytes(end, engine.segments.segment_size))


def test_append_read_only_file_system_makes_store_read_only(engine: Engine, io: TakeoverIO) -> None:
    end = engine.written
    io.failing, io.zero_errno = {"half pwrite", "zero"}, errno.EROFS
    with pytest.raises(FailedSyncError):
        engine.append("T", [b"x" * 1000])
    assert engine.words[words_of.WRITER_SYNC_ERRNO] == errno.EROFS
    assert engine.words[words_of.RESERVED_END] > end
    take_over_store(engine)
    assert engine.written == engine.words[words_of.TABLE_AT] == end


def take_over_store(engine: Engine, *, sync_flush: bool = False) -> None:
    take_over(engine.io, engine.syncs, engine.words, engine.segments, engine.table, sync_flush=sync_flush)


def test_takeover_clears_and_syncs_unpublished_bytes(engine: Engine, io: TakeoverIO) -> None:
    end = engine.written
    engine.appender.add(engine.plan("T", [b"lost" * 100]), TIME_MS + 9)
    engine.appender.write_out()
    io.synced = []
    take_over_store(engine)
    assert io.synced == [f"{0:020d}"]
    assert engine.words[words_of.RESERVED_END] == end
    assert not any(engine.log_bytes(end, engine.segments.segment_size))


class KilledAfterOneZero(StoreIO):
    """Kills the process before a second range is zeroed."""

    zeroed = False

    def zero(self, fd: int, offset: int, size: int) -> None:
        if self.zeroed:
            raise KeyboardInterrupt
        self.zeroed = True
        super().zero(fd, offset, size)


def test_takeover_killed_leaves_no_records_after_zeros(engine: Engine) -> None:
    """Without a mark, recovery would treat zeros before a record as damage."""
    end = engine.written
    engine.appender.add(engine.plan("T", [b"lost" * 7000] * 5), TIME_MS + 9)
    engine.appender.write_out()
    last = engine.segments.start_of(engine.words[words_of.RESERVED_END] - 1)
    assert last >= 2 * engine.segments.segment_size
    with pytest.raises(KeyboardInterrupt):
        clear_unpublished(KilledAfterOneZero(), engine.syncs, engine.words, engine.segments)
    assert any(engine.segments.view(0)[end : end + 4])
    assert not any(engine.segments.view(last))


def test_takeover_restores_positions_of_published_records(engine: Engine) -> None:
    """Killed right after storing `written`: time, next offsets and `table_at` are older."""
    table_at = engine.words[words_of.TABLE_AT]
    engine.append("T", [b"x"] * 8, TIME_MS + 5)
    engine.words[words_of.TABLE_AT] = table_at
    engine.words[words_of.WRITTEN_STORE_TIMESTAMP_MS] = TIME_MS
    for number in range(4):
        engine.table.store(number, table_layout.NEXT_OFFSET, 0)
    take_over_store(engine)
    assert engine.words[words_of.WRITTEN_STORE_TIMESTAMP_MS] == TIME_MS + 5
    assert engine.words[words_of.TABLE_AT] == engine.written
    assert sum(engine.table.next_offset(number) for number in range(4)) == 9


def test_takeover_sync_flush_syncs_all_unsynced_segments(tmp_path: Path, io: TakeoverIO) -> None:
    engine = Engine(tmp_path, io=io, flush_disk_type="SYNC_FLUSH")
    engine.append("T", [b"x" * 30000] * 5, TIME_MS)
    io.synced = []
    take_over_store(engine, sync_flush=True)
    assert io.synced == [f"{start:020d}" for start in (0, 65536, 131072)]
    assert engine.words[words_of.WRITER_SYNCED] == engine.written
    assert engine.words[words_of.WRITER_SYNCED_STORE_TIMESTAMP_MS] == TIME_MS


def test_takeover_failed_sync_is_not_retried(tmp_path: Path, io: TakeoverIO) -> None:
    engine = Engine(tmp_path, io=io, flush_disk_type="SYNC_FLUSH")
    engine.append("T", [b"x"], TIME_MS)
    io.failing = {"sync"}
    take_over_store(engine, sync_flush=True)
    assert engine.words[words_of.WRITER_SYNC_ERRNO] == errno.EIO
    assert engine.paths.read_only.exists()
    io.failing, io.synced = set(), []
    take_over_store(engine, sync_flush=True)
    assert io.synced == []
    assert engine.words[words_of.WRITER_SYNCED] == 0
