"""The control file: state shared by the roles of a running group, and read by tools.

A supervisor creates a new file at each start; roles inherit its map by fork. Each word has one owner
(`layout.control`), which this class does not enforce. Positions are valid only under the supervisor that created the
file; afterwards they are the last known positions, as `mqproc stat` shows them.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.control_words import Words, map_file, read_word, snapshot_words
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.util.procfs import pid_namespace


class Control:
    """Words of the control file, by the indexes of `mqproc.layout.control`."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.words = Words(mapping)
        self.cells: NDArray[np.int64] = np.frombuffer(mapping, dtype=np.int64)
        """The same words as an array, for kernels and bells."""

    @classmethod
    def create(cls, io: StoreIO, paths: StorePaths, clock: Clock, pid: int) -> Control:
        """Replace the file: next epoch, same store id, all other words 0.

        The caller holds the store's lock. The file is renamed into place when complete, so readers never see a
        partial file.
        """
        epoch, store_id = _identity(io, paths)
        io.make_folder(paths.own, mode=0o700)
        with io.new_file(paths.control) as fd:
            # Allocated, since a store to a hole on a full disk raises SIGBUS.
            io.allocate(fd, 0, layout.FILE_SIZE)
            control = cls(io.map(fd, layout.FILE_SIZE, write=True))
            control.store(layout.EPOCH, epoch + 1)
            control.store(layout.STORE_ID, store_id or secrets.randbits(62) | 1)
            control.store(layout.SUPERVISOR_PID, pid)
            control.store(layout.PID_NAMESPACE, pid_namespace())
            control.store(layout.GROUP_STARTED_MS, clock.time_ms())
            control.store(layout.SUPERVISOR_HEARTBEAT_NS, clock.monotonic_ns())
            control.store(layout.HEADER_VERSION, layout.VERSION)
            control.store(layout.HEADER_MAGIC, layout.MAGIC)
            io.crash_point("control.created")
        io.crash_point("control.epoch")
        return control

    @classmethod
    def open(cls, io: StoreIO, paths: StorePaths, *, write: bool = False) -> Control:
        """Open the existing file.

        Raises NotRunningError without a file, CorruptStoreError for an invalid one, OtherVersionError for the layout of
        another version. A long-running tool checks `is_current`: a new supervisor creates a new file.
        """
        return cls(map_file(io, paths, write=write))

    def load(self, index: int) -> int:
        """Load a word."""
        return self.words[index]

    def store(self, index: int, value: int) -> None:
        """Store a word atomically. Only its owner does this."""
        self.words[index] = value

    def add(self, index: int, value: int) -> None:
        """Add to a word that only this process stores."""
        self.words.add(index, value)

    def snapshot(self) -> dict[str, int]:
        """All words by name, in the layout's order."""
        return snapshot_words(self.words)

    def close(self) -> None:
        """Unmap. Existing views of `cells` keep the map alive."""
        self.words.close()
        del self.cells
        with contextlib.suppress(BufferError):
            self._mapping.close()

    # Values derived from several words

    @property
    def flushed(self) -> int:
        """Log position below which everything is durable."""
        return max(self.load(layout.WRITER_SYNCED), self.load(layout.FLUSHER_SYNCED))

    def confirmed(self, *, sync_flush: bool) -> int:
        """Log position below which consumers may see messages."""
        return self.flushed if sync_flush else self.load(layout.WRITTEN)

    @property
    def dispatch_behind_bytes(self) -> int:
        """Bytes of the log that are not in queues and index yet."""
        dispatched = self.load(layout.DISPATCHED)  # Load it before WRITTEN, which it must not exceed.
        return max(0, self.load(layout.WRITTEN) - dispatched)

    @property
    def sync_errno(self) -> int:
        """errno of a failed sync, 0 without one."""
        return layout.sync_errno(self.words.cells)

    @property
    def read_only(self) -> bool:
        """Whether a sync failed: the durable position is unknown, so writes are refused."""
        return self.sync_errno != 0

    @property
    def damage_holes(self) -> int:
        """Number of damaged log ranges that reads skip."""
        return self.load(layout.DAMAGE_HOLES) + self.load(layout.DISPATCH_HOLES)

    @property
    def damage_read_only(self) -> bool:
        """Whether messages are refused because of damage and `on_damage = read_only`."""
        cells = self.words.cells
        return bool(cells[layout.DAMAGE_READ_ONLY] or cells[layout.DISPATCH_READ_ONLY])

    def is_current(self, io: StoreIO, paths: StorePaths) -> bool:
        """Whether no other supervisor has replaced the file since it was opened."""
        try:
            with io.opened(paths.control) as fd:
                found = [read_word(io, fd, word) for word in layout.IDENTITY]
        except FileNotFoundError:
            return False
        return found == [self.load(word) for word in layout.IDENTITY]


def _identity(io: StoreIO, paths: StorePaths) -> tuple[int, int]:
    """Epoch and store id of an existing file; zeros when it is invalid."""
    try:
        with contextlib.closing(Control.open(io, paths)) as old:
            epoch, store_id = old.load(layout.EPOCH), old.load(layout.STORE_ID)
    except (NotRunningError, CorruptStoreError, OSError):
        return 0, 0
    # A semaphore's name has 8 hex digits for the epoch; other values are garbage after a valid magic.
    return (epoch, store_id) if 0 < epoch < 1 << 31 and 0 < store_id < 1 << 62 else (0, 0)
