"""Reading ahead for a queue that is pulled for the first time: its units, and the log that they point to."""

from __future__ import annotations

from pathlib import Path

from mqproc.config import MIB
from mqproc.io import StoreIO
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles, as_units
from mqproc.store.reads.queue_bounds import QueueBounds
from mqproc.store.segments import LogSegments

# A queue that was pulled before is taken for warm; beyond this many the memory of it begins anew.
QUEUES_REMEMBERED_MAX = 65_536
UNITS_AHEAD = 4096
LOG_BYTES_AHEAD = 32 * MIB


class ReadAhead:
    """Which queues this process has pulled from."""

    def __init__(self, io: StoreIO, files: ConsumeQueueFiles, segments: LogSegments) -> None:
        self._io = io
        self._files = files
        self._segments = segments
        self._seen: set[tuple[str, int]] = set()

    def before_pull(self, topic: str, queue_id: int, bounds: QueueBounds, offset: int) -> None:
        """Start reading what a pull from `offset` on will touch, unless the queue has been pulled before."""
        queue = (topic, queue_id)
        if queue in self._seen or not bounds.min_offset <= offset < bounds.max_offset:
            return
        if len(self._seen) >= QUEUES_REMEMBERED_MAX:
            self._seen.clear()
        self._seen.add(queue)
        stop = min(bounds.max_offset, offset + UNITS_AHEAD)
        try:
            place = offset * UNIT_SIZE % self._files.file_bytes
            start = offset * UNIT_SIZE - place
            self._will_need(self._files.path(topic, queue_id, start), place, (stop - offset) * UNIT_SIZE)
            first = self._physical_offset(queue, bounds, offset)
            base = self._segments.start_of(first)
            size = self._physical_offset(queue, bounds, stop - 1) - first
            self._will_need(self._segments.path(base), first - base, min(max(size, 1), LOG_BYTES_AHEAD))
        except (FileNotFoundError, IndexError):
            return  # Retention is faster; the pull itself says so.

    def _physical_offset(self, queue: tuple[str, int], bounds: QueueBounds, offset: int) -> int:
        return max(0, int(as_units(self._files.read_units(*queue, offset, 1, bounds.number))[0]["physical_offset"]))

    def _will_need(self, path: Path, offset: int, size: int) -> None:
        fd = self._io.open(path)
        try:
            self._io.will_need(fd, offset, size)
        finally:
            self._io.close(fd)
