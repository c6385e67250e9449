"""The index-flusher: makes index files durable and moves their mark; a filled file at once, when it is rung."""

from __future__ import annotations

from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control as words_of
from mqproc.layout import figures
from mqproc.process.flush_errors import FlushErrors
from mqproc.process.loop import RoleContext
from mqproc.shm.histogram import Histogram
from mqproc.store import checkpoint_file
from mqproc.store.final_syncs import FinalSyncs
from mqproc.store.index_flush import IndexFlush, committed_state
from mqproc.store.marks import DurableMark
from mqproc.store.page_cache import IndexPages
from mqproc.store.segments import LogSegments

NS_PER_MS = 1_000_000
THOROUGH_PASSES_AT_STOP = 3
EVERYTHING = 0


class IndexFlusher:
    """The role. Its intervals are the ConsumeQueue's: RocketMQ has none of its own for the index."""

    name = words_of.INDEX_FLUSHER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        options, io, paths = context.options, context.io, context.paths
        self._least_pages = options.flush_consume_queue_least_pages
        self._interval_ns = options.flush_interval_consume_queue * NS_PER_MS
        self._thorough_ns = options.flush_consume_queue_thorough_interval * NS_PER_MS
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        self._syncs = FinalSyncs(io, paths, self._words, self.name, words_of.INDEX_SYNC_ERRNO)
        self._mark = DurableMark(io, paths.mark("index"), segments, self._syncs)
        now_ns = self._clock.monotonic_ns()
        self._flush = IndexFlush(io, self._syncs, paths.index, now_ns)
        self._pages = IndexPages(io, paths.index, options.max_hash_slot_num, options.page_cache_behind_bytes)
        self._due_ns = now_ns + self._interval_ns
        self._full_files = self._words[words_of.INDEX_FULL_FILES]
        self._stop_passes = THOROUGH_PASSES_AT_STOP
        self._times = Histogram(self._words, figures.INDEX_FLUSHES)

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        full_files = self._words[words_of.INDEX_FULL_FILES]
        filled = full_files != self._full_files
        if not filled and now_ns < self._due_ns:
            return 0
        if filled:
            self._full_files = full_files
        else:
            self._due_ns = now_ns + self._interval_ns
        forced = filled or now_ns - self._flush.forced_ns >= self._thorough_ns
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
        """Nothing is kept open between steps."""

    def _pass(self, least_pages: int, now_ns: int) -> int:
        words = self._words
        if self._syncs.ended():
            return 0
        # Before the pass: all entries of records below it are stored. Time first, then its position.
        timestamp_ms = words[words_of.DISPATCHED_STORE_TIMESTAMP_MS]
        dispatched = words[words_of.DISPATCHED]
        state = committed_state(words)
        if state is None:
            words[words_of.INDEX_PASS_NS] = now_ns
            return 0
        with self._context.heart.busy(words_of.STATE_SYNCING):
            done = self._flush.pass_(state, least_pages, now_ns)
            # Another role's sync may have failed during the pass.
            if not self._syncs.ended():
                self._remember(done.full_end_ms)
                if done.complete:
                    self._move_mark(dispatched, timestamp_ms)
                    self._pages.let_go(dispatched, state.file_ms, state.items)
        if done.synced_files:
            self._times.observe(self._clock.monotonic_ns() - now_ns)
        words.add(words_of.INDEX_SYNCS, done.synced_files)
        words.add(words_of.INDEX_PASSES, 1)
        words[words_of.INDEX_PASS_NS] = self._clock.monotonic_ns()
        if least_pages == EVERYTHING:
            words.add(words_of.INDEX_FORCED_PASSES, 1)
            words[words_of.INDEX_FORCED_NS] = now_ns
        return done.synced_files

    def _move_mark(self, dispatched: int, timestamp_ms: int) -> None:
        position = min(dispatched, self._context.control.flushed)
        if position == self._words[words_of.INDEX_SYNCED]:
            return
        if self._mark.move(position, timestamp_ms):
            self._words[words_of.INDEX_SYNCED] = position

    def _remember(self, full_end_ms: int) -> None:
        """RocketMQ's own index time is the end of the newest full file that is durable."""
        if full_end_ms:
            words = {checkpoint_layout.INDEX_TIMESTAMP: full_end_ms}
            checkpoint_file.store_words(self._context.io, self._context.paths.checkpoint, words, self._syncs)
