"""Deleting files without holding others up: the name goes at once, the space in steps.

To free 1 GiB at once keeps the file system busy for a quarter of a second, and a write beside it waits for tens of
milliseconds. So a large file is kept open over its deletion, its pages are let go piece by piece, and then it is
shortened piece by piece; but only when it is surely out of reach, since whoever reads it must be able to finish.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.config import MIB
from mqproc.io import StoreIO

STEP_BYTES: Final = 16 * MIB
# A file that somebody has open for longer than this is left to him: his last close frees it.
PATIENCE_NS: Final = 120_000_000_000


@dataclass(slots=True)
class _Deleted:
    """A file without a name. Its pages below `dropped` are let go, and it has `size` bytes left."""

    fd: int
    size: int
    since_ns: int
    dropped: int = 0


class DeletedFiles:
    """Deleted files of one process whose space is not given back yet. What is left at `close` goes at once."""

    def __init__(self, io: StoreIO) -> None:
        self._io = io
        self._files: deque[_Deleted] = deque()

    def delete(self, path: Path, now_ns: int) -> int:
        """Take a file's name away, if it has one; the bytes that it takes on disk. The caller syncs the folder."""
        try:
            size = self._io.allocated_of(path)
            fd = self._io.open(path, write=True) if size > STEP_BYTES else -1
        except FileNotFoundError:
            return 0
        try:
            length = self._io.size(fd) if fd >= 0 else 0
            self._io.unlink(path)
        except OSError:
            if fd >= 0:
                self._io.close(fd)
            raise
        if fd >= 0:
            self._files.append(_Deleted(fd, length, now_ns))
        return size

    def __len__(self) -> int:
        return len(self._files)

    @property
    def pending_bytes(self) -> int:
        """What deleted files take still."""
        return sum(file.size for file in self._files)

    def step(self, now_ns: int) -> bool:
        """Give a piece back; False when there is nothing to do now: none is left, or all are in use."""
        for _ in range(len(self._files)):
            file = self._files[0]
            if self._step(file):
                if file.size == 0:
                    self._forget_first()
                return True
            if now_ns - file.since_ns > PATIENCE_NS:
                self._forget_first()
                return True
            self._files.rotate(-1)
        return False

    def close(self) -> None:
        """Close what is left."""
        while self._files:
            self._forget_first()

    def _step(self, file: _Deleted) -> bool:
        if file.dropped < file.size:
            # Harmless to readers: their pages stay, or come back from the disk.
            self._io.drop_cache(file.fd, file.dropped, STEP_BYTES)
            file.dropped += STEP_BYTES
            return True
        if not self._io.is_out_of_reach(file.fd):
            return False
        file.size = max(0, file.size - STEP_BYTES)
        file.dropped = file.size
        self._io.set_size(file.fd, file.size)
        return True

    def _forget_first(self) -> None:
        self._io.close(self._files.popleft().fd)
