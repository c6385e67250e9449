"""ConsumeQueue files: a row of files of 20-byte units per queue, accessed by queue offset.

    <consumequeue>/<topic>/<queue id>/<20 digits>      unit q at byte q × 20 of the row

The dispatcher is the only writer, with one `pwrite` per run of units. A file has its full length from the start
(sparse). Space is allocated ahead, in steps that grow with the file, so that a small queue takes one page. Nothing is
synced here: see `consumequeue.flush`.
"""

from __future__ import annotations

import contextlib
import errno
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadTopicError, CorruptStoreError
from mqproc.io.file_limits import SPARSE_FILE_BYTES_MAX
from mqproc.io.store_io import FolderEntry, Kind, StoreIO, zero_tail
from mqproc.layout import consume_queue as layout
from mqproc.layout import queue_table as table_layout
from mqproc.layout.consume_queue import FILLER_SIZE, SIZE, TAGS_CODE, UNIT_SIZE
from mqproc.paths import is_text, segment_name, segment_start
from mqproc.store.consumequeue import bounds
from mqproc.store.consumequeue.bounds import UNIT_DTYPE, QueueExtent, as_units, normalize_fillers
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.sync_guard import SINGLE_SYNCS_MAX, DirtyFiles, Syncing, sync_files
from mqproc.topic_names import SCHEDULE_TOPIC, check_topic
from mqproc.util.units import DELAY_MS_MAX, DELAY_STEP_MS, MIB, PAGE_BYTES

# Limit of open descriptors per process.
OPEN_FILES_MAX: Final = 512
# Limit of closed files whose length and allocated space are remembered.
KNOWN_FILES_MAX: Final = 65_536
ALLOCATION_STEP_MAX: Final = 1 * MIB


def filler_units(count: int, physical_offset: int = 0) -> NDArray[np.uint8]:
    """uint8[20 × count]: units for offsets without a record; leading units have offset 0."""
    units = np.zeros(count, UNIT_DTYPE)
    units["physical_offset"] = physical_offset
    units["size"] = layout.FILLER_SIZE
    return units.view(np.uint8)


def allocation_end(end: int, file_bytes: int) -> int:
    """Allocated end for bytes in use below `end`: one page, then doubling, then fixed steps."""
    if end <= ALLOCATION_STEP_MAX:
        allocated = max(PAGE_BYTES, 1 << (end - 1).bit_length())
    else:
        allocated = -(-end // ALLOCATION_STEP_MAX) * ALLOCATION_STEP_MAX
    return min(allocated, file_bytes)


@dataclass(slots=True)
class _OpenFile:
    """An open file. `complete`: it has full length; `allocated_end`: end of allocated space.

    `created_here`: created by this object, so that nothing was ever written at or after `used_end`.
    """

    fd: int
    generation: int
    complete: bool = False
    allocated_end: int = 0
    created_here: bool = False
    used_end: int = 0


class _Row:
    """Adapter of one queue's files for `consumequeue.bounds`."""

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
    """The files of all queues of a store, of which a bounded number is open.

    `generation` is the queue's generation: after a topic was deleted and created again, it prevents the use of a
    descriptor of a deleted file.
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
        """Files below `folder`, of `file_bytes` each (a multiple of the unit size).

        `sync_follows`: start writeback of each full file, which shortens a later `sync`.
        """
        if file_bytes % UNIT_SIZE:
            raise ValueError(f"{file_bytes} bytes are not a multiple of {UNIT_SIZE}")
        self._io = io
        self._folder = folder
        self.file_bytes = file_bytes
        self._write = write
        self._open_max = open_max
        self._sync_follows = sync_follows
        self._open: OrderedDict[tuple[str, int, int], _OpenFile] = OrderedDict()
        # Generation and allocated end of complete files that were closed: with many queues each file is reopened
        # every few units. The whole dictionary is cleared when files are deleted, which is rare.
        self._closed: dict[tuple[str, int, int], tuple[int, int]] = {}
        self._dirty_files = DirtyFiles[tuple[str, int, int]](io, folder, lambda key: self.path(*key))
        self.files_created = 0
        """Number of files created."""

    @property
    def units_per_file(self) -> int:
        return self.file_bytes // UNIT_SIZE

    def next_file_offset(self, offset: int) -> int:
        """First queue offset of the file after the one that contains an offset."""
        return offset - offset % self.units_per_file + self.units_per_file

    def path(self, topic: str, queue_id: int, start: int) -> Path:
        """The file that begins at byte `start` of a queue's row."""
        # A single Path construction: recovery calls this for every queue.
        return Path(f"{self._folder}/{topic}/{queue_id}/{segment_name(start)}")

    def starts(self, topic: str, queue_id: int) -> list[int]:
        """Start positions of a queue's files, ascending; other file names are ignored."""
        found = (segment_start(name) for name in self._io.names(self._folder / f"{topic}/{queue_id}"))
        return [start for start in found if start is not None]

    # Writing

    def write_run(
        self, topic: str, queue_id: int, first_queue_offset: int, units: NDArray[np.uint8], generation: int = 0
    ) -> None:
        """Write consecutive units, uint8[20 × n], from a queue offset on.

        Writing is idempotent, since a unit's position is its queue offset: after an OSError the call can be repeated.
        """
        io, file_bytes = self._io, self.file_bytes
        position = first_queue_offset * UNIT_SIZE
        done, left = 0, len(units)
        while left > 0:
            place = position % file_bytes
            size = min(file_bytes - place, left)
            end = place + size
            key = topic, queue_id, position - place
            # Note the file first: it may be created before allocation fails.
            self._dirty_files.note(key)
            file = self._open.get(key)
            if file is None or file.generation != generation or end > file.allocated_end:
                file = self._writable(key, place, end, generation)
            else:
                self._open.move_to_end(key)
            run = units[done : done + size]
            io.crash_amid("cq.half_unit", file.fd, run, place)
            io.pwrite(file.fd, run, place)
            if end > file.used_end:
                file.used_end = end
            if self._sync_follows and end == file_bytes:
                io.start_writeback(file.fd, 0, file_bytes)
            position += size
            done += size
            left -= size

    def repair_run(
        self, topic: str, queue_id: int, first_queue_offset: int, units: NDArray[np.uint8], generation: int = 0
    ) -> int:
        """Write units as `write_run` does, unless the files have them; returns how many differed.

        Tags codes that cannot be derived from the log are kept: delivery times that were computed with other delay
        levels, and addresses of a ConsumeQueue extension.
        """
        count = len(units) // UNIT_SIZE
        found = self._existing_units(topic, queue_id, first_queue_offset, count, generation)
        plain, expected_plain = normalize_fillers(found), normalize_fillers(units.tobytes())
        if plain == expected_plain:
            return 0
        if not found.strip(b"\0"):
            self.write_run(topic, queue_id, first_queue_offset, units, generation)
            return count
        existing = as_units(plain)
        expected = as_units(expected_plain)[: len(existing)]
        same = (existing["physical_offset"] == expected["physical_offset"]) & (existing["size"] == expected["size"])
        codes = existing["tags_code"]
        if topic == SCHEDULE_TOPIC:
            # A difference that no two delays have is a torn sector of a power loss.
            difference = codes - expected["tags_code"]
            underivable = (codes > 0) & (np.abs(difference) <= DELAY_MS_MAX) & (difference % DELAY_STEP_MS == 0)
        else:
            underivable = self._are_extension_addresses(topic, queue_id, codes)
        same &= (codes == expected["tags_code"]) | underivable
        differing = count - int(np.count_nonzero(same))
        if differing:
            repaired = as_units(units).copy()
            repaired[: len(existing)][same] = as_units(found)[same]
            self.write_run(topic, queue_id, first_queue_offset, repaired.view(np.uint8), generation)
        return differing

    def _are_extension_addresses(self, topic: str, queue_id: int, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tags codes are valid addresses in the queue's extension files; others are torn."""
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

    def _existing_units(self, topic: str, queue_id: int, first: int, count: int, generation: int) -> bytes:
        """Units as they are on disk, possibly unsynced; b"" where nothing was ever written."""
        place, stop = first * UNIT_SIZE, (first + count) * UNIT_SIZE
        starts = range(place - place % self.file_bytes, stop, self.file_bytes)
        for start in starts:
            self._dirty_files.note((topic, queue_id, start))
        if all(self._is_unused(topic, queue_id, start, place - start, generation) for start in starts):
            return b""
        try:
            return self.raw_units(topic, queue_id, first, count, generation)
        except FileNotFoundError:
            return b""

    def _is_unused(self, topic: str, queue_id: int, start: int, place: int, generation: int) -> bool:
        """Whether a file is known to be empty from a position on, so that no read is needed."""
        file = self._find_open(topic, queue_id, start, generation)
        return file is not None and file.created_here and place >= file.used_end

    def _writable(self, key: tuple[str, int, int], place: int, end: int, generation: int) -> _OpenFile:
        """An open file of full length with allocated space for its bytes [place, end)."""
        topic, queue_id, start = key
        file = self._find_open(*key, generation) or self._reopen(*key, generation)
        if file is None:
            file = self._keep(topic, queue_id, start, _OpenFile(self._create(topic, queue_id, start), generation))
        if not file.complete:
            file.created_here = self._complete(file.fd, self.path(topic, queue_id, start), place)
            self._io.crash_point("cq.roll")
            file.used_end = place
            file.complete = True
            self.files_created += file.created_here
        if end > file.allocated_end:
            self._allocate(file, place, end)
        return file

    def _reopen(self, topic: str, queue_id: int, start: int, generation: int) -> _OpenFile | None:
        """Reopen a file that was complete when closed; None if unknown, outdated or gone."""
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
        # A deletion of the topic may remove the new folders. The flusher syncs them: here it would take minutes.
        for _ in range(REMOVE_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return self._io.open(path, write=True, create=True)
            with contextlib.suppress(FileNotFoundError):
                self._io.make_folder(path.parent, sync=False)
        return self._io.open(path, write=True, create=True)

    def _complete(self, fd: int, path: Path, place: int) -> bool:
        """Give a new or short file its full length, with fillers before its first unit.

        The length is set last: a short file may lack the fillers. Returns whether the file is new.
        """
        size = self._io.size(fd)
        if size == self.file_bytes:
            return False
        if size > self.file_bytes:
            raise CorruptStoreError(f"{path}: {size:,} bytes; expected {self.file_bytes:,}")
        filled = size - size % UNIT_SIZE
        if filled < place:
            self._io.pwrite(fd, filler_units((place - filled) // UNIT_SIZE), filled)
        self._io.set_size(fd, self.file_bytes)
        return size == 0

    def _allocate(self, file: _OpenFile, place: int, end: int) -> None:
        start = max(file.allocated_end, place - place % PAGE_BYTES)
        stop = allocation_end(end, self.file_bytes)
        self._io.allocate(file.fd, start, stop - start)
        file.allocated_end = stop

    # Reading

    def read_units(self, topic: str, queue_id: int, first: int, count: int, generation: int = 0) -> bytes:
        """Units [first, first + count), fewer at the end; all fillers have the usual form.

        Raises FileNotFoundError if the first unit's file is deleted, was never created, or is a folder.
        """
        return normalize_fillers(self.raw_units(topic, queue_id, first, count, generation))

    def raw_units(self, topic: str, queue_id: int, first: int, count: int, generation: int = 0) -> bytes:
        """The same as on disk, without normalizing fillers. Raises as `read_units`."""
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
        file = self._find_open(topic, queue_id, start, generation)
        if file is None:
            fd = self._io.open(self.path(topic, queue_id, start), write=self._write)
            file = self._keep(topic, queue_id, start, _OpenFile(fd, generation))
        return file

    # Extents and truncation: for recovery, while nothing else runs

    def extent(self, topic: str, queue_id: int) -> QueueExtent:
        """Extent of a queue by its files alone, assuming that no valid unit follows an invalid one."""
        row = _Row(self, topic, queue_id, 0)
        return bounds.extent(row, lambda physical_offset, size: physical_offset >= 0 and size > 0)

    def extent_below(self, topic: str, queue_id: int, physical_offset: int) -> QueueExtent:
        """Extent of a queue up to records that end at or below a log position.

        The files of a deleted queue may end with a torn, never synced unit of arbitrary size.
        """
        row = _Row(self, topic, queue_id, 0)
        return bounds.extent(row, lambda at, size: at >= 0 and 0 < size <= physical_offset - at)

    def first_offset(self, topic: str, queue_id: int, start: int) -> int:
        """Queue offset after the leading fillers of a row whose first file begins at byte `start`."""
        return bounds.leading_fillers(_Row(self, topic, queue_id, 0), start // UNIT_SIZE)

    def first_at_or_above(
        self, topic: str, queue_id: int, low: int, high: int, physical_offset: int, generation: int = 0
    ) -> int:
        """First offset in [low, high) at or above a log position; fillers count as the next unit."""
        row = _Row(self, topic, queue_id, generation)
        return bounds.first_at_or_above(row, low, high, physical_offset)

    def position_at(self, topic: str, queue_id: int, queue_offset: int, generation: int = 0) -> int | None:
        """Log position of a unit's record, for a filler that of the next unit; None without a unit."""
        place = bounds.record_place(_Row(self, topic, queue_id, generation), queue_offset)
        return place[0] if place is not None else None

    def last_end(self, topic: str, queue_id: int, max_offset: int, generation: int = 0) -> int:
        """End in the log of the last record of the units below a queue offset; 0 without any."""
        return bounds.last_end(_Row(self, topic, queue_id, generation), max_offset)

    def cut(self, topic: str, queue_id: int, physical_offset: int) -> QueueExtent:
        """Remove invalid units, and those whose records begin at or above a log position.

        Units below it must be whole. The caller must `sync` before it writes new units.
        """
        extent = self.extent_below(topic, queue_id, physical_offset)
        return replace(extent, changed=self.clear_from(topic, queue_id, extent.max_offset))

    def clear_from(self, topic: str, queue_id: int, max_offset: int) -> bool:
        """Remove everything at or after a queue offset; returns whether there was anything.

        Files without units are deleted, except for the queue's first one: its name keeps the queue's offset.
        """
        starts = self.starts(topic, queue_id)
        if not starts:
            return False
        end = max_offset * UNIT_SIZE
        last = max((start for start in starts if start < end), default=starts[0])
        for start in reversed(starts):
            if start > last:
                self._forget_file(topic, queue_id, start)
                self._dirty_files.note((topic, queue_id, start))
                self._io.unlink(self.path(topic, queue_id, start))
        changed = self._zero_after(topic, queue_id, last, max(0, end - last))
        return changed or starts[-1] > last

    def sync(self) -> None:
        """Make everything written, compared or removed here durable: bytes, lengths and names."""
        self._dirty_files.sync()

    def _zero_after(self, topic: str, queue_id: int, start: int, place: int) -> bool:
        """Complete a file and zero it from `place` on; returns whether this changed it."""
        fd = self._for_reading(topic, queue_id, start, 0).fd
        changed = False
        if self._io.size(fd) < self.file_bytes:
            self._io.set_size(fd, self.file_bytes)
            changed = True
        changed |= zero_tail(self._io, fd, place) > 0
        if changed:
            self._dirty_files.note((topic, queue_id, start))
        return changed

    def remove(self, topic: str, queue_id: int) -> None:
        """Remove a queue's files and folder, and the topic's folder with its last queue."""
        self.forget(topic, queue_id)
        self._dirty_files.note((topic, queue_id, 0))
        remove_tree(self._io, self._folder / topic / str(queue_id))
        if not self._io.names(self._folder / topic):
            remove_tree(self._io, self._folder / topic)

    def remove_unused(self, topic: str, queue_id: int) -> bool:
        """Remove a queue's files, and its folder unless it has other content; whether it did."""
        folder = self._folder / topic / str(queue_id)
        if any(segment_start(name) is None for name in self._io.names(folder)):
            return False
        self.remove(topic, queue_id)
        return True

    # Open files

    def forget(self, topic: str, queue_id: int) -> None:
        self._closed.clear()
        for key in [key for key in self._open if key[:2] == (topic, queue_id)]:
            self._forget_file(*key)

    def forget_deleted(self, kept_of: Callable[[str, int], tuple[int, int] | None]) -> None:
        """Close deleted files to release space; `kept_of` returns a queue's generation and minimum."""
        self._closed.clear()
        for (topic, queue_id, start), file in list(self._open.items()):
            generation, minimum = kept_of(topic, queue_id) or (-1, 0)
            if file.generation != generation or start + self.file_bytes <= minimum * UNIT_SIZE:
                self._forget_file(topic, queue_id, start)

    def close(self) -> None:
        while self._open:
            self._io.close(self._open.popitem()[1].fd)

    def _find_open(self, topic: str, queue_id: int, start: int, generation: int) -> _OpenFile | None:
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
            # At the limit keep the old entries: with cyclic access each entry would be evicted before its reuse.
            if oldest.complete and len(self._closed) < KNOWN_FILES_MAX:
                self._closed[key] = oldest.generation, oldest.allocated_end
        self._open[topic, queue_id, start] = file
        return file

    def _forget_file(self, topic: str, queue_id: int, start: int) -> None:
        file = self._open.pop((topic, queue_id, start), None)
        self._closed.pop((topic, queue_id, start), None)
        if file is not None:
            self._io.close(file.fd)


# Folders of queues

REMOVE_TRIES: Final = 3
QUEUE_ID_MAX: Final = (1 << 31) - 1
# Present in each RocksDB: the name of its newest file list.
_ROCKSDB_FILE: Final = "CURRENT"


def queues_on_disk(io: StoreIO, folder: Path) -> tuple[list[tuple[str, int]], list[Path]]:
    """(topic, queue id) of each queue folder below `folder`, and other entries."""
    queues: list[tuple[str, int]] = []
    strays: list[Path] = []
    for topic in io.entries(folder):
        if not is_topic(topic):
            strays.append(folder / topic.name)
            continue
        for entry in io.entries(folder / topic.name):
            if _is_queue(entry):
                queues.append((topic.name, int(entry.name)))
            else:
                strays.append(folder / topic.name / entry.name)
    return queues, strays


def _is_queue(entry: FolderEntry) -> bool:
    return entry.kind is Kind.FOLDER and is_queue_id(entry.name)


def is_topic(entry: FolderEntry) -> bool:
    """Whether an entry is a topic's folder, which has a UTF-8 name."""
    return entry.kind is Kind.FOLDER and is_text(entry.name)


def bars_topic(entry: FolderEntry) -> bool:
    """Whether an entry that is not a folder blocks a topic's folder, so dispatch would fail."""
    with contextlib.suppress(BadTopicError):
        check_topic(entry.name)
        return entry.kind is not Kind.FOLDER
    return False


def bars_queue(entry: FolderEntry) -> bool:
    """Whether an entry of a topic's folder that is not a folder blocks a queue's folder."""
    return entry.kind is not Kind.FOLDER and is_queue_id(entry.name)


def is_queue_id(name: str) -> bool:
    """Whether a folder's name is a queue id of 32 bits in RocketMQ's notation."""
    return name.isascii() and name.isdigit() and str(int(name)) == name and int(name) <= QUEUE_ID_MAX


def has_rocksdb_queues(io: StoreIO, folder: Path) -> bool:
    """Whether RocksDB keeps the queues (`storeType = defaultRocksDB`) instead of files."""
    entries = io.entries(folder)
    return {_ROCKSDB_FILE} == {entry.name for entry in entries if entry.name == _ROCKSDB_FILE or is_topic(entry)}


def rocksdb_config(io: StoreIO, folder: Path) -> Path | None:
    """The first folder in `config` where RocksDB keeps topics, groups or offsets, or None."""
    folders = sorted(folder / entry.name for entry in io.entries(folder) if entry.kind is Kind.FOLDER)
    return next((found for found in folders if io.entry(found / _ROCKSDB_FILE) is not None), None)


def adopted_file_bytes(io: StoreIO, folder: Path, configured: int) -> int:
    """File size of existing ConsumeQueues: the configured one if used, else the most common.

    Sizes that are not a multiple of the unit size or contradict a file's name are ignored, and so is a file of ours
    that a crash left short: it ends with a filler.
    """
    sizes: Counter[int] = Counter()
    starts: set[int] = set()
    for queue, entry in files_of_queues(io, folder):
        start = segment_start(entry.name)
        if start is None:
            continue
        if entry.size == configured:
            return configured
        starts.add(start)
        if entry.size <= SPARSE_FILE_BYTES_MAX and not _ends_with_filler(io, queue / entry.name, entry.size):
            sizes[entry.size] += 1
    fitting = [size for size in sizes if size > 0 and size % UNIT_SIZE == 0 and not any(s % size for s in starts)]
    return max(fitting, key=lambda size: (sizes[size], size)) if fitting else configured


def files_of_queues(io: StoreIO, folder: Path) -> Iterator[tuple[Path, FolderEntry]]:
    """(queue's folder, file) for every file of every queue."""
    for topic in filter(is_topic, io.entries(folder)):
        for queue in filter(_is_queue, io.entries(folder / topic.name)):
            path = folder / topic.name / queue.name
            yield from ((path, entry) for entry in io.entries(path) if entry.kind is Kind.FILE)


def _ends_with_filler(io: StoreIO, path: Path, size: int) -> bool:
    with io.opened(path) as fd:
        last = io.pread(fd, UNIT_SIZE, max(0, size - UNIT_SIZE))
    return int.from_bytes(last[SIZE:TAGS_CODE], "big") == FILLER_SIZE


def remove_tree(io: StoreIO, folder: Path) -> None:
    """Remove a ConsumeQueue folder with its content, tolerating concurrent changes.

    Raises OSError if it fails, or if new files keep appearing.
    """
    for tries_left in reversed(range(REMOVE_TRIES)):
        try:
            io.remove_folder(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or not tries_left:
                raise
        else:
            return


# Flush of ConsumeQueue files: the cq-flusher's part of the engine.
#
# The dispatcher writes units in another process, so dirty units follow from the last synced offset and the current
# `max_offset` in the queue table. Read `dispatched` before a pass: after a `complete` pass all units of records below
# it are durable.


# Synced offset of a queue that existed before the flusher.
_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class QueueFlushPass:
    """Result of a pass. `complete`: every unit published before the pass is durable.

    `waiting_queues` have too few dirty pages for this pass.
    """

    synced_files: int
    synced_queues: int
    waiting_queues: int
    whole_file_system: bool

    @property
    def complete(self) -> bool:
        return self.waiting_queues == 0


class ConsumeQueueFlush:
    """Syncs the ConsumeQueue files of all queues in passes.

    A new object does not know the state of its predecessor: its first pass syncs the whole file system if there is any
    queue. Roles pass their SyncGuard as `syncs`; after an OSError the same queues are still dirty.
    """

    def __init__(self, io: StoreIO, syncs: Syncing, folder: Path, file_bytes: int, table: QueueTable) -> None:
        self._io = io
        self._syncs = syncs
        self._folder = folder
        self._file_bytes = file_bytes
        self._table = table
        self._synced = np.zeros(table.capacity, np.int64)
        self._synced[: table.count] = _UNKNOWN

    @property
    def synced(self) -> NDArray[np.int64]:
        """int64[queues]: durable end of each queue by number; a view."""
        return self._synced[: self._table.count]

    def pass_(self, least_pages: int) -> QueueFlushPass:
        """Sync every queue with at least `least_pages` dirty pages; 0 syncs all. Raises OSError."""
        max_offsets = self._table.column(table_layout.MAX_OFFSET)
        synced = self._synced[: len(max_offsets)]
        # A deleted queue has no files.
        states = self._table.column(table_layout.STATE)[: len(max_offsets)]
        changed = (max_offsets != synced) & (states == table_layout.STATE_LIVE)
        due = changed & self._enough(synced, max_offsets, least_pages)
        numbers = np.flatnonzero(due)
        files = self._sync(numbers, max_offsets) if len(numbers) else 0
        self._synced[numbers] = max_offsets[numbers]
        return QueueFlushPass(
            synced_files=max(files, 0),
            synced_queues=len(numbers),
            waiting_queues=int(np.count_nonzero(changed)) - len(numbers),
            whole_file_system=files < 0,
        )

    def _enough(self, synced: NDArray[np.int64], written: NDArray[np.int64], least_pages: int) -> NDArray[np.bool_]:
        """Whether enough dirty pages lie between two offsets, as in RocketMQ; full files count."""
        first = synced * UNIT_SIZE
        stop = written * UNIT_SIZE
        pages = stop % self._file_bytes // PAGE_BYTES - first % self._file_bytes // PAGE_BYTES
        other_file = stop // self._file_bytes != first // self._file_bytes
        enough: NDArray[np.bool_] = other_file | (pages >= least_pages) | (synced == _UNKNOWN)
        return enough

    def _sync(self, numbers: NDArray[np.int64], max_offsets: NDArray[np.int64]) -> int:
        """Sync the files of these queues; returns their number, −1 for the whole file system."""
        if self._synced[numbers].min() == _UNKNOWN:
            return self._sync_file_system()
        paths: list[tuple[Path, bool]] = []
        for number in numbers.tolist():
            paths += self._dirty_files(number, int(self._synced[number]), int(max_offsets[number]))
            if len(paths) > SINGLE_SYNCS_MAX:
                return self._sync_file_system()
        return self._sync_files(paths)

    def _dirty_files(self, number: int, synced: int, written: int) -> Iterator[tuple[Path, bool]]:
        """(path, whether its name may be new) of the files of units [synced, written)."""
        topic, queue_id = self._table.name(number)
        folder = self._folder / topic / str(queue_id)
        # A deleted and newly created queue has new files, whatever its offsets.
        begin = self._table.first_offset(number) * UNIT_SIZE
        first = synced * UNIT_SIZE // self._file_bytes * self._file_bytes
        stop = written * UNIT_SIZE
        if stop - first > SINGLE_SYNCS_MAX * self._file_bytes or synced == 0:
            # A queue need not begin at 0: list the files.
            found = (segment_start(name) for name in self._io.names(folder))
            starts = [start for start in found if start is not None and first <= start < stop]
        else:
            starts = list(range(first, stop, self._file_bytes))
        for start in starts:
            yield folder / segment_name(start), max(start, begin) >= synced * UNIT_SIZE

    def _sync_files(self, paths: list[tuple[Path, bool]]) -> int:
        sync_files(self._io, self._syncs, (path for path, _is_new in paths))
        folders = {path.parent for path, is_new in paths if is_new}
        folders |= {queue.parent for queue in folders}
        if folders:
            folders |= {self._folder, self._folder.parent}
        for folder in sorted(folders):
            # The topic may have been deleted.
            with contextlib.suppress(FileNotFoundError):
                self._syncs.sync_folder(folder)
        return len(paths)

    def _sync_file_system(self) -> int:
        try:
            with self._io.opened(self._folder) as fd:
                self._syncs.sync_file_system(fd)
        except FileNotFoundError:
            return 0  # Nothing was ever written.
        return -1
