"""ConsumeQueue files: one row of files of 20-byte units a queue, written and read by queue offset.

    <consumequeue>/<topic>/<queue id>/<20 digits>      unit q at byte q × 20 of the row

Written by the dispatcher only, one `pwrite` a run of units; read by anybody. A file has its full length from the start
(sparse) and space is allocated ahead of use, in steps that grow with the file, so that a small queue costs one page.
Nothing is synced here: `queue_flush` does that.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config import KIB, PAGE_BYTES
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.layout import consume_queue as layout
from mqproc.paths import segment_name, segment_start

UNIT_SIZE: Final = layout.UNIT_SIZE
UNIT_DTYPE: Final = np.dtype(
    {
        "names": ["physical_offset", "size", "tags_code"],
        "formats": [">i8", ">i4", ">i8"],
        "offsets": [layout.PHYSICAL_OFFSET, layout.SIZE, layout.TAGS_CODE],
        "itemsize": UNIT_SIZE,
    }
)

# Descriptors that one process keeps open for its queues.
OPEN_FILES_MAX: Final = 512
ALLOCATION_STEP_MAX: Final = 256 * KIB


def as_units(data: bytes | NDArray[np.uint8]) -> NDArray[np.void]:
    """Whole units as a structured array: `physical_offset`, `size`, `tags_code`, big-endian."""
    return np.frombuffer(data, UNIT_DTYPE, len(data) // UNIT_SIZE)


def fillers(count: int, physical_offset: int = 0) -> NDArray[np.uint8]:
    """uint8[20 × count]: units for places that no record has. Before a queue's first unit their offset is 0."""
    units = np.zeros(count, UNIT_DTYPE)
    units["physical_offset"] = physical_offset
    units["size"] = layout.FILLER_SIZE
    return units.view(np.uint8)


def allocation_end(end: int, file_bytes: int) -> int:
    """Up to where a file is allocated when bytes below `end` are used: a page, then doubling, then step by step."""
    if end <= ALLOCATION_STEP_MAX:
        wanted = max(PAGE_BYTES, 1 << (end - 1).bit_length())
    else:
        wanted = -(-end // ALLOCATION_STEP_MAX) * ALLOCATION_STEP_MAX
    return min(wanted, file_bytes)


def adopted_file_bytes(io: StoreIO, folder: Path, configured: int) -> int:
    """The uniform size of the ConsumeQueue files below `folder`, or the configured one when there are none.

    Files of our own that a crash left short say nothing while any other is there. Raises CorruptStoreError when two
    whole sizes are seen.
    """
    sizes: Counter[int] = Counter()
    queues, _strays = queues_on_disk(io, folder)
    for topic, queue_id in queues:
        queue = folder / topic / str(queue_id)
        for name in io.names(queue):
            if segment_start(name) is not None:
                sizes[io.size_of(queue / name)] += 1
    sizes.pop(0, None)
    if not sizes or configured in sizes:
        # Another size beside the configured one is a file that a crash left short: writing completes it.
        if any(size > configured for size in sizes):
            raise CorruptStoreError(f"{folder}: files of {sorted(sizes)} bytes; expected {configured}")
        return configured
    size = max(sizes)
    if size % UNIT_SIZE:
        raise CorruptStoreError(f"{folder}: files of {size} bytes; expected whole units of {UNIT_SIZE}")
    return size


def queues_on_disk(io: StoreIO, folder: Path) -> tuple[list[tuple[str, int]], list[Path]]:
    """(topic, queue id) of every folder of a queue below `folder`, and what else lies there and is passed over."""
    queues: list[tuple[str, int]] = []
    strays: list[Path] = []
    for topic in io.names(folder):
        try:
            names = io.names(folder / topic)
        except NotADirectoryError:
            strays.append(folder / topic)
            continue
        for name in names:
            if name.isascii() and name.isdigit() and str(int(name)) == name:
                queues.append((topic, int(name)))
            else:
                strays.append(folder / topic / name)
    return queues, strays


@dataclass(slots=True)
class _OpenFile:
    """An open file. `complete` says that it has its full length, `allocated_end` how far its space is allocated."""

    fd: int
    generation: int
    complete: bool = False
    allocated_end: int = 0


@dataclass(frozen=True, slots=True)
class QueueExtent:
    """What a queue's files hold: units [first_offset, max_offset), and where the last one's record ends in the log.

    `changed` tells whether a cut had anything to remove.
    """

    first_offset: int
    max_offset: int
    last_physical_end: int
    changed: bool = False


class ConsumeQueueFiles:
    """The files of all queues of a store, with a bounded number of them open.

    `generation` arguments tell queues of one name apart: pass the queue's number, so that after a topic was deleted and
    made again no descriptor of a deleted file is used.
    """

    def __init__(
        self, io: StoreIO, folder: Path, file_bytes: int, *, write: bool = False, open_max: int = OPEN_FILES_MAX
    ) -> None:
        """Files below `folder`, of `file_bytes` each (a whole number of units)."""
        if file_bytes % UNIT_SIZE:
            raise ValueError(f"{file_bytes} bytes are no whole units")
        self._io = io
        self._folder = folder
        self.file_bytes = file_bytes
        self._write = write
        self._open_max = open_max
        self._open: OrderedDict[tuple[str, int, int], _OpenFile] = OrderedDict()

    @property
    def units_per_file(self) -> int:
        return self.file_bytes // UNIT_SIZE

    def path(self, topic: str, queue_id: int, start: int) -> Path:
        """The file that begins at byte `start` of a queue's row."""
        return self._folder / topic / str(queue_id) / segment_name(start)

    def starts(self, topic: str, queue_id: int) -> list[int]:
        """Where the files of a queue begin, ascending; other names are passed over."""
        found = (segment_start(name) for name in self._io.names(self._folder / topic / str(queue_id)))
        return [start for start in found if start is not None]

    # Writing

    def write_run(
        self, topic: str, queue_id: int, first_queue_offset: int, units: NDArray[np.uint8], generation: int = 0
    ) -> None:
        """Write consecutive units, uint8[20 × n], from a queue offset on.

        A unit's place is its queue offset, so writing the same units again changes nothing: after an OSError the call
        can be repeated.
        """
        position = first_queue_offset * UNIT_SIZE
        done = 0
        while done < len(units):
            place = position % self.file_bytes
            size = min(self.file_bytes - place, len(units) - done)
            file = self._for_writing(topic, queue_id, position - place, place, generation)
            if place + size > file.allocated_end:
                self._allocate(file, place, place + size)
            self._io.pwrite(file.fd, units[done : done + size], place)
            position += size
            done += size

    def _for_writing(self, topic: str, queue_id: int, start: int, place: int, generation: int) -> _OpenFile:
        file = self._opened(topic, queue_id, start, generation)
        if file is None:
            file = self._keep(topic, queue_id, start, _OpenFile(self._create(topic, queue_id, start), generation))
        if not file.complete:
            self._complete(file.fd, self.path(topic, queue_id, start), place)
            file.complete = True
        return file

    def _create(self, topic: str, queue_id: int, start: int) -> int:
        path = self.path(topic, queue_id, start)
        try:
            return self._io.open(path, write=True, create=True)
        except FileNotFoundError:
            # The flusher syncs these folders before its mark moves; a sync here for each new queue would take minutes.
            self._io.make_folder(path.parent, sync=False)
            return self._io.open(path, write=True, create=True)

    def _complete(self, fd: int, path: Path, place: int) -> None:
        """Give a new file, or one that a crash left short, its full length, and fillers before its first unit.

        The length comes last: while it is short, the fillers may be missing.
        """
        size = self._io.size(fd)
        if size == self.file_bytes:
            return
        if size > self.file_bytes:
            raise CorruptStoreError(f"{path}: {size:,} bytes; expected {self.file_bytes:,}")
        filled = size - size % UNIT_SIZE
        if filled < place:
            self._io.pwrite(fd, fillers((place - filled) // UNIT_SIZE), filled)
        self._io.set_size(fd, self.file_bytes)

    def _allocate(self, file: _OpenFile, place: int, end: int) -> None:
        start = max(file.allocated_end, place - place % PAGE_BYTES)
        stop = allocation_end(end, self.file_bytes)
        self._io.allocate(file.fd, start, stop - start)
        file.allocated_end = stop

    # Reading

    def read_units(self, topic: str, queue_id: int, first: int, count: int, generation: int = 0) -> bytes:
        """Units [first, first + count) as they lie on disk; fewer where the files end.

        Raises FileNotFoundError when the file of the first one is not there (deleted, or never made).
        """
        position = first * UNIT_SIZE
        stop = position + count * UNIT_SIZE
        parts: list[bytes] = []
        while position < stop:
            place = position % self.file_bytes
            size = min(self.file_bytes - place, stop - position)
            try:
                file = self._for_reading(topic, queue_id, position - place, generation)
            except FileNotFoundError:
                if not parts:
                    raise
                break
            part = self._io.pread(file.fd, size, place)
            parts.append(part)
            position += size
            if len(part) < size:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _for_reading(self, topic: str, queue_id: int, start: int, generation: int) -> _OpenFile:
        file = self._opened(topic, queue_id, start, generation)
        if file is not None:
            return file
        fd = self._io.open(self.path(topic, queue_id, start), write=self._write)
        return self._keep(topic, queue_id, start, _OpenFile(fd, generation))

    # What there is, and cutting it: for recovery, while nothing else runs

    def extent(self, topic: str, queue_id: int) -> QueueExtent:
        """What a queue holds by its files alone. Takes it that no valid unit follows an invalid one."""
        _start, extent = self._extent(topic, queue_id, lambda physical_offset, size: physical_offset >= 0 and size > 0)
        return extent

    def cut(self, topic: str, queue_id: int, physical_offset: int) -> QueueExtent:
        """Remove every unit whose record begins at or above a log position, and what is no unit.

        Units below it must be whole. Files without any unit left are deleted, the first one of the queue excepted: its
        name keeps the queue's offset. The caller syncs (`sync`) before new units are written.
        """
        last_start, extent = self._extent(topic, queue_id, lambda at, size: 0 <= at < physical_offset and size > 0)
        changed = False
        for start in self.starts(topic, queue_id):
            if start > last_start:
                self._forget_file(topic, queue_id, start)
                self._io.unlink(self.path(topic, queue_id, start))
                changed = True
            elif start == last_start:
                changed |= self._clear_behind(topic, queue_id, start, extent.max_offset * UNIT_SIZE - start)
        return QueueExtent(extent.first_offset, extent.max_offset, extent.last_physical_end, changed)

    def sync(self) -> None:
        """Make all files, lengths and names durable at once."""
        if not self._io.exists(self._folder):
            return
        fd = self._io.open(self._folder)
        try:
            self._io.sync_file_system(fd)
        finally:
            self._io.close(fd)

    def _extent(self, topic: str, queue_id: int, keep: Callable[[int, int], bool]) -> tuple[int, QueueExtent]:
        """(start of the file with the last kept unit, extent), where `keep` is true up to one place in the row."""
        starts = self.starts(topic, queue_id)
        if not starts:
            return 0, QueueExtent(0, 0, 0)

        def kept(start: int, index: int) -> bool:
            unit = self._unit(topic, queue_id, start, index)
            return unit is not None and keep(*unit)

        start = next((start for start in reversed(starts) if kept(start, 0)), starts[0])
        low, high = 0, self.units_per_file
        while low < high:
            middle = (low + high) // 2
            if kept(start, middle):
                low = middle + 1
            else:
                high = middle
        physical_end = 0
        if low > 0 and (last := self._unit(topic, queue_id, start, low - 1)) is not None:
            physical_end = last[0] + (last[1] if last[1] != layout.FILLER_SIZE else 0)
        max_offset = start // UNIT_SIZE + low
        first_offset = min(self._first_offset(topic, queue_id, starts[0]), max_offset)
        return start, QueueExtent(first_offset, max_offset, physical_end)

    def _first_offset(self, topic: str, queue_id: int, start: int) -> int:
        """Queue offset behind the fillers that a row may begin with."""
        low, high = 0, self.units_per_file
        while low < high:
            middle = (low + high) // 2
            if self._unit(topic, queue_id, start, middle) == (0, layout.FILLER_SIZE):
                low = middle + 1
            else:
                high = middle
        return start // UNIT_SIZE + low

    def _unit(self, topic: str, queue_id: int, start: int, index: int) -> tuple[int, int] | None:
        """(physical offset, size) of a unit; None behind the end of a file that was left short."""
        file = self._for_reading(topic, queue_id, start, 0)
        data = self._io.pread(file.fd, UNIT_SIZE, index * UNIT_SIZE)
        if len(data) < UNIT_SIZE:
            return None
        unit = as_units(data)[0]
        return int(unit["physical_offset"]), int(unit["size"])

    def _clear_behind(self, topic: str, queue_id: int, start: int, place: int) -> bool:
        """Make a file whole, and read as zeros from `place` on; whether it was not so before."""
        fd = self._for_reading(topic, queue_id, start, 0).fd
        changed = False
        if self._io.size(fd) < self.file_bytes:
            self._io.set_size(fd, self.file_bytes)
            changed = True
        while (data := self._io.next_data(fd, place)) is not None:
            place = self._io.next_hole(fd, data)
            if self._io.pread(fd, place - data, data).strip(b"\0"):
                self._io.zero(fd, data, place - data)
                changed = True
        return changed

    # Open files

    def forget(self, topic: str, queue_id: int) -> None:
        """Close what is open of a queue."""
        for key in [key for key in self._open if key[:2] == (topic, queue_id)]:
            self._forget_file(*key)

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._io.close(self._open.popitem()[1].fd)

    def _opened(self, topic: str, queue_id: int, start: int, generation: int) -> _OpenFile | None:
        file = self._open.get((topic, queue_id, start))
        if file is None:
            return None
        if file.generation != generation:
            self._forget_file(topic, queue_id, start)
            return None
        self._open.move_to_end((topic, queue_id, start))
        return file

    def _keep(self, topic: str, queue_id: int, start: int, file: _OpenFile) -> _OpenFile:
        while len(self._open) >= self._open_max:
            self._io.close(self._open.popitem(last=False)[1].fd)
        self._open[topic, queue_id, start] = file
        return file

    def _forget_file(self, topic: str, queue_id: int, start: int) -> None:
        file = self._open.pop((topic, queue_id, start), None)
        if file is not None:
            self._io.close(file.fd)
