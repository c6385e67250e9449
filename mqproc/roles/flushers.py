"""Flusher roles: make log, ConsumeQueues and index durable and move their marks.

commitlog-flusher  syncs the log, moves its mark, allocates segments ahead of the writer
cq-flusher         syncs ConsumeQueue files; a `DispatchFlusher`
index-flusher      syncs index files; a full file at once; a `DispatchFlusher`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.counters import Histogram
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control, histograms, index_file
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.histograms import HistogramLayout
from mqproc.paths import index_name_time_ms, segment_name
from mqproc.roles.role import RoleContext
from mqproc.roles.role_log import get_logger
from mqproc.store import checkpoint as checkpoint_file
from mqproc.store.commitlog.flush import CommitLogFlush
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFlush
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.durable_marks import DurableMark
from mqproc.store.index.files import IndexFlush, committed_state
from mqproc.store.sync_guard import SyncGuard
from mqproc.util.units import LARGE_PAGE_BYTES, MIB, PAGE_BYTES

# Drop cached pages of queue and index files that are as old as dropped log pages.
#
# A growing file takes a fresh page for each 4 KiB. On a virtual machine with memory ballooning a fresh page costs more
# than writing to it, so pages that are unlikely to be read again are returned for reuse. Only synced pages are dropped;
# later reads come from disk.
#
# The distance is measured in bytes of the log (`page_cache_behind_bytes`): each object records the positions in its
# files for a dispatch position, and drops the pages below them once dispatch has advanced by that distance.


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


NS_PER_MS: Final = 1_000_000
# After a pass that synced this much, writeback is started in small pieces at this interval instead of once a pass.
BUSY_BYTES: Final = 32 * MIB
START_WRITING_EVERY_S: Final = 0.02
THOROUGH_PASSES_AT_STOP: Final = 3
EVERYTHING: Final = 0
"""Value of `least_pages` that syncs every dirty page."""


class FlushErrors:
    """Error handling of a flusher's step: `with FlushErrors(context): …`.

    A failed sync is final: it is logged and the control file records it. After any other error (no space for a mark,
    no free descriptor) nothing counts as synced and the next step retries. No step follows while stopping, so the error
    is raised.
    """

    def __init__(self, context: RoleContext, *, stopping: bool = False) -> None:
        self._heartbeat = context.heartbeat
        self._stopping = stopping

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, OSError):
            return False
        final = isinstance(error, FailedSyncError)
        if self._stopping and not final:
            return False
        self._heartbeat.failed()
        what = "sync failed, the store is read-only from now on" if final else "flush failed, retrying"
        get_logger().error(what, error=str(error))
        return True


class CommitLogFlusher:
    """The commitlog-flusher. It runs at its interval, and when the writer needs a segment."""

    name = control.COMMITLOG_FLUSHER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        segments = LogSegments(context.io, context.paths.commit_log, context.options.mapped_file_size_commit_log)
        self._flush = CommitLogFlush(
            context.io, context.paths, context.options, self._words, segments, self._clock.monotonic_ns()
        )
        self._times = Histogram(self._words, histograms.LOG_FLUSHES)
        self._due_ns = 0
        self._busy = False
        self._interval_ns = context.options.flush_interval_commit_log * NS_PER_MS

    def do_work(self) -> int:
        done = 0
        with FlushErrors(self._context):
            done += self._make_segments()
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + self._interval_ns
            with FlushErrors(self._context):
                done += self._pass(now_ns, thorough=False)
            self._release_page_cache()
        elif self._busy:
            with FlushErrors(self._context):
                self._flush.start_writeback()
        return done

    def wait(self, timeout_s: float) -> None:
        until_due_s = max(0.0, (self._due_ns - self._clock.monotonic_ns()) / 1e9)
        if self._busy:
            until_due_s = min(until_due_s, START_WRITING_EVERY_S)
        self._context.bell.wait(min(timeout_s, until_due_s))

    def on_stop(self) -> bool:
        """Sync everything, move the mark, delete unused segments."""
        with FlushErrors(self._context, stopping=True):
            self._pass(self._clock.monotonic_ns(), thorough=True)
            self._flush.move_mark(self._clock.monotonic_ns(), at_once=True)
            self._flush.delete_unused_segments()
        return True

    def reload(self, options: Options) -> None:
        """Apply `flush_interval_commit_log`."""
        self._interval_ns = options.flush_interval_commit_log * NS_PER_MS
        self._due_ns = 0

    def close(self) -> None:
        """Nothing is kept open between steps."""

    def _make_segments(self) -> int:
        size = self._context.options.mapped_file_size_commit_log
        if self._words[control.SEGMENTS_READY_END] > self._words[control.RESERVED_END] + size:
            return 0
        with self._context.heartbeat.busy(control.STATE_ALLOCATING):
            return self._flush.make_segments_ahead()

    def _pass(self, now_ns: int, *, thorough: bool) -> int:
        words = self._words
        written = words[control.WRITTEN]
        with self._context.heartbeat.busy(control.STATE_SYNCING):
            done = self._flush.flush(now_ns, thorough=thorough)
            self._busy = done >= BUSY_BYTES
            after_ns = self._clock.monotonic_ns()
            self._flush.move_mark(now_ns)
        words.add(control.COMMITLOG_PASSES, 1)
        words[control.COMMITLOG_PASS_NS] = after_ns
        if self._context.control.flushed >= written:
            # Unflushed bytes were written after this pass began, which bounds their age.
            words[control.ALL_FLUSHED_NS] = now_ns
        if done:
            words[control.COMMITLOG_SYNCED_NS] = after_ns
            words.add(control.COMMITLOG_SYNC_US, (after_ns - now_ns) // 1000)
            self._times.observe(after_ns - now_ns)
        return 1 if done else 0

    def _release_page_cache(self) -> None:
        while self._flush.drop_pages():
            self._context.heartbeat.beat_if_due()


@dataclass(frozen=True, slots=True)
class FlusherWords:
    """Control words of a DispatchFlusher: marks, counters and the histogram of its passes."""

    sync_errno: int
    synced: int
    syncs: int
    passes: int
    pass_ns: int
    forced_passes: int
    forced_ns: int
    durations: HistogramLayout


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Outcome of one pass over the files."""

    synced_files: int
    complete: bool
    """Whether everything that was dispatched before the pass is durable now."""
    mark_checkpoint: Mapping[int, int]
    """Checkpoint words that are stored with the mark."""
    checkpoint: Mapping[int, int]
    """Checkpoint words that are stored whether or not the mark moves."""


class FlushedFiles(Protocol):
    """The files that a DispatchFlusher syncs."""

    def is_urgent(self) -> bool:
        """Whether everything must be synced now, regardless of the interval."""
        ...

    def flush(self, least_pages: int, timestamp_ms: int) -> FlushResult | None:
        """Sync files with `least_pages` dirty pages; None to retry the pass. Raises OSError."""
        ...

    def release_page_cache(self, dispatched: int) -> None:
        """Release pages that consumers no longer read."""
        ...

    def close(self) -> None:
        """Close open files."""
        ...


class DispatchFlusher:
    """Syncs files that the dispatcher has written: the cq-flusher and the index-flusher.

    A pass every `flush_interval_consume_queue` covers files with `flush_consume_queue_least_pages` dirty pages or more;
    one in `flush_consume_queue_thorough_interval` covers everything; three thorough passes run at stop. RocketMQ has no
    separate intervals for the index.
    """

    def __init__(
        self, context: RoleContext, words: FlusherWords, mark: str, syncs: SyncGuard, files: FlushedFiles
    ) -> None:
        """`mark` is the name of the durable mark that follows the passes."""
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._at = words
        self._files = files
        options, io, paths = context.options, context.io, context.paths
        self._least_pages = options.flush_consume_queue_least_pages
        self._interval_ns = options.flush_interval_consume_queue * NS_PER_MS
        self._thorough_ns = options.flush_consume_queue_thorough_interval * NS_PER_MS
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        self._syncs = syncs
        self._mark = DurableMark(io, paths.mark(mark), segments, self._syncs)
        now_ns = self._clock.monotonic_ns()
        self._due_ns = now_ns + self._interval_ns
        self._forced_ns = now_ns
        self._stop_passes = THOROUGH_PASSES_AT_STOP
        self._durations = Histogram(self._words, words.durations)

    @property
    def name(self) -> str:
        return self._context.name

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        urgent = self._files.is_urgent()
        if not urgent:
            if now_ns < self._due_ns:
                return 0
            self._due_ns = now_ns + self._interval_ns
        forced = urgent or now_ns - self._forced_ns >= self._thorough_ns
        with FlushErrors(self._context):
            return self._pass(EVERYTHING if forced else self._least_pages, now_ns)
        return 0

    def wait(self, timeout_s: float) -> None:
        until_due_s = max(0.0, (self._due_ns - self._clock.monotonic_ns()) / 1e9)
        self._context.bell.wait(min(timeout_s, until_due_s))

    def on_stop(self) -> bool:
        with FlushErrors(self._context, stopping=True):
            self._pass(EVERYTHING, self._clock.monotonic_ns())
        self._stop_passes -= 1
        return self._stop_passes == 0

    def close(self) -> None:
        self._files.close()

    def _pass(self, least_pages: int, now_ns: int) -> int:
        words, at = self._words, self._at
        if self._syncs.has_failed():
            return 0
        # Read before the pass, the timestamp before its position: everything below them is in the files already.
        timestamp_ms = words[control.DISPATCHED_STORE_TIMESTAMP_MS]
        dispatched = words[control.DISPATCHED]
        synced_files = self._flush(least_pages, dispatched, timestamp_ms)
        words[at.pass_ns] = self._clock.monotonic_ns()
        if synced_files is None:
            return 0
        if synced_files:
            self._durations.observe(self._clock.monotonic_ns() - now_ns)
        words.add(at.syncs, synced_files)
        words.add(at.passes, 1)
        if least_pages == EVERYTHING:
            self._forced_ns = now_ns
            words.add(at.forced_passes, 1)
            words[at.forced_ns] = now_ns
        return synced_files

    def _flush(self, least_pages: int, dispatched: int, timestamp_ms: int) -> int | None:
        with self._context.heartbeat.busy(control.STATE_SYNCING):
            done = self._files.flush(least_pages, timestamp_ms)
            if done is None:
                return None
            # Another role's sync may have failed during the pass.
            if not self._syncs.has_failed():
                self._store_checkpoint(done.checkpoint)
                if done.complete:
                    self._move_mark(dispatched, timestamp_ms, done.mark_checkpoint)
        self._files.release_page_cache(dispatched)
        return done.synced_files

    def _move_mark(self, dispatched: int, timestamp_ms: int, checkpoint: Mapping[int, int]) -> None:
        """Publish the durable position, after the checkpoint words that go with it."""
        # The log itself may be durable only up to a lower position: after a power loss the mark must not exceed it.
        position = min(dispatched, self._context.control.flushed)
        if position != self._words[self._at.synced] and self._mark.move(position, timestamp_ms):
            self._store_checkpoint(checkpoint)
            self._words[self._at.synced] = position

    def _store_checkpoint(self, words: Mapping[int, int]) -> None:
        if words:
            checkpoint_file.store_words(self._context.io, self._context.paths.checkpoint, words, self._syncs)


class _QueueFiles:
    """ConsumeQueue files."""

    def __init__(self, context: RoleContext, syncs: SyncGuard) -> None:
        options, io, paths = context.options, context.io, context.paths
        self._table = QueueTable(io, paths.queues)
        file_bytes = options.consume_queue_file_bytes
        self._files = ConsumeQueueFlush(io, syncs, paths.consume_queue, file_bytes, self._table)
        self._pages = QueuePages(io, paths.consume_queue, file_bytes, self._table, options.page_cache_behind_bytes)

    def is_urgent(self) -> bool:
        return False

    def flush(self, least_pages: int, timestamp_ms: int) -> FlushResult:
        done = self._files.pass_(least_pages)
        return FlushResult(done.synced_files, done.complete, {checkpoint_layout.LOGICS_TIMESTAMP: timestamp_ms}, {})

    def release_page_cache(self, dispatched: int) -> None:
        self._pages.drop(dispatched, self._files.synced)

    def close(self) -> None:
        self._table.close()


class _IndexFiles:
    """Index files. A file that has become full is urgent."""

    def __init__(self, context: RoleContext, syncs: SyncGuard) -> None:
        options, io, paths = context.options, context.io, context.paths
        self._words = context.control.words
        self._syncs = syncs
        self._files = IndexFlush(io, syncs, paths.index)
        self._pages = IndexPages(io, paths.index, options.max_hash_slot_num, options.page_cache_behind_bytes)
        self._full_files = self._words[control.INDEX_FULL_FILES]
        self._synced: tuple[int, int] | None = None
        """File and items of the last complete pass, until their pages are released."""

    def is_urgent(self) -> bool:
        seen, self._full_files = self._full_files, self._words[control.INDEX_FULL_FILES]
        return seen != self._full_files

    def flush(self, least_pages: int, timestamp_ms: int) -> FlushResult | None:
        state = committed_state(self._words)
        if state is None:
            return None
        done = self._files.pass_(state, least_pages)
        self._synced = (state.file_ms, state.items) if done.complete else None
        # RocketMQ's own index time is the end of the newest full file that is durable.
        checkpoint = {checkpoint_layout.INDEX_TIMESTAMP: done.full_end_ms} if done.full_end_ms else {}
        return FlushResult(done.synced_files, done.complete, {}, checkpoint)

    def release_page_cache(self, dispatched: int) -> None:
        if self._synced is not None and not self._syncs.has_failed():
            self._pages.drop(dispatched, *self._synced)

    def close(self) -> None:
        """Nothing is kept open between passes."""


_CQ_WORDS: Final = FlusherWords(
    sync_errno=control.CQ_SYNC_ERRNO,
    synced=control.CQ_SYNCED,
    syncs=control.CQ_SYNCS,
    passes=control.CQ_PASSES,
    pass_ns=control.CQ_PASS_NS,
    forced_passes=control.CQ_FORCED_PASSES,
    forced_ns=control.CQ_FORCED_NS,
    durations=histograms.QUEUE_FLUSHES,
)
_INDEX_WORDS: Final = FlusherWords(
    sync_errno=control.INDEX_SYNC_ERRNO,
    synced=control.INDEX_SYNCED,
    syncs=control.INDEX_SYNCS,
    passes=control.INDEX_PASSES,
    pass_ns=control.INDEX_PASS_NS,
    forced_passes=control.INDEX_FORCED_PASSES,
    forced_ns=control.INDEX_FORCED_NS,
    durations=histograms.INDEX_FLUSHES,
)


def cq_flusher(context: RoleContext) -> DispatchFlusher:
    """The cq-flusher: syncs ConsumeQueues and moves their durable mark."""
    syncs = _syncs(context, _CQ_WORDS)
    return DispatchFlusher(context, _CQ_WORDS, "consumequeue", syncs, _QueueFiles(context, syncs))


def index_flusher(context: RoleContext) -> DispatchFlusher:
    """The index-flusher: syncs index files, full ones at once, and moves their durable mark."""
    syncs = _syncs(context, _INDEX_WORDS)
    return DispatchFlusher(context, _INDEX_WORDS, "index", syncs, _IndexFiles(context, syncs))


def _syncs(context: RoleContext, words: FlusherWords) -> SyncGuard:
    return SyncGuard(context.io, context.paths, context.control.words, context.name, words.sync_errno)
