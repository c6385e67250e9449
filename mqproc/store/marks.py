"""Durable marks: reading, checking and moving them (layout/marks.py)."""

from __future__ import annotations

import zlib
from pathlib import Path

from mqproc.io import StoreIO
from mqproc.layout import marks as layout
from mqproc.store.final_syncs import Syncing
from mqproc.store.segments import LogSegments


def fingerprint(io: StoreIO, segments: LogSegments, offset: int) -> int | None:
    """CRC-32 of up to 4 KiB of log before `offset`, not crossing its segment; None when the segment is not there.

    Where the log begins, or goes on behind a segment that is gone, nothing lies before a segment's start: 0.
    """
    if offset == 0:
        return 0
    start = segments.start_of(offset - 1)
    first = max(start, offset - layout.FINGERPRINT_BYTES)
    try:
        fd = io.open(segments.path(start))
    except FileNotFoundError:
        return 0 if segments.start_of(offset) == offset and io.exists(segments.path(offset)) else None
    try:
        data = io.pread(fd, offset - first, first - start)
    finally:
        io.close(fd)
    return zlib.crc32(data) if len(data) == offset - first else None


class DurableMark:
    """One mark file. Whoever makes the row durable owns it and is the only one that calls `move`.

    `syncs` makes the mark itself durable; a role that moves it gives its FinalSyncs.
    """

    def __init__(self, io: StoreIO, path: Path, segments: LogSegments, syncs: Syncing | None = None) -> None:
        self._io = io
        self._syncs = syncs or io
        self._path = path
        self._segments = segments
        self.mark = self._read()

    def valid(self) -> layout.Mark | None:
        """The mark, when the log before it is still what it was; else None: another program wrote the log since."""
        return self.mark if self._fits() else None

    def stands_at(self, offset: int) -> bool:
        """Whether the mark says just this, and the log before it is still what it was."""
        return self.mark is not None and self.mark.offset == offset and self._fits()

    def _fits(self) -> bool:
        mark = self.mark
        return mark is not None and fingerprint(self._io, self._segments, mark.offset) == mark.fingerprint

    def move(self, offset: int, store_timestamp_ms: int) -> bool:
        """Say that everything below `offset` is durable; returns when the mark itself is.

        False when it was not moved: the log before it has been deleted.
        """
        value = fingerprint(self._io, self._segments, offset)
        if value is None:
            return False
        sequence = self.mark.sequence + 1 if self.mark else 1
        mark = layout.Mark(sequence, offset, store_timestamp_ms, value)
        self._io.crash_point("flush.before_mark")
        fd = self._io.open(self._path, write=True, create=True, mode=0o600)
        try:
            new = self._io.size(fd) < layout.FILE_SIZE
            if new:
                self._io.allocate(fd, 0, layout.FILE_SIZE)
            slot, data = layout.slot_offset(sequence), layout.encode(mark)
            self._io.crash_amid("mark.slot_half", fd, data, slot)
            self._io.pwrite(fd, data, slot)
            self._io.crash_point("mark.slot_written")
            self._syncs.sync(fd)
        finally:
            self._io.close(fd)
        if new:
            self._syncs.sync_folder(self._path.parent)
        self._io.crash_point("mark.synced")
        self.mark = mark
        return True

    def take_back(self, offset: int) -> None:
        """From there on it vouches for nothing any more, until it is moved again.

        Before what lies there is made anew: of that a kill or a loss of power leaves some, perhaps just what makes it
        seem whole to the next recovery.
        """
        mark = self.valid()
        if mark is not None and offset < mark.offset:
            self.move(offset, mark.store_timestamp_ms)

    def drop(self) -> None:
        """Forget the mark: the next recovery looks at everything."""
        self._io.unlink(self._path)
        self.mark = None

    def _read(self) -> layout.Mark | None:
        try:
            return layout.decode(self._io.read_file(self._path))
        except (FileNotFoundError, IsADirectoryError):
            return None


class DistrustedMark(DurableMark):
    """A mark that vouches for nothing, though it tells how far the log once was: so that everything is looked at."""

    def valid(self) -> None:
        return None
