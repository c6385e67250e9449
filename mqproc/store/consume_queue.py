"""ConsumeQueue files: one row of files of 20-byte units a queue, written and read by queue offset.

    <consumequeue>/<topic>/<queue id>/<20 digits>      unit q at byte q × 20 of the row

Written by the dispatcher only, one `pwrite` a run of units; read by anybody. A file has its full length from the start
(sparse) and space is allocated ahead of use, in steps that grow with the file, so that a small queue costs one page.
Nothing is synced here: `queue_flush` does that.
"""

from __future__ import annotations

import contextlib
import errno
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config import MIB, PAGE_BYTES
from mqproc.delay_levels import DELAY_MS_MAX, DELAY_STEP_MS
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.layout import consume_queue as layout
from mqproc.names import SCHEDULE_TOPIC
from mqproc.paths import segment_name, segment_start
from mqproc.store import queue_extent
from mqproc.store.clearing import clear_behind
from mqproc.store.end_fillers import as_fillers
from mqproc.store.queue_extent import QueueExtent
from mqproc.store.queue_folders import REMOVE_TRIES, remove_tree
from mqproc.store.unsynced import Unsynced

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
# Files whose length and space are known of though they are closed.
KNOWN_FILES_MAX: Final = 65_536
ALLOCATION_STEP_MAX: Final = 1 * MIB


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


@dataclass(slots=True)
class _OpenFile:
    """An open file. `complete` says that it has its full length, `allocated_end` how far its space is allocated.

    Of a file that was `made_here` it is known that nothing was ever written at or behind `used_end`.
    """

    fd: int
    generation: int
    complete: bool = False
    allocated_end: int = 0
    made_here: bool = False
    used_end: int = 0


class _Row:
    """One queue's files as `queue_extent` looks at them."""

    def __init__(self, files: ConsumeQueueFiles, topic: str, queue_id: int, generation: int) -> None:
        self._files = files
        self._queue = topic, queue_id
        self._generation = generation
        self.units_per_file = files.units_per_file

    def starts(self) -> list[int]:
        return [start // UNIT_SIZE for start in self._files.starts(*self._queue)]

    def read(self, first: int, count: int) -> bytes:
        try:
            return self._files.read_units(*self._queue, first, count, self._generation)
        except FileNotFoundError:
            return b""


class ConsumeQueueFiles:
    """The files of all queues of a store, with a bounded number of them open.

    `generation` arguments tell queues of one name apart: pass the queue's generation, so that after a topic was deleted
    and made again no descriptor of a deleted file is used.
    """

    def __init__(
        self,
        io: StoreIO,
        folder: Path,
        file_bytes: int,
        *,
        write: bool = False,
        open_max: int = OPEN_FILES_MAX,
        sync_follows: bool = False,
    ) -> None:
        """Files below `folder`, of `file_bytes` each (a whole number of units).

        With `sync_follows` the disk begins with each file that is full: `sync` then has less to wait for.
        """
        if file_bytes % UNIT_SIZE:
            raise ValueError(f"{file_bytes} bytes are no whole units")
        self._io = io
        self._folder = folder
        self.file_bytes = file_bytes
        self._write = write
        self._open_max = open_max
        self._sync_follows = sync_follows
        self._open: OrderedDict[tuple[str, int, int], _OpenFile] = OrderedDict()
        # Generation and allocated end of files that were whole when they were closed: with many queues each is opened
        # for every few units. All are forgotten when files go, which is seldom.
        self._closed: dict[tuple[str, int, int], tuple[int, int]] = {}
        self._unsynced = Unsynced[tuple[str, int, int]](io, folder, lambda key: self.path(*key))
        self.files_made = 0
        """New files so far."""

    @property
    def units_per_file(self) -> int:
        return self.file_bytes // UNIT_SIZE

    def following_file(self, offset: int) -> int:
        """The first queue offset of the file behind the one that holds an offset."""
        return offset - offset % self.units_per_file + self.units_per_file

    def path(self, topic: str, queue_id: int, start: int) -> Path:
        """The file that begins at byte `start` of a queue's row."""
        # One parse instead of three: this is called for every queue at a start.
        return Path(f"{self._folder}/{topic}/{queue_id}/{segment_name(start)}")

    def starts(self, topic: str, queue_id: int) -> list[int]:
        """Where the files of a queue begin, ascending; other names are passed over."""
        found = (segment_start(name) for name in self._io.names(self._folder / f"{topic}/{queue_id}"))
        return [start for start in found if start is not None]

    # Writing

    def write_run(
        self, topic: str, queue_id: int, first_queue_offset: int, units: NDArray[np.uint8], generation: int = 0
    ) -> None:
        """Write consecutive units, uint8[20 × n], from a queue offset on.

        A unit's place is its queue offset, so writing the same units again changes nothing: after an OSError the call
        can be repeated.
        """
        io, file_bytes = self._io, self.file_bytes
        position = first_queue_offset * UNIT_SIZE
        done, left = 0, len(units)
        while left > 0:
            place = position % file_bytes
            size = min(file_bytes - place, left)
            end = place + size
            key = topic, queue_id, position - place
            # First of all: a file may be made, and then have no room.
            self._unsynced.note(key)
            file = self._open.get(key)
            if file is None or file.generation != generation or end > file.allocated_end:
                file = self._made_ready(key, place, end, generation)
            else:
                self._open.move_to_end(key)
            run = units[done : done + size]
            io.crash_amid("cq.half_unit", file.fd, run, place)
            io.pwrite(file.fd, run, place)
            if end > file.used_end:
                file.used_end = end
            if self._sync_follows and end == file_bytes:
                io.start_writing(file.fd, 0, file_bytes)
            position += size
            done += size
            left -= size

    def mend_run(
        self, topic: str, queue_id: int, first_queue_offset: int, units: NDArray[np.uint8], generation: int = 0
    ) -> int:
        """Write consecutive units as `write_run` does, unless the files hold just these; how many units differed.

        A tags code stays where the log cannot tell it: a time to deliver at, made with delays that were configured
        elsewhere, and the address of a ConsumeQueue extension.
        """
        count = len(units) // UNIT_SIZE
        found = self._found_at(topic, queue_id, first_queue_offset, count, generation)
        plain, wanted_plain = as_fillers(found), as_fillers(units.tobytes())
        if plain == wanted_plain:
            return 0
        if not found.strip(b"\0"):
            self.write_run(topic, queue_id, first_queue_offset, units, generation)
            return count
        there = as_units(plain)
        theirs = as_units(wanted_plain)[: len(there)]
        same = (there["physical_offset"] == theirs["physical_offset"]) & (there["size"] == theirs["size"])
        codes = there["tags_code"]
        if topic == SCHEDULE_TOPIC:
            # What no two delays lie apart is no time: the code's sector was being written when the power went.
            apart = codes - theirs["tags_code"]
            untold = (codes > 0) & (np.abs(apart) <= DELAY_MS_MAX) & (apart % DELAY_STEP_MS == 0)
        else:
            untold = self._are_extension_addresses(topic, queue_id, codes)
        same &= (codes == theirs["tags_code"]) | untold
        differing = count - int(np.count_nonzero(same))
        if differing:
            mended = as_units(units).copy()
            mended[: len(there)][same] = as_units(found)[same]
            self.write_run(topic, queue_id, first_queue_offset, mended.view(np.uint8), generation)
        return differing

    def _are_extension_addresses(self, topic: str, queue_id: int, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tags codes name a place in the queue's extension files; others as low are what a power loss left."""
        low: NDArray[np.bool_] = codes <= layout.EXTENSION_ADDRESS_MAX
        if low.any():
            places = codes.astype(np.int64) - layout.EXTENSION_ADDRESS_MIN
            low &= places < self._extension_end(topic, queue_id)
        return low

    def _extension_end(self, topic: str, queue_id: int) -> int:
        folder = self._folder.parent / f"{layout.EXTENSION_FOLDER}/{topic}/{queue_id}"
        ends = (
            start + self._io.size_of(folder / name)
            for name in self._io.names(folder)
            if (start := segment_start(name)) is not None
        )
        return max(ends, default=0)

    def _found_at(self, topic: str, queue_id: int, first: int, count: int, generation: int) -> bytes:
        """Units as they lie on disk, where any may; whoever wrote them may not have come to sync them."""
        place, stop = first * UNIT_SIZE, (first + count) * UNIT_SIZE
        starts = range(place - place % self.file_bytes, stop, self.file_bytes)
        for start in starts:
            self._unsynced.note((topic, queue_id, start))
        if all(self._is_unused(topic, queue_id, start, place - start, generation) for start in starts):
            return b""
        try:
            return self.raw_units(topic, queue_id, first, count, generation)
        except FileNotFoundError:
            return b""

    def _is_unused(self, topic: str, queue_id: int, start: int, place: int, generation: int) -> bool:
        """Whether nothing can lie in a file at or behind a place; a read would bring zeros into memory."""
        file = self._opened(topic, queue_id, start, generation)
        return file is not None and file.made_here and place >= file.used_end

    def _made_ready(self, key: tuple[str, int, int], place: int, end: int, generation: int) -> _OpenFile:
        """A file whose bytes [place, end) may be written: open, of its full length, with that much space."""
        topic, queue_id, start = key
        file = self._opened(topic, queue_id, start, generation)
        if file is None:
            file = self._reopened(topic, queue_id, start, generation)
        if file is None:
            file = self._keep(topic, queue_id, start, _OpenFile(self._create(topic, queue_id, start), generation))
        if not file.complete:
            file.made_here = self._complete(file.fd, self.path(topic, queue_id, start), place)
            self._io.crash_point("cq.roll")
            file.used_end = place
            file.complete = True
            self.files_made += file.made_here
        if end > file.allocated_end:
            self._allocate(file, place, end)
        return file

    def _reopened(self, topic: str, queue_id: int, start: int, generation: int) -> _OpenFile | None:
        """A file that was whole when it was closed here; None when it was not, is another queue's, or is gone."""
        known = self._closed.pop((topic, queue_id, start), None)
        if known is None or known[0] != generation:
            return None
        try:
            fd = self._io.open(self.path(topic, queue_id, start), write=True)
        except FileNotFoundError:
            return None
        file = _OpenFile(fd, generation, complete=True, allocated_end=known[1])
        return self._keep(topic, queue_id, start, file)

    def _create(self, topic: str, queue_id: int, start: int) -> int:
        path = self.path(topic, queue_id, start)
        # Folders that are made may go with a topic that is deleted. The flusher syncs them: here it would take minutes.
        for _ in range(REMOVE_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return self._io.open(path, write=True, create=True)
            with contextlib.suppress(FileNotFoundError):
                self._io.make_folder(path.parent, sync=False)
        return self._io.open(path, write=True, create=True)

    def _complete(self, fd: int, path: Path, place: int) -> bool:
        """Give a new file, or one that a crash left short, its full length, and fillers before its first unit.

        The length comes last: while it is short, the fillers may be missing. Returns whether the file was new.
        """
        size = self._io.size(fd)
        if size == self.file_bytes:
            return False
        if size > self.file_bytes:
            raise CorruptStoreError(f"{path}: {size:,} bytes; expected {self.file_bytes:,}")
        filled = size - size % UNIT_SIZE
        if filled < place:
            self._io.pwrite(fd, fillers((place - filled) // UNIT_SIZE), filled)
        self._io.set_size(fd, self.file_bytes)
        return size == 0

    def _allocate(self, file: _OpenFile, place: int, end: int) -> None:
        start = max(file.allocated_end, place - place % PAGE_BYTES)
        stop = allocation_end(end, self.file_bytes)
        self._io.allocate(file.fd, start, stop - start)
        file.allocated_end = stop

    # Reading

    def read_units(self, topic: str, queue_id: int, first: int, count: int, generation: int = 0) -> bytes:
        """Units [first, first + count); fewer where the files end. A filler at a queue's end is one like others.

        Raises FileNotFoundError when the file of the first one is not there: deleted, never made, or a folder.
        """
        return as_fillers(self.raw_units(topic, queue_id, first, count, generation))

    def raw_units(self, topic: str, queue_id: int, first: int, count: int, generation: int = 0) -> bytes:
        """The same as they lie on disk. Raises as `read_units`."""
        position = first * UNIT_SIZE
        stop = position + count * UNIT_SIZE
        parts: list[bytes] = []
        while position < stop:
            place = position % self.file_bytes
            size = min(self.file_bytes - place, stop - position)
            try:
                file = self._for_reading(topic, queue_id, position - place, generation)
                part = self._io.pread(file.fd, size, place)
            except (FileNotFoundError, IsADirectoryError):
                if not parts:
                    raise FileNotFoundError(
                        errno.ENOENT, f"no file: {self.path(topic, queue_id, position - place)}"
                    ) from None
                break
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
        row = _Row(self, topic, queue_id, 0)
        return queue_extent.extent(row, lambda physical_offset, size: physical_offset >= 0 and size > 0)

    def extent_below(self, topic: str, queue_id: int, physical_offset: int) -> QueueExtent:
        """What a queue holds of records that end at or below a log position, where one begins; its units must be whole.

        What is left of a deleted queue may end with a torn one, which nobody has synced: its size is anything.
        """
        row = _Row(self, topic, queue_id, 0)
        return queue_extent.extent(row, lambda at, size: at >= 0 and 0 < size <= physical_offset - at)

    def first_offset(self, topic: str, queue_id: int, start: int) -> int:
        """Queue offset behind the fillers that a row, whose first file begins at byte `start`, may begin with."""
        return queue_extent.leading_fillers(_Row(self, topic, queue_id, 0), start // UNIT_SIZE)

    def first_at_or_above(
        self, topic: str, queue_id: int, low: int, high: int, physical_offset: int, generation: int = 0
    ) -> int:
        """The first queue offset in [low, high) that stands at or above a log position, a filler as the next unit."""
        row = _Row(self, topic, queue_id, generation)
        return queue_extent.first_at_or_above(row, low, high, physical_offset)

    def position_at(self, topic: str, queue_id: int, queue_offset: int, generation: int = 0) -> int | None:
        """The log position that a unit stands at, a filler as the next unit; None when there is none."""
        place = queue_extent.record_place(_Row(self, topic, queue_id, generation), queue_offset)
        return place[0] if place is not None else None

    def last_end(self, topic: str, queue_id: int, max_offset: int, generation: int = 0) -> int:
        """Where the last record of the units below a queue offset ends in the log; 0 when there is none."""
        return queue_extent.last_end(_Row(self, topic, queue_id, generation), max_offset)

    def cut(self, topic: str, queue_id: int, physical_offset: int) -> QueueExtent:
        """Remove every unit whose record begins at or above a log position, and what is no unit.

        Units below it must be whole. The caller syncs (`sync`) before new units are written.
        """
        extent = self.extent_below(topic, queue_id, physical_offset)
        changed = self.clear_from(topic, queue_id, extent.max_offset)
        return QueueExtent(extent.first_offset, extent.max_offset, extent.last_physical_end, changed)

    def clear_from(self, topic: str, queue_id: int, max_offset: int) -> bool:
        """Remove what lies at or behind a queue offset; whether there was anything.

        Files without any unit left are deleted, the first one of the queue excepted: its name keeps the queue's offset.
        """
        starts = self.starts(topic, queue_id)
        if not starts:
            return False
        end = max_offset * UNIT_SIZE
        last = max((start for start in starts if start < end), default=starts[0])
        for start in reversed(starts):
            if start > last:
                self._forget_file(topic, queue_id, start)
                self._unsynced.note((topic, queue_id, start))
                self._io.unlink(self.path(topic, queue_id, start))
        changed = self._clear_behind(topic, queue_id, last, max(0, end - last))
        return changed or starts[-1] > last

    def sync(self) -> None:
        """Make everything durable that was written, compared or removed here: bytes, lengths and names."""
        self._unsynced.sync()

    def _clear_behind(self, topic: str, queue_id: int, start: int, place: int) -> bool:
        """Make a file whole, and read as zeros from `place` on; whether it was not so before."""
        fd = self._for_reading(topic, queue_id, start, 0).fd
        changed = False
        if self._io.size(fd) < self.file_bytes:
            self._io.set_size(fd, self.file_bytes)
            changed = True
        changed |= clear_behind(self._io, fd, place) > 0
        if changed:
            self._unsynced.note((topic, queue_id, start))
        return changed

    def remove(self, topic: str, queue_id: int) -> None:
        """Remove a queue's files and folder, and the topic's folder with its last queue."""
        self.forget(topic, queue_id)
        self._unsynced.note((topic, queue_id, 0))
        remove_tree(self._io, self._folder / topic / str(queue_id))
        if not self._io.names(self._folder / topic):
            remove_tree(self._io, self._folder / topic)

    def remove_unused(self, topic: str, queue_id: int) -> bool:
        """Remove a queue's files, and its folder when nothing else lies there; whether that is so."""
        folder = self._folder / topic / str(queue_id)
        if any(segment_start(name) is None for name in self._io.names(folder)):
            return False
        self.remove(topic, queue_id)
        return True

    # Open files

    def forget(self, topic: str, queue_id: int) -> None:
        """Close what is open of a queue."""
        self._closed.clear()
        for key in [key for key in self._open if key[:2] == (topic, queue_id)]:
            self._forget_file(*key)

    def forget_deleted(self, kept_of: Callable[[str, int], tuple[int, int] | None]) -> None:
        """Close deleted files: they keep their space until then. `kept_of` a queue: its generation and minimum."""
        self._closed.clear()
        for (topic, queue_id, start), file in list(self._open.items()):
            generation, minimum = kept_of(topic, queue_id) or (-1, 0)
            if file.generation != generation or start + self.file_bytes <= minimum * UNIT_SIZE:
                self._forget_file(topic, queue_id, start)

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
            key, oldest = self._open.popitem(last=False)
            self._io.close(oldest.fd)
            # With more files than are known none gives way: in turns each would, just before it is opened again.
            if oldest.complete and len(self._closed) < KNOWN_FILES_MAX:
                self._closed[key] = oldest.generation, oldest.allocated_end
        self._open[topic, queue_id, start] = file
        return file

    def _forget_file(self, topic: str, queue_id: int, start: int) -> None:
        file = self._open.pop((topic, queue_id, start), None)
        self._closed.pop((topic, queue_id, start), None)
        if file is not None:
            self._io.close(file.fd)
