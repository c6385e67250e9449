"""Units of ConsumeQueues as their files hold them, each read once: what they come to in each share of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels import verify
from mqproc.kernels.views import as_kernel_array
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.end_fillers import put_fillers
from mqproc.store.verify.inventory import Inventory, Queue
from mqproc.store.verify.picture import Picture

_CHUNK_BYTES = UNIT_SIZE * (1 << 16)
# Behind the totals of the shares come those of units below all shares, above all, and of what is no unit.
BELOW, BEYOND, NO_UNIT = range(3)
MORE_TOTALS = 3


@dataclass(slots=True)
class QueueTotals:
    """What some queues hold, by their order.

    `totals` int64[queues, shares + MORE_TOTALS, TOTAL_COLUMNS], `states` int64[queues, UNITS_SIZE].
    """

    queues: list[Queue]
    totals: NDArray[np.int64]
    states: NDArray[np.int64]


class QueuePass:
    """Reads queues, one after the other."""

    def __init__(self, io: StoreIO, picture: Picture, advance: Callable[[int], None]) -> None:
        self._io = io
        self._picture = picture
        self._advance = advance
        self._borders = picture.borders

    def run(self, queues: list[Queue]) -> QueueTotals:
        """Sum up the units of these queues."""
        shares = len(self._borders) - 1
        found = QueueTotals(
            queues,
            np.zeros((len(queues), shares + MORE_TOTALS, verify.TOTAL_COLUMNS), np.int64),
            np.zeros((len(queues), verify.UNITS_SIZE), np.int64),
        )
        for index, queue in enumerate(queues):
            self._queue(queue, found.totals[index].reshape(-1), found.states[index])
        return found

    def _queue(self, queue: Queue, totals: NDArray[np.int64], state: NDArray[np.int64]) -> None:
        for name in (verify.LAST_LIVE, verify.FIRST_INNER_ZERO, verify.FIRST_PENDING_ZERO):
            state[name] = -1
        for first, units, count in read_queue(self._io, self._picture.inventory, queue):
            if units is None:
                self._zeros(state, first, count)
                continue
            state[verify.NEXT_OFFSET] = first
            verify.sum_units(units, count, self._borders, totals, state)
            self._advance(count * UNIT_SIZE)

    @staticmethod
    def _zeros(state: NDArray[np.int64], first: int, count: int) -> None:
        """Units that were never written."""
        if state[verify.PENDING_ZEROS] == 0:
            state[verify.FIRST_PENDING_ZERO] = first
        state[verify.PENDING_ZEROS] += count
        state[verify.NEXT_OFFSET] = first + count


Chunk = tuple[int, NDArray[np.uint8] | None, int]
"""Queue offset of the first unit, the units' bytes (None: zeros that were never written), their number."""


def read_queue(io: StoreIO, inventory: Inventory, queue: Queue) -> Iterator[Chunk]:
    """All units that a queue's files have, in order, missing files left out; bytes are valid until the next chunk."""
    buffer = bytearray(_CHUNK_BYTES)
    folder = inventory.paths.queue(*queue)
    for start, size in sorted(inventory.queues.get(queue, {}).items()):
        try:
            fd = io.open(folder / f"{start:020d}")
        except FileNotFoundError:
            continue
        try:
            yield from _read_file(io, fd, start, min(size, inventory.sizes.queue_file), buffer)
        finally:
            io.close(fd)


def _read_file(io: StoreIO, fd: int, start: int, size: int, buffer: bytearray) -> Iterator[Chunk]:
    end = size - size % UNIT_SIZE
    at = 0
    while at < end:
        data = io.next_data(fd, at)
        written = end if data is None else min(end, max(at, data - data % UNIT_SIZE))
        if written > at:
            yield (start + at) // UNIT_SIZE, None, (written - at) // UNIT_SIZE
            at = written
        if data is None or at >= end:
            return
        hole = min(end, -(-io.next_hole(fd, max(at, data)) // UNIT_SIZE) * UNIT_SIZE)
        while at < hole:
            wanted = min(len(buffer), hole - at)
            count = io.pread_into(fd, memoryview(buffer)[:wanted], at) // UNIT_SIZE
            if count == 0:
                return
            put_fillers(buffer, count)
            yield (start + at) // UNIT_SIZE, as_kernel_array(buffer), count
            at += count * UNIT_SIZE
