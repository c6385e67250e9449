"""Flusher roles: make log, ConsumeQueues and index durable and move their marks.

commitlog-flusher  syncs the log, moves its mark, allocates segments ahead of the writer
cq-flusher         syncs ConsumeQueue files; a `DispatchFlusher`
index-flusher      syncs index files; a full file at once; a `DispatchFlusher`
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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
from mqproc.roles.role import Role, RoleContext
from mqproc.store.commitlog.flush import CommitLogFlush
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFlush
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.durable_marks import DurableMark, store_checkpoint
from mqproc.store.index.files import IndexFlush, committed_state
from mqproc.store.logics_offset import NOT_FOUND, keeps_logics_offset, last_queued_record
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


@dataclass(slots=True)
class QueuePages:
    """Pages of all ConsumeQueues. Units that existed before this object was created are ignored."""

    io: StoreIO
    folder: Path
    file_bytes: int
    table: QueueTable
    distance_bytes: int
    _dropped: NDArray[np.int64] | None = None
    _mark: int = 0
    _mark_offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def drop(self, dispatched: int, synced: NDArray[np.int64]) -> int:
        """Drop old pages below the durable offsets `synced` int64[queues]; returns the bytes."""
        if self.distance_bytes == 0:
            return 0
        if self._dropped is None:
            self._dropped = synced.copy()
            self._mark, self._mark_offsets = dispatched, synced.copy()
        if dispatched - self._mark < self.distance_bytes:
            return 0
        before = np.zeros(len(self._mark_offsets), np.int64)
        before[: len(self._dropped)] = self._dropped
        due = np.flatnonzero((self._mark_offsets - before) * UNIT_SIZE >= QUEUE_STEP_BYTES)
        size = sum(self._drop(number, int(before[number]), int(self._mark_offsets[number])) for number in due.tolist())
        before[due] = self._mark_offsets[due]
        self._dropped = before
        self._mark, self._mark_offsets = dispatched, synced.copy()
        return size

    def _drop(self, number: int, first: int, stop: int) -> int:
        """Drop units [first, stop) of one queue."""
        topic, queue_id = self.table.name(number)
        folder = self.folder / topic / str(queue_id)
        ranges = _file_ranges(first * UNIT_SIZE, stop * UNIT_SIZE, self.file_bytes)
        return sum(drop_range(self.io, folder / segment_name(start), begin, end) for start, begin, end in ranges)


def _file_ranges(first: int, stop: int, file_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(start of the file, begin and end within it) for each file of a byte range."""
    while first < stop:
        start = first - first % file_bytes
        end = min(stop, start + file_bytes)
        # Include the last page of a file: rounding down would leave one page of each.
        yield start, first - start, -(-(end - start) // PAGE_BYTES) * PAGE_BYTES if end < stop else end - start
        first = end


@dataclass(slots=True)
class IndexPages:
    """Pages of the items of index files. Slots stay: every query and every entry reads them."""

    io: StoreIO
    folder: Path
    slots: int
    distance_bytes: int
    _dropped: tuple[int, int] | None = None
    _mark: int = 0
    _mark_at: tuple[int, int] = (0, 0)

    def drop(self, dispatched: int, file_ms: int, items: int) -> int:
        """Drop old pages; items are durable up to number `items` of the file `file_ms`.

        Returns the bytes of the ranges; the end of the previous call's range counts twice.
        """
        if self.distance_bytes == 0:
            return 0
        if self._dropped is None:
            self._dropped = (file_ms, items)
            self._mark, self._mark_at = dispatched, (file_ms, items)
        if dispatched - self._mark < self.distance_bytes:
            return 0
        size = sum(self._drop(path, file, self._dropped, self._mark_at) for path, file in self._files())
        self._dropped = self._mark_at
        self._mark, self._mark_at = dispatched, (file_ms, items)
        return size

    def _files(self) -> list[tuple[Path, int]]:
        found = ((name, index_name_time_ms(name)) for name in self.io.names(self.folder))
        return [(self.folder / name, time_ms) for name, time_ms in found if time_ms is not None]

    def _drop(self, path: Path, file_ms: int, first: tuple[int, int], stop: tuple[int, int]) -> int:
        """Drop items of one file in [first, stop), each given as (file's time, item)."""
        if not first[0] <= file_ms <= stop[0]:
            return 0
        items_start = index_file.items_start(self.slots)
        begin = index_file.item_offset(self.slots, first[1]) if file_ms == first[0] else items_start
        # A large page is dropped only as a whole: include the one that the previous call had to leave.
        begin = max(items_start, begin - begin % LARGE_PAGE_BYTES)
        if file_ms == stop[0]:
            return drop_range(self.io, path, begin, index_file.item_offset(self.slots, stop[1]))
        return drop_range(self.io, path, begin, self.io.size_of(path) + PAGE_BYTES)


NS_PER_MS: Final = 1_000_000
# After a pass that synced this much, writeback is started in small pieces at this interval instead of once a pass.
BUSY_BYTES: Final = 32 * MIB
START_WRITING_EVERY_S: Final = 0.02
THOROUGH_PASSES_AT_STOP: Final = 3
EVERYTHING: Final = 0
"""Value of `least_pages` that syncs every dirty page."""


class FlushErrors:
    """Error handling of a flusher's step; `word` gets the errno of a pass.

    A failed sync is final: it is logged and the control file records it. After any other error (no space for a mark,
    no free descriptor) nothing counts as synced and the next step retries. No step follows while stopping, so the error
    is raised.
    """

    def __init__(self, context: RoleContext, word: int | None = None, *, stopping: bool = False) -> None:
        self._words = context.control.words
        self._word = word
        self._heartbeat = context.heartbeat
        self._stopping = stopping

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._word is not None:
            self._words[self._word] = (error.errno or errno.EIO) if isinstance(error, OSError) else 0
        if not isinstance(error, OSError):
            return False
        final = isinstance(error, FailedSyncError)
        if self._stopping and not final:
            return False
        event = "sync failed, the store is read-only from now on" if final else "flush failed, retrying"
        self._heartbeat.log_error(event, error=str(error))
        return True


class CommitLogFlusher(Role):
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
            with FlushErrors(self._context, control.COMMITLOG_FLUSH_ERRNO):
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

    def _make_segments(self) -> int:
        size = self._context.options.mapped_file_size_commit_log
        made = 0
        if self._words[control.SEGMENTS_READY_END] <= self._words[control.RESERVED_END] + size:
            with self._context.heartbeat.busy(control.STATE_ALLOCATING):
                made = self._flush.make_segments_ahead()
        return made + (self._flush.reserve_space() > 0)

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
class FlushResult:
    """Outcome of one pass over the files."""

    synced_files: int
    complete: bool
    """Whether everything that was dispatched before the pass is durable now."""
    mark_checkpoint: Callable[[int], Mapping[int, int]]
    """Returns the checkpoint words that are stored with a mark at a log position."""
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

    def close(self) -> None: ...


class DispatchFlusher(Role):
    """Syncs files that the dispatcher has written: the cq-flusher and the index-flusher.

    A pass every `flush_interval_consume_queue` covers files with `flush_consume_queue_least_pages` dirty pages or more;
    one in `flush_consume_queue_thorough_interval` covers everything; three thorough passes run at stop. RocketMQ has no
    separate intervals for the index.
    """

    def __init__(
        self,
        context: RoleContext,
        make_files: Callable[[RoleContext, SyncGuard], FlushedFiles],
        *,
        prefix: str,
        mark: str,
        durations: HistogramLayout,
    ) -> None:
        """`prefix`: of its control words. `mark`: name of the durable mark that follows the passes."""
        self.name = context.name
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._prefix = prefix
        self._syncs = SyncGuard(
            context.io, context.paths, self._words, context.name, control.WORDS[f"{prefix}_sync_errno"].index
        )
        self._files = make_files(context, self._syncs)
        options, io, paths = context.options, context.io, context.paths
        self._least_pages = options.flush_consume_queue_least_pages
        self._interval_ns = options.flush_interval_consume_queue * NS_PER_MS
        self._thorough_ns = options.flush_consume_queue_thorough_interval * NS_PER_MS
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        self._mark = DurableMark(io, paths.mark(mark), segments, self._syncs)
        now_ns = self._clock.monotonic_ns()
        self._due_ns = now_ns + self._interval_ns
        self._forced_ns = now_ns
        self._stop_passes = THOROUGH_PASSES_AT_STOP
        self._durations = Histogram(self._words, durations)

    def _word(self, name: str) -> int:
        return control.WORDS[f"{self._prefix}_{name}"].index

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        urgent = self._files.is_urgent()
        if not urgent:
            if now_ns < self._due_ns:
                return 0
            self._due_ns = now_ns + self._interval_ns
        forced = urgent or now_ns - self._forced_ns >= self._thorough_ns
        with FlushErrors(self._context, self._word("flush_errno")):
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
        words = self._words
        if self._syncs.has_failed():
            return 0
        # Read before the pass, the timestamp before its position: everything below them is in the files already.
        timestamp_ms = words[control.DISPATCHED_STORE_TIMESTAMP_MS]
        dispatched = words[control.DISPATCHED]
        synced_files = self._flush(least_pages, dispatched, timestamp_ms)
        words[self._word("pass_ns")] = self._clock.monotonic_ns()
        if synced_files is None:
            return 0
        if synced_files:
            self._durations.observe(self._clock.monotonic_ns() - now_ns)
        words.add(self._word("syncs"), synced_files)
        words.add(self._word("passes"), 1)
        if least_pages == EVERYTHING:
            self._forced_ns = now_ns
            words.add(self._word("forced_passes"), 1)
            words[self._word("forced_ns")] = now_ns
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

    def _move_mark(self, dispatched: int, timestamp_ms: int, checkpoint: Callable[[int], Mapping[int, int]]) -> None:
        """Publish the durable position, after the checkpoint words that go with it."""
        # The log itself may be durable only up to a lower position: after a power loss the mark must not exceed it.
        position = min(dispatched, self._context.control.flushed)
        synced = self._word("synced")
        if position != self._words[synced] and self._mark.move(position, timestamp_ms):
            self._store_checkpoint(checkpoint(position))
            self._words[synced] = position

    def _store_checkpoint(self, words: Mapping[int, int]) -> None:
        if words:
            store_checkpoint(self._context.io, self._context.paths.checkpoint, words, self._syncs)


def _no_words(_position: int) -> Mapping[int, int]:
    return {}


class _QueueFiles:
    def __init__(self, context: RoleContext, syncs: SyncGuard) -> None:
        options, io, paths = context.options, context.io, context.paths
        self._context = context
        self._keeps_logics_offset = keeps_logics_offset(io, paths, options)
        self._table = QueueTable(io, paths.queues)
        file_bytes = options.consume_queue_file_bytes
        self._files = ConsumeQueueFlush(io, syncs, paths.consume_queue, file_bytes, self._table)
        self._pages = QueuePages(io, paths.consume_queue, file_bytes, self._table, options.page_cache_behind_bytes)

    def is_urgent(self) -> bool:
        return False

    def flush(self, least_pages: int, timestamp_ms: int) -> FlushResult:
        done = self._files.pass_(least_pages)
        return FlushResult(done.synced_files, done.complete, partial(self._words_at, timestamp_ms), {})

    def _words_at(self, timestamp_ms: int, position: int) -> Mapping[int, int]:
        words = {checkpoint_layout.LOGICS_TIMESTAMP: timestamp_ms}
        if self._keeps_logics_offset:
            of = self._context
            offset = last_queued_record(of.io, of.paths, of.options, self._table, position)
            if offset != NOT_FOUND:
                words[checkpoint_layout.LOGICS_PHYSICAL_OFFSET] = offset
        return words

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
        return FlushResult(done.synced_files, done.complete, _no_words, checkpoint)

    def release_page_cache(self, dispatched: int) -> None:
        if self._synced is not None and not self._syncs.has_failed():
            self._pages.drop(dispatched, *self._synced)

    def close(self) -> None:
        """Nothing is kept open between passes."""


def cq_flusher(context: RoleContext) -> DispatchFlusher:
    """The cq-flusher: syncs ConsumeQueues and moves their durable mark."""
    return DispatchFlusher(context, _QueueFiles, prefix="cq", mark="consumequeue", durations=histograms.QUEUE_FLUSHES)


def index_flusher(context: RoleContext) -> DispatchFlusher:
    """The index-flusher: syncs index files, full files at once, and moves their durable mark."""
    return DispatchFlusher(context, _IndexFiles, prefix="index", mark="index", durations=histograms.INDEX_FLUSHES)
