"""What a writer leaves unfinished: taken back by itself when a write fails, by its successor when it was killed.

The log may hold bytes in [`written`, `reserved_end`) that nobody was promised. They must read as zeros on disk too
before anything is appended there: else a power loss could bring them back behind shorter records.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from mqproc.io import FailedSyncError, StoreIO
from mqproc.ipc.words import Words
from mqproc.kernels.append_counts import uncount
from mqproc.kernels.scan import MAX_STORE_TIMESTAMP_MS, SCAN_SIZE, update_next_offsets
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.store.final_syncs import Syncing
from mqproc.store.queue_table import QueueTable
from mqproc.store.segments import LogSegments

_NONE_OPEN: Final[Mapping[int, int]] = MappingProxyType({})


class TailNotClearedError(RuntimeError):
    """Bytes behind `written` could not be made zeros on disk. The writer must end: appending would mix with them."""


def clear_unpublished(
    io: StoreIO, syncs: Syncing, words: Words, segments: LogSegments, fds: Mapping[int, int] = _NONE_OPEN
) -> None:
    """Take back what was counted behind WRITTEN, zero and sync [WRITTEN, RESERVED_END), then lower RESERVED_END.

    `fds` are descriptors of segments, by their starts, that are open for writing: none may be left for others.
    Raises TailNotClearedError, and FailedSyncError: then the store is read-only and nothing is appended there. So it is
    on a file system that is read-only by now, as many become by an error of their disk.
    """
    uncount(np.frombuffer(words.mapping, np.int64))
    written, reserved_end = words[words_of.WRITTEN], words[words_of.RESERVED_END]
    if reserved_end > written:
        try:
            zero_range(io, segments, written, reserved_end, fds)
        except OSError as error:
            if error.errno == errno.EROFS:
                words[words_of.WRITER_SYNC_ERRNO] = error.errno
                raise FailedSyncError(error.errno, os.strerror(error.errno), error.filename) from error
            raise TailNotClearedError(f"log [{written}, {reserved_end}) could not be zeroed: {error}") from error
        sync_range(io, syncs, segments, written, reserved_end, fds)
    words[words_of.RESERVED_END] = written


def zero_range(io: StoreIO, segments: LogSegments, start: int, stop: int, fds: Mapping[int, int] = _NONE_OPEN) -> None:
    """Make [start, stop) of the log read as zeros, over all segments that it touches; missing ones are passed over.

    From the last one backwards: killed in between, it leaves no whole records behind zeros, which would be damage.
    """
    for segment in reversed(segments_within(segments, start, stop)):
        with _opened(io, segments, segment, fds) as fd:
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
        with _opened(io, segments, segment, fds) as fd:
            syncs.sync(fd)


@contextlib.contextmanager
def _opened(io: StoreIO, segments: LogSegments, start: int, fds: Mapping[int, int]) -> Iterator[int]:
    """A segment's descriptor for writing, opened where none of `fds` is its."""
    if start in fds:
        yield fds[start]
        return
    fd = io.open(segments.path(start), write=True)
    try:
        yield fd
    finally:
        io.close(fd)


def segments_within(segments: LogSegments, start: int, stop: int) -> list[int]:
    """Starts of the segments that [start, stop) touches and that are there."""
    if stop <= start:
        return []
    starts = range(segments.start_of(start), stop, segments.segment_size)
    return [segment for segment in starts if segments.io.exists(segments.path(segment))]


def take_over(
    io: StoreIO, syncs: Syncing, words: Words, segments: LogSegments, table: QueueTable, *, sync_flush: bool
) -> None:
    """Put a killed writer's work in order: zero what it had reserved, count what it had published.

    Only under the same living supervisor, whose control words are then the truth. Raises TailNotClearedError.
    """
    with contextlib.suppress(FailedSyncError):
        clear_unpublished(io, syncs, words, segments)
    written = words[words_of.WRITTEN]
    latest_ms = count_published(segments, table, words[words_of.TABLE_AT], written)
    if latest_ms > words[words_of.WRITTEN_STORE_TIMESTAMP_MS]:
        words[words_of.WRITTEN_STORE_TIMESTAMP_MS] = latest_ms
    words[words_of.TABLE_AT] = written
    synced = words[words_of.WRITER_SYNCED]
    if sync_flush and synced < written:
        with contextlib.suppress(FailedSyncError):
            sync_range(io, syncs, segments, synced, written)
            words[words_of.WRITER_SYNCED] = written
            words[words_of.WRITER_SYNCED_STORE_TIMESTAMP_MS] = words[words_of.WRITTEN_STORE_TIMESTAMP_MS]


def count_published(segments: LogSegments, table: QueueTable, start: int, stop: int) -> int:
    """Raise next offsets in the table to what the records of [start, stop) took; returns their greatest store time."""
    next_offsets = np.zeros(table.capacity, np.int64)
    out = np.zeros(SCAN_SIZE, np.int64)
    column = table.column(table_layout.NEXT_OFFSET)
    next_offsets[: len(column)] = column
    latest_ms = 0
    while start < stop:
        base = segments.start_of(start)
        end = min(stop, base + segments.segment_size)
        update_next_offsets(
            segments.view(base),
            start - base,
            end - base,
            base,
            table.bytes_view,
            table.cells,
            table.slots,
            next_offsets,
            out,
        )
        latest_ms = max(latest_ms, int(out[MAX_STORE_TIMESTAMP_MS]))
        start = end
    for number in np.flatnonzero(next_offsets[: len(column)] > column).tolist():
        table.store(number, table_layout.NEXT_OFFSET, int(next_offsets[number]))
    return latest_ms
