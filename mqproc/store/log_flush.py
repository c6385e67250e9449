"""Making the CommitLog durable, and its next segments ready: the commitlog-flusher's half of the engine."""

from __future__ import annotations

import errno

from mqproc.config import MIB, PAGE_BYTES, Options
from mqproc.io import StoreIO
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.shm.words import Words
from mqproc.store import checkpoint_file
from mqproc.store.marks import DurableMark
from mqproc.store.segments import LogSegments

MARK_INTERVAL_NS = 1_000_000_000
# Small segments fill faster than one can be made: this many bytes, or this many segments, lie ready.
AHEAD_BYTES = 8 * MIB
AHEAD_SEGMENTS_MAX = 8
_WARM_CHUNK = bytes(MIB)
# Pages are let go in steps of this size, so that one call has little to do.
DROP_STEP_BYTES = 16 * MIB


def make_segment(io: StoreIO, paths: StorePaths, start: int, size: int, *, warm: bool = False) -> None:
    """Make a whole segment of zeros under its final name, durable. Raises OSError; then nothing is left behind."""
    temporary = paths.next_segment
    fd = io.open(temporary, write=True, create=True)
    try:
        io.allocate(fd, 0, size)
        if warm:
            for offset in range(0, size, len(_WARM_CHUNK)):
                io.pwrite(fd, memoryview(_WARM_CHUNK)[: min(len(_WARM_CHUNK), size - offset)], offset)
        io.crash_point("roll.fallocated")
        io.sync(fd)
    except OSError:
        io.unlink(temporary)
        raise
    finally:
        io.close(fd)
    segments = LogSegments(io, paths.commit_log, size)
    io.rename(temporary, segments.path(start))
    io.crash_point("roll.renamed")


class LogFlush:
    """Sync what was written, move the durable mark, make segments ahead, let go of old pages.

    Owns FLUSHER_SYNCED, SEGMENTS_READY_END and the CommitLog mark. The first failed sync is final: it is published in
    FLUSHER_SYNC_ERRNO and nothing is synced any more.
    """

    def __init__(
        self, io: StoreIO, paths: StorePaths, options: Options, words: Words, segments: LogSegments, now_ns: int
    ) -> None:
        self._io = io
        self._paths = paths
        self._options = options
        self._words = words
        self._segments = segments
        self._mark = DurableMark(io, paths.mark("commitlog"), segments)
        self._marked_ns = now_ns
        self._thorough_ns = now_ns
        self._dropped_to = 0
        self._synced_timestamp_ms = 0

    def flush(self, now_ns: int, *, thorough: bool = False) -> int:
        """Sync when enough pages are dirty or the thorough interval has passed; returns the bytes made durable."""
        words = self._words
        if self._options.sync_flush or words[words_of.FLUSHER_SYNC_ERRNO]:
            return 0
        timestamp_ms = words[words_of.WRITTEN_STORE_TIMESTAMP_MS]
        written = words[words_of.WRITTEN]
        synced = words[words_of.FLUSHER_SYNCED]
        interval_ns = self._options.flush_commit_log_thorough_interval * 1_000_000
        thorough = thorough or now_ns - self._thorough_ns >= interval_ns
        if thorough:
            self._thorough_ns = now_ns
        dirty_pages = written // PAGE_BYTES - synced // PAGE_BYTES
        if written == synced or not (thorough or dirty_pages >= self._options.flush_commit_log_least_pages):
            return 0
        if not self._sync(synced, written):
            return 0
        words[words_of.FLUSHER_SYNCED] = written
        self._synced_timestamp_ms = timestamp_ms
        return written - synced

    def _sync(self, start: int, stop: int) -> bool:
        self._io.crash_point("flush.before_msync")
        segment = self._segments.start_of(start)
        try:
            while segment < stop:
                fd = self._io.open(self._segments.path(segment), write=True)
                try:
                    self._io.sync(fd)
                finally:
                    self._io.close(fd)
                segment += self._segments.segment_size
        except OSError as error:
            self._words[words_of.FLUSHER_SYNC_ERRNO] = error.errno or errno.EIO
            remember_failed_sync(self._io, self._paths, f"commitlog {segment:020d}: {error.strerror}")
            return False
        self._words.add(words_of.COMMITLOG_SYNCS, 1)
        self._io.crash_point("flush.after_msync")
        return True

    def move_mark(self, now_ns: int, *, at_once: bool = False) -> bool:
        """Move the durable mark and RocketMQ's checkpoint, at most once a second. Returns whether it moved."""
        words = self._words
        if words[words_of.FLUSHER_SYNC_ERRNO] or words[words_of.WRITER_SYNC_ERRNO]:
            return False
        timestamp_ms = self._synced_timestamp_ms
        if self._options.sync_flush:
            timestamp_ms = words[words_of.WRITTEN_STORE_TIMESTAMP_MS]
        flushed = max(words[words_of.WRITER_SYNCED], words[words_of.FLUSHER_SYNCED])
        if flushed == words[words_of.COMMITLOG_MARK]:
            return False
        if not at_once and now_ns - self._marked_ns < MARK_INTERVAL_NS:
            return False
        self._marked_ns = now_ns
        self._mark.move(flushed, timestamp_ms)
        words[words_of.COMMITLOG_MARK] = flushed
        checkpoint_file.store_words(
            self._io,
            self._paths.checkpoint,
            {
                checkpoint_layout.PHYSIC_TIMESTAMP: timestamp_ms,
                checkpoint_layout.CONFIRM_PHYSICAL_OFFSET: flushed,
            },
        )
        return True

    def make_segments_ahead(self) -> int:
        """Make segments until enough lie ready behind `written`; returns how many were made."""
        words, size = self._words, self._segments.segment_size
        ahead = min(AHEAD_SEGMENTS_MAX, max(1, AHEAD_BYTES // size)) * size
        wanted = self._segments.start_of(max(words[words_of.WRITTEN], words[words_of.RESERVED_END])) + size + ahead
        made = 0
        while (start := words[words_of.SEGMENTS_READY_END]) < wanted:
            try:
                make_segment(self._io, self._paths, start, size, warm=self._options.warm_mapped_file_enable)
            except OSError as error:
                words[words_of.SEGMENT_ERRNO] = error.errno or errno.EIO
                return made
            words[words_of.SEGMENT_ERRNO] = 0
            words[words_of.SEGMENTS_READY_END] = start + size
            made += 1
        return made

    def let_go_of_pages(self) -> int:
        """Let the kernel forget the log's pages far enough behind dispatch and flush; returns the bytes let go."""
        behind = self._options.page_cache_behind_bytes
        if behind == 0:
            return 0
        words = self._words
        flushed = max(words[words_of.WRITER_SYNCED], words[words_of.FLUSHER_SYNCED])
        limit = min(flushed, words[words_of.DISPATCHED]) - behind
        start = max(self._dropped_to, words[words_of.MIN_PHYSICAL_OFFSET])
        segment = self._segments.start_of(start)
        stop = min(limit - limit % DROP_STEP_BYTES, segment + self._segments.segment_size)
        if stop <= start:
            return 0
        try:
            fd = self._io.open(self._segments.path(segment))
        except FileNotFoundError:
            self._dropped_to = stop
            return 0
        try:
            self._io.drop_cache(fd, start - segment, stop - start)
        finally:
            self._io.close(fd)
        self._dropped_to = stop
        return stop - start

    def delete_unused_segments(self) -> int:
        """At a clean stop: delete segments that lie ready and hold nothing. Returns how many went."""
        words, size = self._words, self._segments.segment_size
        keep = self._segments.start_of(words[words_of.WRITTEN]) + size
        deleted = 0
        while words[words_of.SEGMENTS_READY_END] > keep:
            start = words[words_of.SEGMENTS_READY_END] - size
            words[words_of.SEGMENTS_READY_END] = start
            self._io.unlink(self._segments.path(start))
            deleted += 1
        if deleted:
            self._io.sync_folder(self._paths.commit_log)
        return deleted


def remember_failed_sync(io: StoreIO, paths: StorePaths, what: str) -> None:
    """Write down that a sync failed, so that the store stays read-only until it is repaired."""
    try:
        io.write_file_atomically(paths.read_only, f"{what}\n".encode(), mode=0o600)
    except OSError:
        # The disk that failed the sync may fail this too; the control word still says it while the group runs.
        return
