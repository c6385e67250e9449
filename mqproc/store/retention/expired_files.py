"""What of queues and index lies below the log's minimum: each queue's first readable offset, and files that can go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from mqproc.io import StoreIO
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles
from mqproc.store.index_headers import file_ms, index_file_names, last_offset


class QueueWords(Protocol):
    """A store's queues with their offsets: the queue table of a group, or what a stopped store's files say."""

    def live(self) -> Iterator[tuple[int, str, int]]:
        """(number, topic, queue id) of every queue."""
        ...

    def find(self, topic: str, queue_id: int) -> int:
        """A queue's number, −1 when there is none."""
        ...

    def min_offset(self, number: int) -> int: ...

    def max_offset(self, number: int) -> int: ...

    def generation(self, number: int) -> int:
        """Another number after the queue was deleted and made again: no open file of before may be read then."""
        ...

    def raise_min_offset(self, number: int, offset: int) -> None: ...


class ExpiredQueueFiles:
    """Looks at the ConsumeQueues of one store; changes nothing."""

    def __init__(self, io: StoreIO, folder: Path, file_bytes: int, queues: QueueWords) -> None:
        self._queues = queues
        self._files = ConsumeQueueFiles(io, folder, file_bytes)
        # By queue number: the second of a queue's files begins at this unit. Nothing can go before it is readable.
        self._second_file: dict[int, int] = {}

    def path(self, topic: str, queue_id: int, start: int) -> Path:
        return self._files.path(topic, queue_id, start)

    def first_readable(self, number: int, topic: str, queue_id: int, minimum: int) -> int:
        """The first queue offset from the queue's minimum on whose unit points at or above a log position.

        The queue's maximum when there is none: everything of it has expired.
        """
        low, high = self._queues.min_offset(number), self._queues.max_offset(number)
        # Most queues have nothing in the segment that goes, or, of a quiet one, everything.
        for probe in (low, high - 1):
            if low < high and self._points_below(number, topic, queue_id, probe, minimum):
                low = probe + 1
            elif probe == low:
                return low
        while low < high:
            middle = (low + high) // 2
            if self._points_below(number, topic, queue_id, middle, minimum):
                low = middle + 1
            else:
                high = middle
        return low

    def unit_at(self, number: int, topic: str, queue_id: int, offset: int) -> int | None:
        """The log position that a unit stands at, a filler as the next unit; None when its file is not there."""
        return self._files.position_at(topic, queue_id, offset, self._queues.generation(number))

    def files_below(self, number: int, topic: str, queue_id: int, minimum: int, readable: int) -> list[int]:
        """Starts of a queue's files whose last unit points below a log position, oldest first; never the last file.

        `readable` is the queue's first readable offset.
        """
        if readable < self._second_file.get(number, 0):
            return []
        starts = self._files.starts(topic, queue_id)
        units = self._files.units_per_file
        below = []
        for start in starts[:-1]:
            last_unit = start // UNIT_SIZE + units - 1
            if last_unit >= readable or not self._points_below(number, topic, queue_id, last_unit, minimum):
                break
            below.append(start)
        if not below:
            # While there are any they may not go at the first try: the next look is to find them again.
            self._second_file[number] = starts[0] // UNIT_SIZE + units if starts else 0
        return below

    def forget(self, topic: str, queue_id: int) -> None:
        """Close what is open of a queue: its first files have been deleted."""
        self._files.forget(topic, queue_id)

    def close(self) -> None:
        self._files.close()

    def _points_below(self, number: int, topic: str, queue_id: int, offset: int, minimum: int) -> bool:
        """Also where the unit is gone already."""
        position = self.unit_at(number, topic, queue_id, offset)
        return position is None or position < minimum


def index_files_below(io: StoreIO, folder: Path, minimum: int, committed_ms: int) -> list[str]:
    """Names of index files whose last entry points below a log position, oldest first; never the newest.

    Nor the one that the dispatcher stands in by its last commit (`committed_ms`, 0 = none), which its successor needs.
    """
    below = []
    for name in index_file_names(io, folder)[:-1]:
        if committed_ms and file_ms(name) >= committed_ms:
            break
        if not 0 <= last_offset(io, folder / name) < minimum:
            break
        below.append(name)
    return below
