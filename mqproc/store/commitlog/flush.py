"""Flush of the CommitLog, and segment preallocation: the commitlog-flusher's part."""

from __future__ import annotations

import errno

from mqproc.config.options import Options
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control
from mqproc.paths import StorePaths, segment_name
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.durable_marks import DurableMark, store_checkpoint
from mqproc.store.sync_guard import SyncGuard, Syncing
from mqproc.util.units import MIB, PAGE_BYTES

MARK_INTERVAL_NS = 1_000_000_000
# Small segments fill faster than one is created, so this many bytes, at most so many segments, are created ahead.
AHEAD_BYTES = 8 * MIB
AHEAD_SEGMENTS_MAX = 8
# Disk space is reserved this far ahead of the log's end, and more in a longer log.
RESERVED_BYTES_MIN = 16 * MIB
# Space ahead of the log takes at most this fraction (one in …) of the free space.
AHEAD_OF_FREE = 16
_WARM_CHUNK = bytes(MIB)
# Amount of dirty log after which writeback is started.
START_BYTES = 8 * MIB
# Pages are dropped in steps of this size to keep calls short.
DROP_STEP_BYTES = 4 * MIB


def make_segment(
    io: StoreIO, paths: StorePaths, start: int, size: int, *, warm: bool = False, syncs: Syncing | None = None
) -> None:
    """Create a zeroed segment durably under its final name. Raises OSError without leftovers.

    A large segment is sparse: `CommitLogFlush.reserve_space` follows the log. Roles pass their SyncGuard as `syncs`.
    """
    syncs = syncs or io
    temporary = paths.next_segment
    try:
        with io.opened(temporary, write=True, create=True) as fd:
            io.crash_point("roll.created")
            allocated = size if warm else min(size, RESERVED_BYTES_MIN)
            io.allocate(fd, 0, allocated)
            if allocated < size:
                io.set_size(fd, size)
            if warm:
                for offset in range(0, size, len(_WARM_CHUNK)):
                    io.pwrite(fd, memoryview(_WARM_CHUNK)[: min(len(_WARM_CHUNK), size - offset)], offset)
            io.crash_point("roll.fallocated")
            syncs.sync(fd)
    except OSError:
        io.unlink(temporary)
        raise
    syncs.rename(temporary, paths.commit_log / segment_name(start), lambda: io.crash_point("roll.renamed"))
    io.crash_point("roll.dirsynced")


def sync_log(segments: LogSegments, syncs: Syncing, begin: int, end: int) -> None:
    """Sync [begin, end) of the log; moves no mark.

    Raises FailedSyncError, and FileNotFoundError if a segment has been deleted.
    """
    for start in range(segments.start_of(begin), end, segments.segment_size):
        with segments.io.opened(segments.path(start)) as fd:
            syncs.sync(fd)


class CommitLogFlush:
    """Syncs the log, moves the durable mark, creates segments ahead and drops old pages.

    Owns FLUSHER_SYNCED, SEGMENTS_READY_END and the CommitLog mark. The first failed sync of any role is final:
    afterwards nothing is synced, marked or created. Methods raise FailedSyncError if their own sync failed, and other
    OSErrors for failures that a retry may resolve.
    """

    def __init__(
        self, io: StoreIO, paths: StorePaths, options: Options, words: Words, segments: LogSegments, now_ns: int
    ) -> None:
        self._io = io
        self._paths = paths
        self._options = options
        self._words = words
        self._segments = segments
        self._syncs = SyncGuard(io, paths, words, control.COMMITLOG_FLUSHER, control.FLUSHER_SYNC_ERRNO)
        self._mark = DurableMark(io, paths.mark("commitlog"), segments, self._syncs)
        self._marked_ns = now_ns
        self._thorough_ns = now_ns
        self._dropped_to = 0
        self._reserved_to = 0
        self._started = 0
        # A killed predecessor may have synced beyond its mark; the time of its last synced record is then unknown.
        timestamp_ms = words[control.WRITTEN_STORE_TIMESTAMP_MS]
        all_synced = words[control.WRITTEN] == words[control.FLUSHER_SYNCED]
        self._synced_timestamp_ms = timestamp_ms if all_synced else None

    def flush(self, now_ns: int, *, thorough: bool = False) -> int:
        """Sync if enough pages are dirty or the thorough interval has passed; returns the bytes."""
        words = self._words
        if self._options.sync_flush or self._syncs.has_failed():
            return 0
        # Read the time before the position: the time of an earlier record is harmless.
        timestamp_ms = words[control.WRITTEN_STORE_TIMESTAMP_MS]
        written = words[control.WRITTEN]
        synced = words[control.FLUSHER_SYNCED]
        interval_ns = self._options.flush_commit_log_thorough_interval * 1_000_000
        thorough = thorough or now_ns - self._thorough_ns >= interval_ns
        dirty_pages = written // PAGE_BYTES - synced // PAGE_BYTES
        done = 0
        if written > synced and (thorough or dirty_pages >= self._options.flush_commit_log_least_pages):
            self._sync(synced, written)
            # Another role's sync may have failed meanwhile.
            if self._syncs.has_failed():
                return 0
            words[control.FLUSHER_SYNCED] = written
            self._synced_timestamp_ms = timestamp_ms
            done = written - synced
        if thorough:
            self._thorough_ns = now_ns
            words.add(control.COMMITLOG_FORCED_PASSES, 1)
            words[control.COMMITLOG_FORCED_NS] = now_ns
        return done

    def start_writeback(self) -> int:
        """Start writeback of whole pages written since; returns their bytes, 0 while they are few.

        This shortens the next sync, which also reports any write error.
        """
        words = self._words
        start = max(self._started, words[control.FLUSHER_SYNCED])
        written = words[control.WRITTEN]
        if written - start < START_BYTES or self._options.sync_flush or self._syncs.has_failed():
            return 0
        segment = self._segments.start_of(start)
        stop = min(written - written % PAGE_BYTES, segment + self._segments.segment_size)
        with self._io.opened(self._segments.path(segment), write=True) as fd:
            self._io.start_writeback(fd, start - segment, stop - start)
        self._started = stop
        return stop - start

    def _sync(self, start: int, stop: int) -> None:
        self._io.crash_point("flush.before_msync")
        sync_log(self._segments, self._syncs, start, stop)
        self._words.add(control.COMMITLOG_SYNCS, 1)
        self._io.crash_point("flush.after_msync")

    def _durable_end(self) -> tuple[int, int | None]:
        """End of the durable log, and the store time of a record near it if known."""
        words = self._words
        # Read the time before its position.
        writer_timestamp_ms = words[control.WRITER_SYNCED_STORE_TIMESTAMP_MS]
        writer_synced, flusher_synced = words[control.WRITER_SYNCED], words[control.FLUSHER_SYNCED]
        if writer_synced >= flusher_synced:
            return writer_synced, writer_timestamp_ms
        return flusher_synced, self._synced_timestamp_ms

    def move_mark(self, now_ns: int, *, at_once: bool = False) -> bool:
        """Move the durable mark and RocketMQ's checkpoint, at most once a second; whether it moved."""
        words = self._words
        if self._syncs.has_failed():
            return False
        flushed, timestamp_ms = self._durable_end()
        if timestamp_ms is None or flushed == words[control.COMMITLOG_MARK]:
            # The next sync has a time. A start would take an earlier time for the time of the last record.
            return False
        if not at_once and now_ns - self._marked_ns < MARK_INTERVAL_NS:
            return False
        self._marked_ns = now_ns
        if not self._mark.move(flushed, timestamp_ms):
            return False
        store_checkpoint(
            self._io,
            self._paths.checkpoint,
            {
                checkpoint_layout.PHYSIC_TIMESTAMP: timestamp_ms,
                checkpoint_layout.CONFIRM_PHYSICAL_OFFSET: flushed,
            },
            self._syncs,
        )
        words[control.COMMITLOG_MARK] = flushed
        return True

    def make_segments_ahead(self) -> int:
        """Create segments until enough exist after `written`; returns the number created."""
        words, size = self._words, self._segments.segment_size
        ahead = min(AHEAD_SEGMENTS_MAX, max(1, AHEAD_BYTES // size)) * size
        needed = self._segments.start_of(max(words[control.WRITTEN], words[control.RESERVED_END])) + size + ahead
        created = 0
        warm = self._options.warm_mapped_file_enable
        while (start := words[control.SEGMENTS_READY_END]) < needed and not self._syncs.has_failed():
            try:
                make_segment(self._io, self._paths, start, size, warm=warm, syncs=self._syncs)
            except OSError as error:
                words[control.SEGMENT_ERRNO] = error.errno or errno.EIO
                if isinstance(error, FailedSyncError):
                    raise
                return created
            words[control.SEGMENT_ERRNO] = 0
            words[control.SEGMENTS_READY_END] = start + size
            created += 1
        return created

    def reserve_space(self) -> int:
        """Reserve disk space after the log's end; returns the bytes.

        It is as much as the log has, up to a segment. The log is written by `pwrite` alone: without reserved space a
        full disk is an error of that call.
        """
        words, size = self._words, self._segments.segment_size
        written = max(words[control.WRITTEN], words[control.RESERVED_END])
        start, ahead = max(self._reserved_to, written), min(max(RESERVED_BYTES_MIN, written), size)
        if size <= RESERVED_BYTES_MIN or 2 * (start - written) >= ahead:
            return 0
        _used, free = self._io.disk_usage(self._segments.folder)
        stop = min(written + min(ahead, free // AHEAD_OF_FREE), words[control.SEGMENTS_READY_END])
        for segment in range(self._segments.start_of(start), stop, size):
            begin = max(start - segment, 0)
            with self._io.opened(self._segments.path(segment), write=True) as fd:
                self._io.reserve(fd, begin, min(stop - segment, size) - begin)
        self._reserved_to = max(start, stop)
        return self._reserved_to - start

    def drop_pages(self) -> int:
        """Drop cached pages well below dispatch and flush; returns the bytes dropped."""
        distance = self._options.page_cache_behind_bytes
        if distance == 0:
            return 0
        words = self._words
        flushed = max(words[control.WRITER_SYNCED], words[control.FLUSHER_SYNCED])
        limit = min(flushed, words[control.DISPATCHED]) - distance
        start = max(self._dropped_to, words[control.MIN_PHYSICAL_OFFSET])
        segment = self._segments.start_of(start)
        stop = min(limit - limit % DROP_STEP_BYTES, segment + self._segments.segment_size)
        if stop <= start:
            return 0
        dropped = stop - start
        try:
            with self._io.opened(self._segments.path(segment)) as fd:
                self._io.drop_cache(fd, start - segment, dropped)
        except FileNotFoundError:
            dropped = 0
        self._dropped_to = stop
        return dropped

    def delete_unused_segments(self) -> int:
        """Delete empty segments created ahead, at a clean stop; returns the number deleted."""
        words, size = self._words, self._segments.segment_size
        if self._syncs.has_failed():
            return 0
        keep = self._segments.start_of(words[control.WRITTEN]) + size
        deleted = 0
        while words[control.SEGMENTS_READY_END] > keep:
            start = words[control.SEGMENTS_READY_END] - size
            words[control.SEGMENTS_READY_END] = start
            self._io.unlink(self._segments.path(start))
            deleted += 1
        if deleted:
            self._syncs.sync_folder(self._paths.commit_log)
        return deleted
