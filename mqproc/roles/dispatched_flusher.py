"""What the cq-flusher and the index-flusher have in common: they make durable what dispatch has made of the log.

A pass every `flush_interval_consume_queue` over what has at least `flush_consume_queue_least_pages` dirty pages;
everything at least once in `flush_consume_queue_thorough_interval`; three thorough passes at stop. RocketMQ has no
intervals of its own for the index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mqproc.ipc.histogram import Histogram
from mqproc.layout import control as words_of
from mqproc.layout.figures import Place
from mqproc.roles.flush_errors import FlushErrors
from mqproc.roles.loop import RoleContext
from mqproc.store import checkpoint_file
from mqproc.store.final_syncs import FinalSyncs
from mqproc.store.marks import DurableMark
from mqproc.store.segments import LogSegments

NS_PER_MS: Final = 1_000_000
THOROUGH_PASSES_AT_STOP: Final = 3
EVERYTHING: Final = 0
"""Of `least_pages`: whatever is dirty."""


@dataclass(frozen=True, slots=True)
class FlusherWords:
    """Where in the control file a flusher keeps what it says."""

    sync_errno: int
    synced: int
    syncs: int
    passes: int
    pass_ns: int
    forced_passes: int
    forced_ns: int
    durations: Place


class DispatchedFlusher(ABC):
    """The role, but for the files that it syncs."""

    name: str

    def __init__(self, context: RoleContext, at: FlusherWords, mark: str) -> None:
        """`mark` is the name of the durable mark that follows the passes."""
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._at = at
        options, io, paths = context.options, context.io, context.paths
        self._least_pages = options.flush_consume_queue_least_pages
        self._interval_ns = options.flush_interval_consume_queue * NS_PER_MS
        self._thorough_ns = options.flush_consume_queue_thorough_interval * NS_PER_MS
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        self._syncs = FinalSyncs(io, paths, self._words, self.name, at.sync_errno)
        self._mark = DurableMark(io, paths.mark(mark), segments, self._syncs)
        now_ns = self._clock.monotonic_ns()
        self._due_ns = now_ns + self._interval_ns
        self._forced_ns = now_ns
        self._stop_passes = THOROUGH_PASSES_AT_STOP
        self._durations = Histogram(self._words, at.durations)

    @abstractmethod
    def _flush(self, least_pages: int, dispatched: int, timestamp_ms: int) -> int | None:
        """Sync what is due and move the mark behind it; how many files that were, None when it is to be tried again.

        What has been dispatched below `dispatched`, and until `timestamp_ms` of store time, is in the files already.
        Raises OSError.
        """

    def _is_urgent(self) -> bool:
        """Whether everything is to be synced now, whatever the interval."""
        return False

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        urgent = self._is_urgent()
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

    def _pass(self, least_pages: int, now_ns: int) -> int:
        words, at = self._words, self._at
        if self._syncs.ended():
            return 0
        # Before the pass. Time first, then its position.
        timestamp_ms = words[words_of.DISPATCHED_STORE_TIMESTAMP_MS]
        dispatched = words[words_of.DISPATCHED]
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

    def _move_mark(self, dispatched: int, timestamp_ms: int, checkpoint: Mapping[int, int]) -> None:
        """Publish what is durable, after these words of the checkpoint."""
        # A mark above what the log itself is sure to keep would point into nothing after a power loss.
        position = min(dispatched, self._context.control.flushed)
        if position != self._words[self._at.synced] and self._mark.move(position, timestamp_ms):
            self._store_checkpoint(checkpoint)
            self._words[self._at.synced] = position

    def _store_checkpoint(self, words: Mapping[int, int]) -> None:
        if words:
            checkpoint_file.store_words(self._context.io, self._context.paths.checkpoint, words, self._syncs)
