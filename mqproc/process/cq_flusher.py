"""The cq-flusher: makes ConsumeQueues durable and moves their mark.

Every `flush_interval_consume_queue` what has at least `flush_consume_queue_least_pages` dirty pages; everything at
least once in `flush_consume_queue_thorough_interval`; three thorough passes at stop.
"""

from __future__ import annotations

from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control as words_of
from mqproc.layout import figures
from mqproc.process.flush_errors import FlushErrors
from mqproc.process.loop import RoleContext
from mqproc.shm.histogram import Histogram
from mqproc.store import checkpoint_file
from mqproc.store.final_syncs import FinalSyncs
from mqproc.store.marks import DurableMark
from mqproc.store.page_cache import QueuePages
from mqproc.store.queue_flush import ConsumeQueueFlush
from mqproc.store.queue_table import QueueTable
from mqproc.store.segments import LogSegments

NS_PER_MS = 1_000_000
THOROUGH_PASSES_AT_STOP = 3
EVERYTHING = 0


class CqFlusher:
    """The role."""

    name = words_of.CQ_FLUSHER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        options, io, paths = context.options, context.io, context.paths
        self._table = QueueTable(io, paths.queues)
        self._least_pages = options.flush_consume_queue_least_pages
        self._interval_ns = options.flush_interval_consume_queue * NS_PER_MS
        self._thorough_ns = options.flush_consume_queue_thorough_interval * NS_PER_MS
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        self._syncs = FinalSyncs(io, paths, self._words, self.name, words_of.CQ_SYNC_ERRNO)
        self._mark = DurableMark(io, paths.mark("consumequeue"), segments, self._syncs)
        now_ns = self._clock.monotonic_ns()
        file_bytes = options.consume_queue_file_bytes
        self._flush = ConsumeQueueFlush(io, self._syncs, paths.consume_queue, file_bytes, self._table, now_ns)
        behind_bytes = options.page_cache_behind_bytes
        self._pages = QueuePages(io, paths.consume_queue, file_bytes, self._table, behind_bytes)
        self._due_ns = now_ns + self._interval_ns
        self._stop_passes = THOROUGH_PASSES_AT_STOP
        self._times = Histogram(self._words, figures.QUEUE_FLUSHES)

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._due_ns:
            return 0
        self._due_ns = now_ns + self._interval_ns
        forced = now_ns - self._flush.forced_ns >= self._thorough_ns
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
        self._table.close()

    def _pass(self, least_pages: int, now_ns: int) -> int:
        words = self._words
        if self._syncs.ended():
            return 0
        # Before the pass: all units of records below it are written. Time first, then its position.
        timestamp_ms = words[words_of.DISPATCHED_STORE_TIMESTAMP_MS]
        dispatched = words[words_of.DISPATCHED]
        with self._context.heart.busy(words_of.STATE_SYNCING):
            done = self._flush.pass_(least_pages, now_ns)
            # Another role's sync may have failed during the pass.
            if done.complete and not self._syncs.ended():
                self._move_mark(dispatched, timestamp_ms)
        self._pages.let_go(dispatched, self._flush.synced)
        if done.synced_files:
            self._times.observe(self._clock.monotonic_ns() - now_ns)
        words.add(words_of.CQ_SYNCS, done.synced_files)
        words.add(words_of.CQ_PASSES, 1)
        words[words_of.CQ_PASS_NS] = self._clock.monotonic_ns()
        if least_pages == EVERYTHING:
            words.add(words_of.CQ_FORCED_PASSES, 1)
            words[words_of.CQ_FORCED_NS] = now_ns
        return done.synced_files

    def _move_mark(self, dispatched: int, timestamp_ms: int) -> None:
        # A mark above what the log itself is sure to keep would point into nothing after a power loss.
        position = min(dispatched, self._context.control.flushed)
        if position == self._words[words_of.CQ_SYNCED]:
            return
        if not self._mark.move(position, timestamp_ms):
            return
        words = {checkpoint_layout.LOGICS_TIMESTAMP: timestamp_ms}
        checkpoint_file.store_words(self._context.io, self._context.paths.checkpoint, words, self._syncs)
        self._words[words_of.CQ_SYNCED] = position
