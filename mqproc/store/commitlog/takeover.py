"""Removal of the unpublished tail of the log, after a failed write or a kill of the writer.

The log may hold bytes in [`written`, `reserved_end`) that were never acknowledged. They must be zero on disk before
anything is appended there: after a power loss they could reappear after shorter records.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.control_words import Words
from mqproc.kernels.append_frame import uncount
from mqproc.kernels.scan import MAX_STORE_TIMESTAMP_MS, SCAN_SIZE, update_next_offsets
from mqproc.layout import control
from mqproc.layout import queue_table as table_layout
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.sync_guard import Syncing

_NONE_OPEN: Final[Mapping[int, int]] = MappingProxyType({})


class TailNotClearedError(RuntimeError):
    """The bytes after `written` could not be zeroed on disk, so the writer must exit."""


def clear_unpublished(
    io: StoreIO, syncs: Syncing, words: Words, segments: LogSegments, fds: Mapping[int, int] = _NONE_OPEN
) -> None:
    """Zero and sync [WRITTEN, RESERVED_END), undo counts, then lower RESERVED_END.

    `fds`: open descriptors of segments by their starts, used because no more descriptors may be available.
    Raises TailNotClearedError, or FailedSyncError, after which the store is read-only. The latter also applies to a
    file system that has become read-only, as many do after a disk error.
    """
    uncount(np.frombuffer(words.mapping, np.int64))
    written, reserved_end = words[control.WRITTEN], words[control.RESERVED_END]
    if reserved_end > written:
        try:
            zero_range(io, segments, written, reserved_end, fds)
        except OSError as error:
            if error.errno == errno.EROFS:
                words[control.WRITER_SYNC_ERRNO] = error.errno
                raise FailedSyncError(error.errno, os.strerror(error.errno), error.filename) from error
            raise TailNotClearedError(f"log [{written}, {reserved_end}) could not be zeroed: {error}") from error
        sync_range(io, syncs, segments, written, reserved_end, fds)
    words[control.RESERVED_END] = written


def zero_range(io: StoreIO, segments: LogSegments, start: int, stop: int, fds: Mapping[int, int] = _NONE_OPEN) -> None:
    """Make [start, stop) of the log read as zeros; missing segments are skipped.

    It starts with the last segment: a kill in between leaves no intact records after zeros, which would be damage.
    """
    for segment in reversed(segments_within(segments, start, stop)):
        with _open_segment(io, segments, segment, fds) as fd:
            begin = max(start, segment)
            io.zero(fd, begin - segment, min(stop, segment + segments.segment_size) - begin)


def sync_range(
    io: StoreIO,
    syncs: Syncing,
    segments: LogSegments,
    start: int,
    stop: int,
    fds: Mapping[int, int] = _NONE_OPEN,
) -> None:
    """Sync the segments of [start, stop) of the log. Raises FailedSyncError."""
    for segment in segments_within(segments, start, stop):
        with _open_segment(io, segments, segment, fds) as fd:
            syncs.sync(fd)


@contextlib.contextmanager
def _open_segment(io: StoreIO, segments: LogSegments, start: int, fds: Mapping[int, int]) -> Iterator[int]:
    """A segment's descriptor for writing: from `fds`, or opened for the block."""
    if start in fds:
        yield fds[start]
        return
    with io.opened(segments.path(start), write=True) as fd:
        yield fd


def segments_within(segments: LogSegments, start: int, stop: int) -> list[int]:
    """Starts of the existing segments that overlap [start, stop)."""
    if stop <= start:
        return []
    starts = range(segments.start_of(start), stop, segments.segment_size)
    return [segment for segment in starts if segments.io.exists(segments.path(segment))]


def take_over(
    io: StoreIO, syncs: Syncing, words: Words, segments: LogSegments, table: QueueTable, *, sync_flush: bool
) -> None:
    """Finish a killed writer's work: zero the reserved range, count published records.

    Valid only under the same running supervisor, whose control words are then correct. Raises TailNotClearedError.
    """
    with contextlib.suppress(FailedSyncError):
        clear_unpublished(io, syncs, words, segments)
    written = words[control.WRITTEN]
    latest_ms = restore_next_offsets(segments, table, words[control.TABLE_AT], written)
    if latest_ms > words[control.WRITTEN_STORE_TIMESTAMP_MS]:
        words[control.WRITTEN_STORE_TIMESTAMP_MS] = latest_ms
    words[control.TABLE_AT] = written
    synced = words[control.WRITER_SYNCED]
    if sync_flush and synced < written:
        with contextlib.suppress(FailedSyncError):
            sync_range(io, syncs, segments, synced, written)
            words[control.WRITER_SYNCED] = written
            words[control.WRITER_SYNCED_STORE_TIMESTAMP_MS] = words[control.WRITTEN_STORE_TIMESTAMP_MS]


def restore_next_offsets(segments: LogSegments, table: QueueTable, start: int, stop: int) -> int:
    """Raise next offsets in the table for records of [start, stop); returns the last store time."""
    next_offsets = np.zeros(table.capacity, np.int64)
    out = np.zeros(SCAN_SIZE, np.int64)
    column = table.column(table_layout.NEXT_OFFSET)
    next_offsets[: len(column)] = column
    latest_ms = 0
    while start < stop:
        base = segments.start_of(start)
        end = min(stop, base + segments.segment_size)
        update_next_offsets(segments.view(base), start - base, end - base, base, *table.arrays, next_offsets, out)
        latest_ms = max(latest_ms, int(out[MAX_STORE_TIMESTAMP_MS]))
        start = end
    for number in np.flatnonzero(next_offsets[: len(column)] > column).tolist():
        table.store(number, table_layout.NEXT_OFFSET, int(next_offsets[number]))
    return latest_ms
