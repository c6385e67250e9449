"""The control file of one store: what the roles of a running group tell each other, and what tools read.

A supervisor makes a new one at each start; roles inherit its map by fork. A word has one owner (`layout.control`); this
class does not check who stores. Positions are trusted only under the supervisor that made the file: after that they
are what was true last, which is what `mqproc stat` wants to show.
"""

from __future__ import annotations

import mmap
import secrets
import sys
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io.clock import Clock
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import map_file, take_words
from mqproc.ipc.words import Words
from mqproc.layout import control as layout
from mqproc.paths import StorePaths


class Control:
    """Words of the control file, by the indexes of `mqproc.layout.control`."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.words = Words(mapping)
        self.cells: NDArray[np.int64] = np.frombuffer(mapping, dtype=np.int64)
        """The same words as an array, for kernels and bells."""

    @classmethod
    def create(cls, io: StoreIO, paths: StorePaths, clock: Clock, pid: int) -> Control:
        """A new file in the place of any old one: next epoch, the old store id, everything else 0.

        The caller holds the store's lock. It is renamed into place when complete, so a reader never sees half of it.
        """
        epoch, store_id = _identity(io, paths)
        temporary = paths.control.with_name("control.tmp")
        io.make_folder(paths.own, mode=0o700)
        io.unlink(temporary)
        fd = io.open(temporary, write=True, create=True, mode=0o600)
        try:
            # Allocated, since a store into a hole on a full disk is a SIGBUS.
            io.allocate(fd, 0, layout.FILE_SIZE)
            control = cls(io.map(fd, layout.FILE_SIZE, write=True))
        except OSError:
            # A full disk needs what was allocated of it.
            io.unlink(temporary)
            raise
        finally:
            io.close(fd)
        control.store(layout.EPOCH, epoch + 1)
        control.store(layout.STORE_ID, store_id or secrets.randbits(62) | 1)
        control.store(layout.SUPERVISOR_PID, pid)
        control.store(layout.GROUP_STARTED_MS, clock.time_ms())
        control.store(layout.SUPERVISOR_HEARTBEAT_NS, clock.monotonic_ns())
        control.store(layout.HEADER_VERSION, layout.VERSION)
        control.store(layout.HEADER_MAGIC, layout.MAGIC)
        io.crash_point("control.created")
        io.rename(temporary, paths.control)
        io.crash_point("control.epoch")
        return control

    @classmethod
    def open(cls, io: StoreIO, paths: StorePaths, *, write: bool = False) -> Control:
        """The file as it is. Raises NotRunningError when there is none, CorruptStoreError when it cannot be read,
        OtherVersionError when another version of mqproc has made it.

        A tool that goes on reading asks `is_current` now and then: a new supervisor makes a new file.
        """
        return cls(map_file(io, paths, write=write))

    def load(self, index: int) -> int:
        """One word."""
        return self.words[index]

    def store(self, index: int, value: int) -> None:
        """One word, in one go. Only its owner does this."""
        self.words[index] = value

    def add(self, index: int, value: int) -> None:
        """Add to a word that only this process stores."""
        self.words.add(index, value)

    def snapshot(self) -> dict[str, int]:
        """Every word by name, in the layout's order."""
        return take_words(self.words)

    def close(self) -> None:
        """Unmap. Views that others made of `cells` keep the map until they go too."""
        self.words.close()
        del self.cells
        try:
            self._mapping.close()
        except BufferError:
            return

    # Figures that follow from several words

    @property
    def flushed(self) -> int:
        """The log is durable below this."""
        return max(self.load(layout.WRITER_SYNCED), self.load(layout.FLUSHER_SYNCED))

    def confirmed(self, *, sync_flush: bool) -> int:
        """The log may be seen by consumers below this."""
        return self.flushed if sync_flush else self.load(layout.WRITTEN)

    @property
    def dispatch_behind_bytes(self) -> int:
        """How much of the log is not in queues and index yet."""
        dispatched = self.load(layout.DISPATCHED)
        return max(0, self.load(layout.WRITTEN) - dispatched)

    @property
    def sync_errno(self) -> int:
        """errno of a failed sync, 0 when none failed."""
        return layout.sync_errno(self.words.cells)

    @property
    def read_only(self) -> bool:
        """A sync failed, so what is durable is not known: nothing more is taken."""
        return self.sync_errno != 0

    @property
    def damage_holes(self) -> int:
        """Damaged ranges of the log that are served around."""
        return self.load(layout.DAMAGE_HOLES) + self.load(layout.DISPATCH_HOLES)

    @property
    def damage_read_only(self) -> bool:
        """There is damage, and `on_damage = read_only`: no messages are taken; all else goes on."""
        cells = self.words.cells
        return bool(cells[layout.DAMAGE_READ_ONLY] or cells[layout.DISPATCH_READ_ONLY])

    def is_current(self, io: StoreIO, paths: StorePaths) -> bool:
        """False when another supervisor has made a newer file since this one was opened."""
        try:
            fd = io.open(paths.control)
        except FileNotFoundError:
            return False
        try:
            places = [word * layout.WORD_SIZE for word in layout.IDENTITY]
            there = [io.pread(fd, layout.WORD_SIZE, place) for place in places]
        finally:
            io.close(fd)
        found = [int.from_bytes(word, sys.byteorder, signed=True) for word in there]
        return found == [self.load(word) for word in layout.IDENTITY]


def role_words(words: Mapping[str, int], role: str) -> dict[str, int]:
    """A snapshot's words of one role, without the role's name in front."""
    prefix = f"{role}."
    return {name.removeprefix(prefix): value for name, value in words.items() if name.startswith(prefix)}


def _identity(io: StoreIO, paths: StorePaths) -> tuple[int, int]:
    """Epoch and store id of the file that is there; zeros when it is none of ours."""
    try:
        old = Control.open(io, paths)
    except (NotRunningError, CorruptStoreError, OSError):
        return 0, 0
    try:
        epoch, store_id = old.load(layout.EPOCH), old.load(layout.STORE_ID)
    finally:
        old.close()
    # A semaphore's name has 8 hex digits for the epoch: anything else is garbage behind a valid magic.
    return (epoch, store_id) if 0 < epoch < 1 << 31 and 0 < store_id < 1 << 62 else (0, 0)
