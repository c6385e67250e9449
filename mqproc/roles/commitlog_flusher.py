"""The commitlog-flusher: syncs the log, moves its durable mark, makes the next segments ready."""

from __future__ import annotations

from mqproc.config import MIB, Options
from mqproc.ipc.histogram import Histogram
from mqproc.layout import control as words_of
from mqproc.layout import figures
from mqproc.roles.flush_errors import FlushErrors
from mqproc.roles.loop import RoleContext
from mqproc.store.log_flush import LogFlush
from mqproc.store.segments import LogSegments

NS_PER_MS = 1_000_000
# After a pass that synced so much the disk is given what comes next piece by piece, so often, and not all in one pass.
BUSY_BYTES = 32 * MIB
START_WRITING_EVERY_S = 0.02


class CommitLogFlusher:
    """The role. The writer rings when it needs a segment; otherwise it goes by its interval."""

    name = words_of.COMMITLOG_FLUSHER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        segments = LogSegments(context.io, context.paths.commit_log, context.options.mapped_file_size_commit_log)
        self._flush = LogFlush(
            context.io, context.paths, context.options, self._words, segments, self._clock.monotonic_ns()
        )
        self._times = Histogram(self._words, figures.LOG_FLUSHES)
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
            self._let_go_of_pages()
        elif self._busy:
            with FlushErrors(self._context):
                self._flush.start_writing()
        return done

    def wait(self, timeout_s: float) -> None:
        until_due_s = max(0.0, (self._due_ns - self._clock.monotonic_ns()) / 1e9)
        if self._busy:
            until_due_s = min(until_due_s, START_WRITING_EVERY_S)
        self._context.bell.wait(min(timeout_s, until_due_s))

    def on_stop(self) -> bool:
        """Everything durable, the mark behind it, nothing left lying ready."""
        with FlushErrors(self._context, stopping=True):
            self._pass(self._clock.monotonic_ns(), thorough=True)
            self._flush.move_mark(self._clock.monotonic_ns(), at_once=True)
            self._flush.delete_unused_segments()
        return True

    def reload(self, options: Options) -> None:
        """`flush_interval_commit_log` may change while running."""
        self._interval_ns = options.flush_interval_commit_log * NS_PER_MS
        self._due_ns = 0

    def close(self) -> None:
        """Nothing is kept open between steps."""

    def _make_segments(self) -> int:
        size = self._context.options.mapped_file_size_commit_log
        if self._words[words_of.SEGMENTS_READY_END] > self._words[words_of.RESERVED_END] + size:
            return 0
        with self._context.heart.busy(words_of.STATE_ALLOCATING):
            return self._flush.make_segments_ahead()

    def _pass(self, now_ns: int, *, thorough: bool) -> int:
        words = self._words
        written = words[words_of.WRITTEN]
        with self._context.heart.busy(words_of.STATE_SYNCING):
            done = self._flush.flush(now_ns, thorough=thorough)
            self._busy = done >= BUSY_BYTES
            after_ns = self._clock.monotonic_ns()
            self._flush.move_mark(now_ns)
        words.add(words_of.COMMITLOG_PASSES, 1)
        words[words_of.COMMITLOG_PASS_NS] = after_ns
        if self._context.control.flushed >= written:
            # What is not durable has been written since this pass began: so old is it at most.
            words[words_of.ALL_FLUSHED_NS] = now_ns
        if done:
            words[words_of.COMMITLOG_SYNCED_NS] = after_ns
            words.add(words_of.COMMITLOG_SYNC_US, (after_ns - now_ns) // 1000)
            self._times.observe(after_ns - now_ns)
            # In ASYNC_FLUSH nobody waits for a sync; in SYNC_FLUSH the writer does its own.
        return 1 if done else 0

    def _let_go_of_pages(self) -> None:
        while self._flush.let_go_of_pages():
            self._context.heart.beat_if_due()
