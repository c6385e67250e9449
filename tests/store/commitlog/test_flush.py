"""Commit log flush: positions and marks advance after a sync, never after a failed one."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.config.options import FlushDiskType
from mqproc.io.store_io import FailedSyncError
from mqproc.ipc.control_words import Words
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.store.commitlog import flush as log_flush
from mqproc.store.commitlog.flush import CommitLogFlush
from mqproc.store.durable_marks import DurableMark, ensure_checkpoint, read_checkpoint
from mqproc.store.recovery.recovery import Recovery
from tests.support.fakes import FaultyIO
from tests.support.store_builders import Engine

SEGMENT = 65536
SECOND_NS = 1_000_000_000
TIME_MS = 1_700_000_000_001


class FlushedEngine:
    """An engine and its flusher, with a clock."""

    def __init__(self, root: Path, io: FaultyIO | None = None, **options: object) -> None:
        self.io = io or FaultyIO()
        self.engine = Engine(root, io=self.io, **options)
        ensure_checkpoint(self.io, self.engine.paths.checkpoint)
        self.words = self.engine.words
        self.now_ns = SECOND_NS
        self.flush = self.flusher()
        self.io.tried()

    def flusher(self) -> CommitLogFlush:
        engine = self.engine
        return CommitLogFlush(self.io, engine.paths, engine.options, self.words, engine.segments, self.now_ns)

    def append(self, messages: int = 10, time_ms: int = TIME_MS) -> None:
        for _ in range(messages):
            self.engine.append("T", [b"x" * 1000], time_ms)

    def turn(self) -> None:
        """Run one round of the flusher, two seconds after the previous one."""
        self.now_ns += 2 * SECOND_NS
        for step in (
            self.flush.make_segments_ahead,
            lambda: self.flush.flush(self.now_ns, thorough=True),
            lambda: self.flush.move_mark(self.now_ns),
        ):
            try:
                step()
            except FailedSyncError:
                continue

    @property
    def mark(self) -> tuple[int, int]:
        """Return (offset, store time in ms) of the mark on disk, zeros without one."""
        mark = DurableMark(self.io, self.engine.paths.mark("commitlog"), self.engine.segments).mark
        return (mark.offset, mark.store_timestamp_ms) if mark else (0, 0)

    @property
    def physic_timestamp_ms(self) -> int:
        return read_checkpoint(self.io, self.engine.paths.checkpoint).physic_timestamp_ms


@pytest.fixture
def flushing(tmp_path: Path) -> FlushedEngine:
    return FlushedEngine(tmp_path)


def test_flush_advances_position_mark_and_checkpoint(flushing: FlushedEngine) -> None:
    flushing.append()
    flushing.turn()
    assert flushing.words[words_of.FLUSHER_SYNCED] == flushing.engine.written
    assert flushing.words[words_of.COMMITLOG_MARK] == flushing.engine.written
    assert flushing.mark == (flushing.engine.written, TIME_MS)
    assert flushing.physic_timestamp_ms == TIME_MS
    tried = flushing.io.tried()
    assert tried.index("00000000000000000000") < tried.index("commitlog") < tried.index("checkpoint")


class StartingIO(FaultyIO):
    """Records the ranges whose writeback is started: (segment, offset, size)."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, int, int]] = []

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        self.started.append((Path(self.path_of(fd)).name, offset, size))
        super().start_writeback(fd, offset, size)


def test_start_writeback_passes_each_page_once_per_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_flush, "START_BYTES", 16_384)
    flushing = FlushedEngine(tmp_path, io=StartingIO())
    io = flushing.io
    assert isinstance(io, StartingIO)
    flushing.append(10)
    assert flushing.flush.start_writeback() == 0  # Too few bytes.
    flushing.append(10)
    written = flushing.engine.written
    assert flushing.flush.start_writeback() == written - written % 4096
    assert flushing.flush.start_writeback() == 0  # Already started.
    flushing.append(80)
    while flushing.flush.start_writeback():
        pass
    assert io.started[0] == ("00000000000000000000", 0, written - written % 4096)
    ends = [(int(name) + offset, int(name) + offset + size) for name, offset, size in io.started]
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ends))
    assert {name for name, _, _ in io.started} == {"00000000000000000000", "00000000000000065536"}
    assert flushing.words[words_of.FLUSHER_SYNCED] == 0
    flushing.turn()
    assert flushing.words[words_of.FLUSHER_SYNCED] == flushing.engine.written


@pytest.mark.parametrize("word", words_of.SYNC_ERRNO_WORDS)
def test_start_writeback_after_failed_sync_does_nothing(
    flushing: FlushedEngine, word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_flush, "START_BYTES", 4096)
    flushing.append()
    flushing.words[word] = errno.EIO
    assert flushing.flush.start_writeback() == 0


@pytest.mark.parametrize("word", words_of.SYNC_ERRNO_WORDS)
def test_flush_after_failed_sync_of_any_role_does_nothing(flushing: FlushedEngine, word: int) -> None:
    flushing.append()
    flushing.turn()
    before = flushing.mark
    ready_end = flushing.words[words_of.SEGMENTS_READY_END]
    flushing.append(100)
    flushing.io.tried()
    flushing.words[word] = errno.EIO
    flushing.words[words_of.SEGMENTS_READY_END] = ready_end
    for flush in (flushing.flush, flushing.flusher()):
        flushing.flush = flush
        flushing.turn()
        assert flush.move_mark(flushing.now_ns, at_once=True) is False
        assert flush.delete_unused_segments() == 0
    assert flushing.io.tried() == []
    assert flushing.mark == before
    assert flushing.words[words_of.FLUSHER_SYNCED] == before[0]
    assert flushing.words[words_of.SEGMENTS_READY_END] == ready_end


def test_flush_failed_sync_of_log_is_never_retried(flushing: FlushedEngine) -> None:
    flushing.append()
    flushing.io.failing = {"/commitlog/0": errno.EIO}
    with pytest.raises(FailedSyncError):
        flushing.flush.flush(flushing.now_ns, thorough=True)
    assert flushing.words[words_of.FLUSHER_SYNC_ERRNO] == errno.EIO
    assert flushing.words[words_of.FLUSHER_SYNCED] == 0
    assert "/commitlog/00000000000000000000" in flushing.engine.paths.read_only.read_text()
    flushing.io.failing = {}
    flushing.io.tried()
    flushing.turn()
    flushing.flush = flushing.flusher()
    flushing.turn()
    assert flushing.io.tried() == []
    assert flushing.mark == (0, 0)


def test_flush_other_role_fails_stops_before_next_segment(flushing: FlushedEngine) -> None:
    flushing.append(100)
    assert flushing.engine.written > SEGMENT
    flushing.io.tried()

    def other_role_fails(path: str) -> None:
        flushing.words[words_of.CQ_SYNC_ERRNO] = errno.EIO

    flushing.io.before_sync = other_role_fails
    with pytest.raises(FailedSyncError, match="earlier sync"):
        flushing.flush.flush(flushing.now_ns, thorough=True)
    assert flushing.io.tried() == ["00000000000000000000"]
    assert flushing.words[words_of.FLUSHER_SYNCED] == 0
    assert flushing.words[words_of.FLUSHER_SYNC_ERRNO] == 0


def test_flush_other_role_fails_keeps_position(flushing: FlushedEngine) -> None:
    flushing.append()

    def other_role_fails(path: str) -> None:
        flushing.words[words_of.INDEX_SYNC_ERRNO] = errno.EIO

    flushing.io.before_sync = other_role_fails
    assert flushing.flush.flush(flushing.now_ns, thorough=True) == 0
    assert flushing.words[words_of.FLUSHER_SYNCED] == 0


@pytest.mark.parametrize("place", ["marks/commitlog", "marks/", "checkpoint"])
def test_flush_failed_sync_of_mark_or_checkpoint_is_final(flushing: FlushedEngine, place: str) -> None:
    flushing.append()
    flushing.io.failing = {place: errno.EIO}
    flushing.flush.flush(flushing.now_ns, thorough=True)
    with pytest.raises(FailedSyncError):
        flushing.flush.move_mark(flushing.now_ns, at_once=True)
    assert flushing.words[words_of.FLUSHER_SYNC_ERRNO] == errno.EIO
    assert flushing.words[words_of.COMMITLOG_MARK] == 0
    flushing.io.failing = {}
    flushing.io.tried()
    flushing.turn()
    assert flushing.io.tried() == []


@pytest.mark.parametrize(("place", "left"), [("segment.tmp", [0]), ("commitlog/", [0, SEGMENT])])
def test_make_segments_failed_sync_is_final(flushing: FlushedEngine, place: str, left: list[int]) -> None:
    flushing.io.failing = {place: errno.EIO}
    with pytest.raises(FailedSyncError):
        flushing.flush.make_segments_ahead()
    assert flushing.words[words_of.FLUSHER_SYNC_ERRNO] == flushing.words[words_of.SEGMENT_ERRNO] == errno.EIO
    assert flushing.words[words_of.SEGMENTS_READY_END] == SEGMENT
    assert not flushing.engine.paths.next_segment.exists()
    assert flushing.engine.segments.starts() == left
    flushing.io.failing = {}
    assert flushing.flush.make_segments_ahead() == 0


def test_flush_full_disk_is_not_final(flushing: FlushedEngine) -> None:
    flushing.append()
    flushing.io.refusing = {"segment.tmp": errno.ENOSPC, "marks/commitlog": errno.ENOSPC}
    assert flushing.flush.make_segments_ahead() == 0
    assert flushing.words[words_of.SEGMENT_ERRNO] == errno.ENOSPC
    flushing.flush.flush(flushing.now_ns, thorough=True)
    with pytest.raises(OSError, match="No space left"):
        flushing.flush.move_mark(flushing.now_ns, at_once=True)
    assert not flushing.engine.paths.read_only.exists()
    flushing.io.refusing = {}
    flushing.turn()
    assert flushing.words[words_of.SEGMENT_ERRNO] == 0
    assert flushing.mark == (flushing.engine.written, TIME_MS)


def test_flush_failed_open_is_retried(flushing: FlushedEngine) -> None:
    flushing.append()
    flushing.io.refusing = {"/commitlog/0": errno.EMFILE}
    interval_ns = flushing.engine.options.flush_commit_log_thorough_interval * 1_000_000
    with pytest.raises(OSError, match="open files"):
        flushing.flush.flush(flushing.now_ns + interval_ns)
    assert flushing.words[words_of.FLUSHER_SYNC_ERRNO] == 0
    flushing.io.refusing = {}
    assert flushing.flush.flush(flushing.now_ns + interval_ns + 1) == flushing.engine.written


def test_flush_new_flusher_marks_the_last_store_time(flushing: FlushedEngine) -> None:
    """Store times of the next run continue from the mark's time."""
    flushing.append()
    flushing.turn()
    flushing.append(1, TIME_MS + 5)
    flushing.flush.flush(flushing.now_ns, thorough=True)  # Synced, then killed before the mark moved.
    flushing.flush = flushing.flusher()
    flushing.turn()
    assert flushing.mark == (flushing.engine.written, TIME_MS + 5)
    assert flushing.physic_timestamp_ms == TIME_MS + 5


def test_flush_new_flusher_without_store_time_keeps_mark_until_sync(
    flushing: FlushedEngine,
) -> None:
    flushing.append()
    flushing.turn()
    before = flushing.mark
    flushing.append(1, TIME_MS + 5)
    flushing.flush.flush(flushing.now_ns, thorough=True)
    flushing.append(1, TIME_MS + 6)
    flushing.flush = flushing.flusher()
    assert flushing.flush.move_mark(flushing.now_ns, at_once=True) is False
    assert flushing.mark == before
    flushing.turn()
    assert flushing.mark == (flushing.engine.written, TIME_MS + 6)


def test_flush_after_recovery_marks_the_last_store_time(flushing: FlushedEngine) -> None:
    flushing.append()
    recover(flushing.engine)
    flushing.flush = flushing.flusher()
    flushing.turn()
    assert flushing.mark == (flushing.engine.written, TIME_MS)
    assert flushing.physic_timestamp_ms == TIME_MS


def test_flush_sync_flush_mark_follows_the_writers_sync(tmp_path: Path) -> None:
    flushing = FlushedEngine(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    flushing.append()
    flushing.engine.appender.sync()
    synced = flushing.engine.written
    flushing.append(1, TIME_MS + 5)
    flushing.turn()
    assert flushing.mark == (synced, TIME_MS)
    assert flushing.physic_timestamp_ms == TIME_MS


class RacingWords(Words):
    """Calls `after_load` after each load of a word."""

    def __init__(self, memory: bytearray) -> None:
        super().__init__(memory)
        self.after_load: Callable[[int], None] = lambda index: None

    def __getitem__(self, index: int) -> int:
        value = super().__getitem__(index)
        self.after_load(index)
        return value


@pytest.mark.parametrize("sync_flush", [False, True])
def test_flush_concurrent_append_never_marks_a_later_time(tmp_path: Path, sync_flush: bool) -> None:
    """The writer publishes and syncs another record between any two loads of the flusher."""
    kind = FlushDiskType.SYNC_FLUSH if sync_flush else FlushDiskType.ASYNC_FLUSH
    marks = set()
    for load in range(30):
        flushing = FlushedEngine(tmp_path / f"{load}", flush_disk_type=kind)
        flushing.append()
        memory = bytearray(flushing.words.mapping)
        words = flushing.words = RacingWords(memory)
        if sync_flush:
            words[words_of.WRITER_SYNCED] = words[words_of.WRITTEN]
            words[words_of.WRITER_SYNCED_STORE_TIMESTAMP_MS] = TIME_MS
        first_end = words[words_of.WRITTEN]
        flushing.flush = flushing.flusher()
        loads = 0

        def publish(index: int, words: RacingWords = words, flushing: FlushedEngine = flushing, at: int = load) -> None:
            nonlocal loads
            loads += 1
            if loads != at + 1:
                return
            words.after_load = lambda index: None
            engine = flushing.engine
            engine.append("T", [b"y" * 1000], TIME_MS + 5)
            # The writer stores a position before its time.
            words[words_of.WRITTEN] = engine.written
            words[words_of.WRITTEN_STORE_TIMESTAMP_MS] = TIME_MS + 5
            if sync_flush:
                words[words_of.WRITER_SYNCED] = engine.written
                words[words_of.WRITER_SYNCED_STORE_TIMESTAMP_MS] = TIME_MS + 5

        words.after_load = publish
        flushing.flush.flush(flushing.now_ns, thorough=True)
        flushing.flush.move_mark(flushing.now_ns, at_once=True)
        offset, time_ms = flushing.mark
        marks.add(offset - first_end)
        if offset == first_end:
            assert time_ms == TIME_MS, f"published after load {load + 1}"
    assert len(marks) == 2
    assert min(marks) == 0


def recover(engine: Engine) -> None:
    Recovery(engine.io, engine.paths, engine.options, engine.words, lambda line: None, clean=False).run()


@pytest.mark.parametrize("blank_at_end", [False, True])
@pytest.mark.parametrize("next_exists", [False, True])
def test_recovery_marks_exactly_existing_segments_ready(
    flushing: FlushedEngine, blank_at_end: bool, next_exists: bool
) -> None:
    """The writer waits for a segment that is not ready, and fails in a missing one that is."""
    engine, words = flushing.engine, flushing.words
    flushing.append()
    end = engine.written
    if blank_at_end:
        with engine.segments.path(0).open("r+b") as file:
            file.seek(end)
            file.write((SEGMENT - end).to_bytes(4, "big") + record.MAGIC_BLANK.to_bytes(4, "big", signed=True))
        end = SEGMENT
    if next_exists:
        engine.make_segment(SEGMENT)
    recover(engine)
    assert words[words_of.WRITTEN] == end
    ready_end = words[words_of.SEGMENTS_READY_END]
    assert ready_end >= end
    assert engine.segments.starts() == list(range(0, ready_end, SEGMENT))
    flushing.flush.make_segments_ahead()
    assert words[words_of.SEGMENTS_READY_END] > ready_end
    assert engine.segments.starts() == list(range(0, words[words_of.SEGMENTS_READY_END], SEGMENT))


LARGE = 64 << 20
STEP = log_flush.RESERVED_BYTES_MIN


@pytest.mark.parametrize(("written", "free", "reserved"), [(0, 1 << 40, 1), (20, 1 << 40, 40), (20, 32 << 20, 22)])
def test_reserve_space_follows_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, free: int, reserved: int
) -> None:
    """Twice the log's length, at least a step, of a disk with little free space a sixteenth; all in MiB."""
    flushing = FlushedEngine(tmp_path, mapped_file_size_commit_log=LARGE)
    path = flushing.engine.segments.path(0)
    monkeypatch.setattr(flushing.io, "disk_usage", lambda _folder: (0, free))
    assert (flushing.io.size_of(path), flushing.io.allocated_of(path)) == (LARGE, STEP)
    flushing.words[words_of.WRITTEN] = written << 20
    flushing.flush.reserve_space()
    assert flushing.io.allocated_of(path) == max(STEP, STEP + ((reserved - written) << 20) * (written > 0))
    assert flushing.flush.reserve_space() == 0 or free < 1 << 40


def test_reserve_space_goes_on_in_the_next_segment(tmp_path: Path) -> None:
    flushing = FlushedEngine(tmp_path, mapped_file_size_commit_log=LARGE)
    flushing.words[words_of.WRITTEN] = LARGE - (1 << 20)
    flushing.flush.make_segments_ahead()
    assert flushing.flush.reserve_space() == LARGE - (1 << 20)
    allocated = [flushing.io.allocated_of(flushing.engine.segments.path(start)) for start in (0, LARGE)]
    assert allocated == [STEP + (1 << 20), LARGE - (2 << 20)]
