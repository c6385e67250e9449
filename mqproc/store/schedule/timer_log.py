"""The timer log: RocketMQ's `timerlog/` files, to which the keeper appends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.layout import timer_log as layout
from mqproc.paths import segment_name, segment_start
from mqproc.store.sync_guard import Syncing


class TimerLog:
    """A row of files of one size; positions count from the first file ever created."""

    def __init__(self, io: StoreIO, syncs: Syncing, folder: Path, file_size: int = layout.FILE_SIZE) -> None:
        self._io = io
        self._syncs = syncs
        self._folder = folder
        self._fds: dict[int, int] = {}
        starts = self.starts()
        # Existing files keep their size.
        found = io.size_of(folder / segment_name(starts[0])) if starts else 0
        self._configured = file_size
        self.file_size = found if found >= layout.FILE_SIZE_MIN else file_size
        self.begin = starts[0] if starts else 0
        self._buffer = bytearray()  # Units up to `end` that are not written yet.
        self.end = self.begin
        """Position after the last unit; set by `open_at` for existing files."""
        self.synced = self.end

    @property
    def files_end(self) -> int:
        """End of the last file; `begin` if none exists."""
        starts = self.starts()
        return starts[-1] + self.file_size if starts else self.begin

    def is_whole(self, end: int) -> bool:
        """Whether the files below `end` are contiguous and have their full length."""
        starts = [start for start in self.starts() if start < end]
        follow = all(later == earlier + self.file_size for earlier, later in itertools.pairwise(starts))
        sizes = {self._io.size_of(self._folder / segment_name(start)) for start in starts}
        return follow and sizes <= {self.file_size} and all(start % self.file_size == 0 for start in starts)

    def remove_all(self) -> None:
        self.close()
        for start in self.starts():
            self._io.unlink(self._folder / segment_name(start))
        self.file_size = self._configured
        self.begin = self.end = self.synced = 0

    def starts(self) -> list[int]:
        """Start positions of the existing files, ascending."""
        found = (segment_start(name) for name in self._io.names(self._folder))
        return sorted(start for start in found if start is not None)

    def open_at(self, end: int) -> None:
        """Continue at `end`, zeroing everything after it."""
        self.end = self.synced = max(end, self.begin)
        for start in self.starts():
            if start + self.file_size > self.end:
                fd = self._fd(start)
                self._io.set_size(fd, max(0, self.end - start))
                self._io.set_size(fd, self.file_size)

    def append(self, unit: bytes) -> int:
        """Append a unit, several that fit into one file, or other bytes; returns the position.

        They are buffered until `write_out`. Raises OSError, without a change, if a full file cannot be ended.
        """
        self._roll_for(len(unit))
        at = self.end
        self._buffer += unit
        self.end = at + len(unit)
        return at

    def room(self) -> int:
        """Number of units that fit into the current file. Raises OSError as `append`."""
        self._roll_for(layout.UNIT_SIZE)
        return (self.file_size - self.end % self.file_size - layout.END_SIZE) // layout.UNIT_SIZE

    def _roll_for(self, size: int) -> None:
        """Switch to the next file if these bytes and the end mark do not fit into the current one."""
        start = self.end - self.end % self.file_size
        if self.end + size + layout.END_SIZE > start + self.file_size:
            self.write_out()
            rest = start + self.file_size - self.end
            self._io.pwrite(self._fd(start), layout.END.pack(rest, 0, layout.END_MAGIC)[:rest], self.end - start)
            self.end = start + self.file_size

    def write_out(self) -> None:
        """Write the buffered units. Raises OSError and keeps them for the next call."""
        if self._buffer:
            begin = self.end - len(self._buffer)
            start = begin - begin % self.file_size
            self._io.pwrite(self._fd(start), self._buffer, begin - start)
            self._buffer.clear()

    def between(self, first: int, last: int) -> Iterator[NDArray[np.void]]:
        """Units from position `first` to position `last`, file by file."""
        while first <= last:
            start = first - first % self.file_size
            stop = min(last + layout.UNIT_SIZE, start + self._per_file * layout.UNIT_SIZE)
            yield np.frombuffer(self._io.pread(self._fd(start), stop - first, first - start), layout.UNIT_DTYPE)
            first = start + self.file_size

    def read(self, position: int) -> tuple[int, ...]:
        """Fields of a unit. Raises CorruptStoreError."""
        start = position - position % self.file_size
        data = self._io.pread(self._fd(start), layout.UNIT_SIZE, position - start) if position < self.end else b""
        if len(data) < layout.UNIT_SIZE or int.from_bytes(data[:4], "big") != layout.UNIT_SIZE:
            raise CorruptStoreError(f"{self._folder / segment_name(start)}: no unit at {position - start}")
        return layout.UNIT.unpack(data)

    def units(self, limit: int) -> Iterator[tuple[int, NDArray[np.void]]]:
        """(first position, units) of each file up to `limit`, each up to its first invalid unit."""
        for start in self.starts():
            if start >= limit:
                return
            size = min(self.file_size, limit - start)
            data = self._io.pread(self._fd(start), size - size % layout.UNIT_SIZE, 0)
            units = np.frombuffer(data, layout.UNIT_DTYPE, min(len(data) // layout.UNIT_SIZE, self._per_file))
            others = np.flatnonzero(units["size"] != layout.UNIT_SIZE)
            yield start, units[: int(others[0])] if len(others) else units

    def units_at(self, start: int) -> int:
        """Number of units that the file at `start` must have."""
        return min(self._per_file, max(0, self.end - start) // layout.UNIT_SIZE)

    @property
    def _per_file(self) -> int:
        return layout.units_per_file(self.file_size)

    def sync(self) -> None:
        """Make everything durable. Raises FailedSyncError."""
        self.write_out()
        if self.synced == self.end:
            return
        for start, fd in self._fds.items():
            if start + self.file_size > self.synced:
                self._syncs.sync(fd)
        self._syncs.sync_folder(self._folder)
        self.synced = self.end

    def delete_below(self, position: int) -> int:
        """Delete files that end at or below a position, except the last; returns their number."""
        gone = [start for start in self.starts()[:-1] if start + self.file_size <= position]
        for start in gone:
            if start in self._fds:
                self._io.close(self._fds.pop(start))
            self._io.unlink(self._folder / segment_name(start))
        self.begin = max(self.begin, *(start + self.file_size for start in gone)) if gone else self.begin
        return len(gone)

    def close(self) -> None:
        for fd in self._fds.values():
            self._io.close(fd)
        self._fds.clear()

    def _fd(self, start: int) -> int:
        fd = self._fds.get(start)
        if fd is None:
            self._io.make_folder(self._folder)
            path = self._folder / segment_name(start)
            is_new = not self._io.exists(path)
            fd = self._io.open(path, write=True, create=True)
            if is_new:
                self._io.set_size(fd, self.file_size)
            self._fds[start] = fd
        return fd
