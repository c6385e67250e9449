"""Durable marks and RocketMQ's checkpoint: how far log, queues and index are durable."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from mqproc.io.store_io import StoreIO
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import durable_marks as layout
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.sync_guard import Syncing


def fingerprint(io: StoreIO, segments: LogSegments, offset: int) -> int | None:
    """CRC-32 of up to 4 KiB of log before `offset`; None if its segment is missing.

    It is 0 at the start of a segment that has no predecessor.
    """
    if offset == 0:
        return 0
    start = segments.start_of(offset - 1)
    first = max(start, offset - layout.FINGERPRINT_BYTES)
    try:
        with io.opened(segments.path(start)) as fd:
            data = io.pread(fd, offset - first, first - start)
    except FileNotFoundError:
        return 0 if segments.start_of(offset) == offset and io.exists(segments.path(offset)) else None
    return zlib.crc32(data) if len(data) == offset - first else None


class DurableMark:
    """One mark file. The role that syncs the data owns it; only the owner calls `move`.

    `syncs` makes the mark itself durable; a role passes its SyncGuard.
    """

    def __init__(self, io: StoreIO, path: Path, segments: LogSegments, syncs: Syncing | None = None) -> None:
        self._io = io
        self._syncs = syncs or io
        self._path = path
        self._segments = segments
        self.mark = self._read()

    def valid(self) -> layout.Mark | None:
        """The mark if the log before it is unchanged; None if another program has written the log."""
        return self.mark if self._fits() else None

    def is_at(self, offset: int) -> bool:
        """Whether the mark is valid and at this offset."""
        return self.mark is not None and self.mark.offset == offset and self._fits()

    def _fits(self) -> bool:
        mark = self.mark
        return mark is not None and fingerprint(self._io, self._segments, mark.offset) == mark.fingerprint

    def move(self, offset: int, store_timestamp_ms: int) -> bool:
        """Declare everything below `offset` durable; returns after the mark itself is durable.

        Returns False without a move if the log before `offset` has been deleted.
        """
        value = fingerprint(self._io, self._segments, offset)
        if value is None:
            return False
        sequence = self.mark.sequence + 1 if self.mark else 1
        mark = layout.Mark(sequence, offset, store_timestamp_ms, value)
        self._io.crash_point("flush.before_mark")
        with self._io.opened(self._path, write=True, create=True, mode=0o600) as fd:
            new = self._io.size(fd) < layout.FILE_SIZE
            if new:
                self._io.allocate(fd, 0, layout.FILE_SIZE)
            slot, data = layout.slot_offset(sequence), layout.encode(mark)
            self._io.crash_amid("mark.slot_half", fd, data, slot)
            self._io.pwrite(fd, data, slot)
            self._io.crash_point("mark.slot_written")
            self._syncs.sync(fd)
        if new:
            self._syncs.sync_folder(self._path.parent)
        self._io.crash_point("mark.synced")
        self.mark = mark
        return True

    def lower(self, offset: int) -> None:
        """Withdraw the mark for data at or above `offset` before that data is rebuilt.

        A kill or power loss during the rebuild leaves some of it, which could look complete to the next recovery.
        """
        mark = self.valid()
        if mark is not None and offset < mark.offset:
            self.move(offset, mark.store_timestamp_ms)

    def drop(self) -> None:
        """Delete the mark: the next recovery checks everything."""
        self._io.unlink(self._path)
        self.mark = None

    def _read(self) -> layout.Mark | None:
        try:
            return layout.decode(self._io.read_file(self._path))
        except (FileNotFoundError, IsADirectoryError):
            return None


class DistrustedMark(DurableMark):
    """A mark that is never valid but keeps the previous end of the log: everything is checked."""

    def valid(self) -> None:
        return None


# RocketMQ's checkpoint file: each flusher stores its words, recovery and tools read all


def read_checkpoint(io: StoreIO, path: Path) -> checkpoint_layout.Checkpoint:
    """The six words; zeros if the file is missing, short or a folder."""
    try:
        return checkpoint_layout.decode(io.read_file(path))
    except (FileNotFoundError, IsADirectoryError):
        return checkpoint_layout.Checkpoint()


def ensure_checkpoint(io: StoreIO, path: Path) -> None:
    """Create the file if it is missing or has another length, keeping its words."""
    if io.exists(path) and io.size_of(path) == checkpoint_layout.FILE_SIZE:
        return
    io.write_file_atomically(path, checkpoint_layout.encode(read_checkpoint(io, path)))


def store_checkpoint(io: StoreIO, path: Path, words: Mapping[int, int], syncs: Syncing) -> None:
    """Store words by their offsets and sync. Each word has one owner."""
    with io.opened(path, write=True) as fd:
        for offset, value in words.items():
            io.pwrite(fd, value.to_bytes(8, "big", signed=True), offset)
            io.crash_point("checkpoint.word_stored")
        syncs.sync(fd)
