"""Making the CommitLog durable, and its next segments ready: the commitlog-flusher's half of the engine."""

from __future__ import annotations

import errno

from mqproc.config import MIB, PAGE_BYTES, Options
from mqproc.io import FailedSyncError, StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store import checkpoint_file
from mqproc.store.final_syncs import FinalSyncs, Syncing
from mqproc.store.marks import DurableMark
from mqproc.store.segments import LogSegments

MARK_INTERVAL_NS = 1_000_000_000
# Small segments fill faster than one can be made: this many bytes, or this many segments, lie ready.
AHEAD_BYTES = 8 * MIB
AHEAD_SEGMENTS_MAX = 8
_WARM_CHUNK = bytes(MIB)
# The disk is told to begin with so much at once.
START_BYTES = 8 * MIB
# Pages are let go in steps of this size, so that one call has little to do.
DROP_STEP_BYTES = 4 * MIB


def make_segment(
    io: StoreIO, paths: StorePaths, start: int, size: int, *, warm: bool = False, syncs: Syncing | None = None
) -> None:
    """Make a whole segment of zeros under its final name, durable. Raises OSError; then nothing is left behind.

    `syncs` makes it durable; a role gives its FinalSyncs.
    """
    syncs = syncs or io
    temporary = paths.next_segment
    fd = io.open(temporary, write=True, create=True)
    try:
        io.crash_point("roll.created")
        io.allocate(fd, 0, size)
        if warm:
            for offset in range(0, size, len(_WARM_CHUNK)):
                io.pwrite(fd, memoryview(_WARM_CHUNK)[: min(len(_WARM_CHUNK), size - offset)], offset)
        io.crash_point("roll.fallocated")
        syncs.sync(fd)
    except OSError:
        io.unlink(temporary)
        raise
    finally:
        io.close(fd)
    segments = LogSegments(io, paths.commit_log, size)
    syncs.rename(temporary, segments.path(start), lambda: io.crash_point("roll.renamed"))
    io.crash_point("roll.dirsynced")


def sync_log(segments: LogSegments, syncs: Syncing, begin: int, end: int) -> None:
    """Make [begin, end) of the log durable, for who cannot wait for its flusher; no mark moves.

    Raises FailedSyncError, FileNotFoundError when a segment of it is deleted.
    """
    start = segments.start_of(begin)
    while start < end:
        fd = segments.io.open(segments.path(start))
        try:
            syncs.sync(fd)
        finally:
            segments.io.close(fd)
        start += segments.segment_size


class LogFlush:
    """Sync what was written, move the durable mark, make segments ahead, let go of old pages.

    Owns FLUSHER_SYNCED, SEGMENTS_READY_END and the CommitLog mark. The first failed sync is final, whoever sees it:
    then nothing is synced, marked or made any more. Methods raise FailedSyncError when it was their own, and OSError
    for what may go well at the next call.
    """

    def __init__(
        self, io: StoreIO, paths: StorePaths, options: Options, words: Words, segments: LogSegments, now_ns: int
    ) -> None:
        self._io = io
        self._paths = paths
        self._options = options
        self._words = words
        self._segments = segments
        self._syncs = FinalSyncs(io, paths, words, words_of.COMMITLOG_FLUSHER, words_of.FLUSHER_SYNC_ERRNO)
        self._mark = DurableMark(io, paths.mark("commitlog"), segments, self._syncs)
        self._marked_ns = now_ns
        self._thorough_ns = now_ns
        self._dropped_to = 0
        self._started = 0
        # A killed predecessor may have synced beyond its mark, and nobody else knows the time of what it had synced.
        timestamp_ms = words[words_of.WRITTEN_STORE_TIMESTAMP_MS]
        all_synced = words[words_of.WRITTEN] == words[words_of.FLUSHER_SYNCED]
        self._synced_timestamp_ms = timestamp_ms if all_synced else None

    def flush(self, now_ns: int, *, thorough: bool = False) -> int:
        """Sync when enough pages are dirty or the thorough interval has passed; returns the bytes made durable."""
        words = self._words
        if self._options.sync_flush or self._syncs.ended():
            return 0
        # Time first, then the position that it belongs to: the time of an earlier record does no harm.
        timestamp_ms = words[words_of.WRITTEN_STORE_TIMESTAMP_MS]
        written = words[words_of.WRITTEN]
        synced = words[words_of.FLUSHER_SYNCED]
        interval_ns = self._options.flush_commit_log_thorough_interval * 1_000_000
        thorough = thorough or now_ns - self._thorough_ns >= interval_ns
        dirty_pages = written // PAGE_BYTES - synced // PAGE_BYTES
        done = 0
        if written > synced and (thorough or dirty_pages >= self._options.flush_commit_log_least_pages):
            self._sync(synced, written)
            # Another role's sync may have failed meanwhile: the disk is not trusted any more.
            if self._syncs.ended():
                return 0
            words[words_of.FLUSHER_SYNCED] = written
            self._synced_timestamp_ms = timestamp_ms
            done = written - synced
        if thorough:
            self._thorough_ns = now_ns
            words.add(words_of.COMMITLOG_FORCED_PASSES, 1)
            words[words_of.COMMITLOG_FORCED_NS] = now_ns
        return done

    def start_writing(self) -> int:
        """Have the disk begin with the whole pages written since; returns their bytes, 0 while they are few.

        The next sync then has less to do at once, in the kernel and on the disk. What fails it is told by that sync.
        """
        words = self._words
        start = max(self._started, words[words_of.FLUSHER_SYNCED])
        written = words[words_of.WRITTEN]
        if written - start < START_BYTES or self._options.sync_flush or self._syncs.ended():
            return 0
        segment = self._segments.start_of(start)
        stop = min(written - written % PAGE_BYTES, segment + self._segments.segment_size)
        fd = self._io.open(self._segments.path(segment), write=True)
        try:
            self._io.start_writing(fd, start - segment, stop - start)
        finally:
            self._io.close(fd)
        self._started = stop
        return stop - start

    def _sync(self, start: int, stop: int) -> None:
        self._io.crash_point("flush.before_msync")
        segment = self._segments.start_of(start)
        while segment < stop:
            fd = self._io.open(self._segments.path(segment), write=True)
            try:
                self._syncs.sync(fd)
            finally:
                self._io.close(fd)
            segment += self._segments.segment_size
        self._words.add(words_of.COMMITLOG_SYNCS, 1)
        self._io.crash_point("flush.after_msync")

    def _durable_end(self) -> tuple[int, int | None]:
        """Where the durable part of the log ends, and the store time of a record near its end, where that is known."""
        words = self._words
        # Time first, then its position.
        writer_timestamp_ms = words[words_of.WRITER_SYNCED_STORE_TIMESTAMP_MS]
        writer_synced, flusher_synced = words[words_of.WRITER_SYNCED], words[words_of.FLUSHER_SYNCED]
        if writer_synced >= flusher_synced:
            return writer_synced, writer_timestamp_ms
        return flusher_synced, self._synced_timestamp_ms

    def move_mark(self, now_ns: int, *, at_once: bool = False) -> bool:
        """Move the durable mark and RocketMQ's checkpoint, at most once a second. Returns whether it moved."""
        words = self._words
        if self._syncs.ended():
            return False
        flushed, timestamp_ms = self._durable_end()
        if timestamp_ms is None or flushed == words[words_of.COMMITLOG_MARK]:
            # With an earlier time a start would take that for the last record's: the next sync has one.
            return False
        if not at_once and now_ns - self._marked_ns < MARK_INTERVAL_NS:
            return False
        self._marked_ns = now_ns
        if not self._mark.move(flushed, timestamp_ms):
            return False
        checkpoint_file.store_words(
            self._io,
            self._paths.checkpoint,
            {
                checkpoint_layout.PHYSIC_TIMESTAMP: timestamp_ms,
                checkpoint_layout.CONFIRM_PHYSICAL_OFFSET: flushed,
            },
            self._syncs,
        )
        words[words_of.COMMITLOG_MARK] = flushed
        return True

    def make_segments_ahead(self) -> int:
        """Make segments until enough lie ready behind `written`; returns how many were made."""
        words, size = self._words, self._segments.segment_size
        ahead = min(AHEAD_SEGMENTS_MAX, max(1, AHEAD_BYTES // size)) * size
        wanted = self._segments.start_of(max(words[words_of.WRITTEN], words[words_of.RESERVED_END])) + size + ahead
        made = 0
        warm = self._options.warm_mapped_file_enable
        while (start := words[words_of.SEGMENTS_READY_END]) < wanted and not self._syncs.ended():
            try:
                make_segment(self._io, self._paths, start, size, warm=warm, syncs=self._syncs)
            except OSError as error:
                words[words_of.SEGMENT_ERRNO] = error.errno or errno.EIO
                if isinstance(error, FailedSyncError):
                    raise
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
        if self._syncs.ended():
            return 0
        keep = self._segments.start_of(words[words_of.WRITTEN]) + size
        deleted = 0
        while words[words_of.SEGMENTS_READY_END] > keep:
            start = words[words_of.SEGMENTS_READY_END] - size
            words[words_of.SEGMENTS_READY_END] = start
            self._io.unlink(self._segments.path(start))
            deleted += 1
        if deleted:
            self._syncs.sync_folder(self._paths.commit_log)
        return deleted
