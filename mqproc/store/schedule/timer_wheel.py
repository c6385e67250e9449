"""The timer wheel: RocketMQ's `timerwheel` file, derived from the timer log.

Slots are read and written one by one instead of mapped, so that a full disk is an error and not a signal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.layout import timer_wheel as layout
from mqproc.layout.timer_log import NO_POSITION
from mqproc.paths import StorePaths
from mqproc.store.sync_guard import Syncing


class WheelSlot(NamedTuple):
    """A slot; `time_ms`, `first` and `last` are −1 in an empty one."""

    time_ms: int
    first: int
    last: int
    messages: int
    magic: int = 0


EMPTY = WheelSlot(-1, NO_POSITION, NO_POSITION, 0)


def messages_in_slot(io: StoreIO, paths: StorePaths, time_ms: int, precision_ms: int) -> int:
    """Number of messages in the slot of a time, without the keeper; 0 without a file.

    Messages appear there some ms after they are stored. Raises OSError.
    """
    try:
        fd = io.open(paths.timer_wheel)
    except FileNotFoundError:
        return 0
    try:
        slots = io.size(fd) // layout.SLOT_SIZE
        number = time_ms // precision_ms
        data = io.pread(fd, layout.SLOT_SIZE, number % slots * layout.SLOT_SIZE) if slots else b""
    finally:
        io.close(fd)
    return _slot_of(data, number, precision_ms).messages if len(data) == layout.SLOT_SIZE else 0


def _slot_of(data: bytes, number: int, precision_ms: int) -> WheelSlot:
    """Decode the slot with this number; EMPTY if it holds another time."""
    time, first, last, count, magic = layout.SLOT.unpack(data)
    return WheelSlot(time * precision_ms, first, last, count, magic) if time == number else EMPTY


class TimerWheel:
    """Slots by time. Exactly one object exists, in the keeper."""

    def __init__(
        self, io: StoreIO, syncs: Syncing, paths: StorePaths, precision_ms: int, slots: int = layout.SLOTS
    ) -> None:
        """Open or create the file. Raises CorruptStoreError if it has another number of slots."""
        self._io = io
        self._syncs = syncs
        self.precision_ms = precision_ms
        self.slots = slots
        self._fd = io.open(paths.timer_wheel, write=True, create=True)
        found = io.size(self._fd)
        if found == 0:
            io.set_size(self._fd, slots * layout.SLOT_SIZE)
        elif found != slots * layout.SLOT_SIZE:
            io.close(self._fd)
            raise CorruptStoreError(
                f"{paths.timer_wheel}: {found:,} bytes; {slots:,} slots have {slots * layout.SLOT_SIZE:,}"
            )

    def slot(self, time_ms: int) -> WheelSlot:
        """The slot of a time; EMPTY if it has no messages of that time."""
        number = time_ms // self.precision_ms
        data = self._io.pread(self._fd, layout.SLOT_SIZE, number % self.slots * layout.SLOT_SIZE)
        return _slot_of(data, number, self.precision_ms)

    def put(self, time_ms: int, first: int, last: int, count: int, magic: int = 0) -> None:
        """Set the slot of a time. Raises OSError."""
        number = time_ms // self.precision_ms
        data = layout.SLOT.pack(number, first, last, count, magic)
        self._io.pwrite(self._fd, data, number % self.slots * layout.SLOT_SIZE)

    def occupied(self, from_ms: int, to_ms: int) -> list[int]:
        """Times of the nonempty slots in [from, to), ascending; the range must not exceed the wheel."""
        low, high = from_ms // self.precision_ms, -(-to_ms // self.precision_ms)
        first, count = low % self.slots, min(high - low, self.slots)
        if count <= 0:
            return []
        cells = self._cells(first, min(count, self.slots - first))
        if len(cells) < count:
            cells = np.concatenate((cells, self._cells(0, count - len(cells))))
        times = cells["time"]
        return [int(time) * self.precision_ms for time in times[(times >= low) & (times < high)].tolist()]

    def first_position(self, from_ms: int) -> int | None:
        """Lowest timer log position at which a slot at or after a time begins; None without any."""
        cells = self._cells(0, self.slots)
        firsts = cells["first"][(cells["time"] >= from_ms // self.precision_ms) & (cells["first"] >= 0)]
        return int(firsts.min()) if len(firsts) else None

    def clear(self) -> None:
        self._io.set_size(self._fd, 0)
        self._io.set_size(self._fd, self.slots * layout.SLOT_SIZE)

    def sync(self) -> None:
        """Make the slots durable. Raises FailedSyncError."""
        self._syncs.sync(self._fd)

    def close(self) -> None:
        self._io.close(self._fd)

    def _cells(self, first: int, count: int) -> NDArray[np.void]:
        data = self._io.pread(self._fd, count * layout.SLOT_SIZE, first * layout.SLOT_SIZE)
        return np.frombuffer(data, layout.SLOT_DTYPE)
