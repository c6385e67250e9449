"""The queue table: a mapped file with all queues and the offsets that the roles share.

The writer creates and deletes queues and stores `next_offset`, the dispatcher `max_offset`, the keeper `min_offset`;
the query role counts delivered messages. All roles read. Recovery rebuilds the file at each start.
"""

from __future__ import annotations

import errno
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError, DiskFullError, TooManyQueuesError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.ipc.control_words import Words
from mqproc.kernels.jit.intrinsics import store_release
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import queue_table as layout
from mqproc.layout.properties import java_hash
from mqproc.paths import StorePaths
from mqproc.util.units import counted

T = TypeVar("T")

POSITION_UNKNOWN: Final = (1 << 63) - 1
"""Log position of a deletion that is unknown: then only queue offsets identify the deleted queue's records."""

_ROOM_ENTRIES: Final = 128
"""Unit of space allocation: a store into a hole of a mapped file raises SIGBUS on a full disk."""

# A generation's position above the bits of a queue number.
_GENERATION_SHIFT: Final = 32


class NoRoomForQueuesError(DiskFullError):
    """The disk is full: no entries could be added. Nothing was changed."""


class QueueTable:
    """A mapped queue table.

    `words` is the int64 view by word index, `cells` the same as an array int64[n], `bytes_view` uint8[n] of the whole
    file for kernels, `slots` int32[hash slots].
    """

    def __init__(self, io: StoreIO, path: Path, *, write: bool = False) -> None:
        """Open an existing table. Raises CorruptStoreError for another file or version."""
        self._io = io
        self._path = path
        with io.opened(path, write=write) as fd:
            size = io.size(fd)
            if size < layout.HEADER_SIZE or size % layout.WORD_SIZE:
                raise CorruptStoreError(f"{path}: {size} bytes are not a queue table")
            mapping = io.map(fd, size, write=write)
        self.words = Words(mapping)
        if self.words[layout.HEADER_MAGIC] != layout.MAGIC or self.words[layout.HEADER_VERSION] != layout.VERSION:
            self.close()
            raise CorruptStoreError(f"{path}: offset 0: not a queue table of version {layout.VERSION}")
        self._attach(mapping)
        # Existing entries were allocated in whole steps.
        self._room = _whole_steps(self.count)

    def _attach(self, memory: mmap.mmap | memoryview) -> None:
        """Create the arrays over a table whose words exist."""
        size = len(memory)
        self._map = memory
        self.capacity = self.words[layout.HEADER_CAPACITY]
        self.bytes_view: NDArray[np.uint8] = as_kernel_array(memory)
        self.cells: NDArray[np.int64] = self.bytes_view[: size & ~7].view(np.int64)
        hash_start = layout.hash_offset(self.capacity)
        self.slots: NDArray[np.int32] = self.bytes_view[
            hash_start : hash_start + 4 * layout.hash_slots(self.capacity)
        ].view(np.int32)
        self._numbers: dict[tuple[str, int], int] = {}
        self._names: list[tuple[str, int]] = []

    @classmethod
    def in_memory(cls, capacity: int) -> QueueTable:
        """An empty table without a file, for tools that number the queues they encounter."""
        # Untouched pages take no memory.
        memory = np.zeros(layout.file_size(capacity), np.uint8).data
        header = _header(capacity)
        memory[: len(header)] = header
        table = cls.__new__(cls)
        table._room = capacity
        table.words = Words(memory)
        table._attach(memory)
        return table

    @classmethod
    def create(cls, io: StoreIO, path: Path, capacity: int) -> QueueTable:
        """Create an empty table, replacing any existing file, and open it for writing."""
        with io.new_file(path) as fd:
            io.set_size(fd, layout.file_size(capacity))
            io.pwrite(fd, _header(capacity), 0)
            io.allocate(fd, layout.hash_offset(capacity), 4 * layout.hash_slots(capacity))
        return cls(io, path, write=True)

    def close(self) -> None:
        """Release the views; the mapping ends with its last array."""
        self.words.close()

    @property
    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int32]]:
        """The table as arguments of kernels: `bytes_view`, `cells`, `slots`."""
        return self.bytes_view, self.cells, self.slots

    @property
    def count(self) -> int:
        """Number of entries, including tombstones; queue numbers are 0…count−1."""
        return self.words.cells[layout.HEADER_COUNT]

    @property
    def tombstones(self) -> int:
        """Number of entries of deleted queues; a rebuilt table starts without any."""
        return self.words.cells[layout.HEADER_COUNT] - self.words.cells[layout.HEADER_LIVE]

    @property
    def deletions(self) -> int:
        """Number of deletions so far; while it is 0, no queue name was reused."""
        return self.words.cells[layout.HEADER_DELETIONS]

    @property
    def gone(self) -> tuple[int, int]:
        """Changes with each deleted queue. Two numbers, since the count changes before the state."""
        return self.deletions, self.tombstones

    @property
    def changes(self) -> tuple[int, int, int]:
        """Changes whenever a queue is created or deleted."""
        cells = self.words.cells
        return cells[layout.HEADER_COUNT], cells[layout.HEADER_LIVE], cells[layout.HEADER_DELETIONS]

    def find(self, topic: str, queue_id: int) -> int:
        """The number of a live queue, −1 if none exists."""
        number = self.entry(topic, queue_id)
        return number if number >= 0 and self.is_live(number) else -1

    def entry(self, topic: str, queue_id: int) -> int:
        """The number of a queue or its tombstone, −1 if there is neither."""
        number = self._numbers.get((topic, queue_id))
        if number is None:
            self._read_new_names()
            number = self._numbers.get((topic, queue_id), -1)
        return number

    def is_live(self, number: int) -> bool:
        """Whether the entry is a queue and not a tombstone."""
        return self.words.cells[layout.entry_word(number, layout.STATE)] == layout.STATE_LIVE

    def generation(self, number: int) -> int:
        """Identifies a queue among all queues, including deleted queues of the same name."""
        return number + (self.words.cells[layout.entry_word(number, layout.GENERATION)] << _GENERATION_SHIFT)

    def deletion(self, number: int) -> tuple[int, int]:
        """Ends of log and queue offsets at the last deletion; (0, 0) if it was never deleted."""
        words, entry = self.words, layout.entry_word(number, 0)
        return words[entry + layout.DELETED_AT], words[entry + layout.DELETED_NEXT]

    def name(self, number: int) -> tuple[str, int]:
        """(topic, queue id) of a number below `count`."""
        if number >= len(self._names):
            self._read_new_names()
        return self._names[number]

    def live(self) -> Iterator[tuple[int, str, int]]:
        """(number, topic, queue id) of every live queue."""
        self._read_new_names()
        states = self.column(layout.STATE).tolist()
        # Their lengths may differ: the writer creates queues concurrently.
        for number, ((topic, queue_id), state) in enumerate(zip(self._names, states, strict=False)):
            if state == layout.STATE_LIVE:
                yield number, topic, queue_id

    def column(self, word: int) -> NDArray[np.int64]:
        """A copy of one word of all entries: int64[count]."""
        start = layout.entry_word(0, word)
        stop = start + self.count * layout.ENTRY_WORDS
        return self.cells[start : stop : layout.ENTRY_WORDS].copy()

    # Words of one queue

    def next_offset(self, number: int) -> int:
        return self.words[layout.entry_word(number, layout.NEXT_OFFSET)]

    def first_offset(self, number: int) -> int:
        """First queue offset of the queue's current generation."""
        return self.words[layout.entry_word(number, layout.FIRST_OFFSET)]

    def max_offset(self, number: int) -> int:
        # Two owners: the dispatcher's word may still belong to the deleted queue.
        return max(self.words[layout.entry_word(number, layout.MAX_OFFSET)], self.first_offset(number))

    def min_offset(self, number: int) -> int:
        return max(self.words[layout.entry_word(number, layout.MIN_OFFSET)], self.first_offset(number))

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int, int] | None:
        """(generation, minimum, maximum offset) of a queue, None without one; used by each pull.

        The minimum is read first, so it cannot exceed the maximum. If the queue is deleted and created again
        meanwhile, the read is repeated.
        """
        number = self._numbers.get((topic, queue_id), -1)
        if number < 0 and (number := self.entry(topic, queue_id)) < 0:
            return None
        cells, entry = self.words.cells, layout.HEADER_WORDS + number * layout.ENTRY_WORDS
        while cells[entry + layout.STATE] == layout.STATE_LIVE:
            generation = cells[entry + layout.GENERATION]
            first = cells[entry + layout.FIRST_OFFSET]
            minimum = cells[entry + layout.MIN_OFFSET]
            maximum = cells[entry + layout.MAX_OFFSET]
            if cells[entry + layout.GENERATION] == generation:
                return number + (generation << _GENERATION_SHIFT), max(minimum, first), max(maximum, first)
        return None

    def last_physical_end(self, number: int) -> int:
        return self.words[layout.entry_word(number, layout.LAST_PHYSICAL_END)]

    def store(self, number: int, word: int, value: int) -> None:
        """Store one of a queue's words; the caller's role must own it."""
        self.words[layout.entry_word(number, word)] = value

    # For the keeper

    def raise_min_offset(self, number: int, offset: int) -> None:
        """Raise the minimum after expiry; it never decreases."""
        if offset > self.min_offset(number):
            self.store(number, layout.MIN_OFFSET, offset)

    # For the writer

    def create_queue(self, topic: str, queue_id: int, next_offset: int = 0, min_offset: int = 0) -> int:
        """Create and publish a queue; returns its number, or the number of the existing queue.

        A deleted queue reuses its entry and continues its offsets: `next_offset` and `min_offset` apply to new names
        only. Raises TooManyQueuesError beyond `max_queues`, and as `make_room`.
        """
        number = self.entry(topic, queue_id)
        if number >= 0:
            if not self.is_live(number):
                self._revive(number)
            return number
        return self._add(topic, queue_id, next_offset, min_offset, layout.STATE_LIVE)

    def make_room(self, queues: int) -> None:
        """Allocate space for entries of that many more queues. Raises NoRoomForQueuesError."""
        end = min(self.count + queues, self.capacity)
        if end <= self._room:
            return
        start = layout.entry_offset(self._room)
        room = min(_whole_steps(end), self.capacity)
        try:
            with self._io.opened(self._path, write=True) as fd:
                self._io.allocate(fd, start, layout.entry_offset(room) - start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            text = f"no room on the disk for {counted(queues, 'more queue')}"
            raise NoRoomForQueuesError(text, hint_ms=1000) from error
        self._room = room

    def delete_queue(self, number: int, physical_offset: int = POSITION_UNKNOWN) -> None:
        """Replace a queue by a tombstone, which keeps name and next offset for a new queue.

        `physical_offset` is the log's end, above all of the queue's records. A tombstone is updated.
        """
        self._remember(number, physical_offset, self.next_offset(number))
        if self.is_live(number):
            store_release(self.cells, layout.entry_word(number, layout.STATE), layout.STATE_TOMBSTONE)
            self.words.add(layout.HEADER_LIVE, -1)

    # For recovery

    def remember_deletion(self, topic: str, queue_id: int, physical_offset: int, next_offset: int) -> None:
        """Add a queue deleted in an earlier run: a tombstone, or a live queue's previous generation.

        Raises TooManyQueuesError.
        """
        number = self.entry(topic, queue_id)
        if number < 0:
            number = self._add(topic, queue_id, next_offset, next_offset, layout.STATE_TOMBSTONE)
        first_offset = self.min_offset(number)
        self._remember(number, physical_offset, next_offset)
        # A queue that another program created again begins at 0, as its units show.
        self.words[layout.entry_word(number, layout.FIRST_OFFSET)] = min(next_offset, first_offset)

    def begin_at(self, number: int, queue_offset: int) -> None:
        """Lower all offsets of a queue without units to the offset of its first record."""
        if queue_offset < self.first_offset(number):
            for word in (layout.FIRST_OFFSET, layout.NEXT_OFFSET, layout.MAX_OFFSET, layout.MIN_OFFSET):
                self.words[layout.entry_word(number, word)] = queue_offset

    def _add(self, topic: str, queue_id: int, next_offset: int, min_offset: int, state: int) -> int:
        number = self.count
        if number >= self.capacity:
            used = f"max_queues = {self.capacity:,} queues are in use, deleted ones included"
            raise TooManyQueuesError(f"queue {queue_id} of topic {topic!r}: {used}")
        self.make_room(1)
        name = topic.encode()
        topic_hash = java_hash(topic)
        words, entry = self.words, layout.entry_word(number, 0)
        start = layout.entry_offset(number) + layout.TOPIC_OFFSET_BYTES
        self._map[start : start + len(name)] = name
        words[entry + layout.QUEUE_ID] = queue_id
        words[entry + layout.TOPIC_SIZE] = len(name)
        words[entry + layout.TOPIC_HASH] = topic_hash
        words[entry + layout.NEXT_OFFSET] = words[entry + layout.MAX_OFFSET] = next_offset
        words[entry + layout.MIN_OFFSET] = min_offset
        words[entry + layout.STATE] = state
        self.slots[self._free_slot(topic_hash, queue_id)] = number + 1
        words[layout.HEADER_COUNT] = number + 1
        words.add(layout.HEADER_LIVE, state == layout.STATE_LIVE)
        return number

    def _revive(self, number: int) -> None:
        words = self.words
        words.add(layout.entry_word(number, layout.GENERATION), 1)
        store_release(self.cells, layout.entry_word(number, layout.STATE), layout.STATE_LIVE)
        words.add(layout.HEADER_LIVE, 1)

    def _remember(self, number: int, physical_offset: int, next_offset: int) -> None:
        words = self.words
        words[layout.entry_word(number, layout.DELETED_NEXT)] = next_offset
        words[layout.entry_word(number, layout.DELETED_AT)] = physical_offset
        words[layout.entry_word(number, layout.FIRST_OFFSET)] = next_offset
        words.add(layout.HEADER_DELETIONS, 1)

    def _free_slot(self, topic_hash: int, queue_id: int) -> int:
        mask = len(self.slots) - 1
        slot = layout.first_slot(topic_hash, queue_id, len(self.slots))
        while self.slots[slot] != 0:
            slot = (slot + 1) & mask
        return slot

    def _read_new_names(self) -> None:
        for number in range(len(self._names), self.count):
            start = layout.entry_offset(number) + layout.TOPIC_OFFSET_BYTES
            size = self.words[layout.entry_word(number, layout.TOPIC_SIZE)]
            # All names are kept per process: share one string per topic and one pair per queue.
            topic = sys.intern(bytes(self._map[start : start + size]).decode())
            name = topic, self.words[layout.entry_word(number, layout.QUEUE_ID)]
            self._names.append(name)
            self._numbers[name] = number


def _whole_steps(entries: int) -> int:
    return -(-entries // _ROOM_ENTRIES) * _ROOM_ENTRIES


def _header(capacity: int) -> bytes:
    header = np.zeros(layout.HEADER_CAPACITY + 2, np.int64)
    header[layout.HEADER_MAGIC] = layout.MAGIC
    header[layout.HEADER_VERSION] = layout.VERSION
    header[layout.HEADER_CAPACITY] = capacity
    header[layout.HEADER_HASH_SLOTS] = layout.hash_slots(capacity)
    return header.tobytes()


# State of the previous run


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """A queue had units [min_offset, max_offset); the last one's record ended at `physical_end`."""

    min_offset: int
    max_offset: int
    physical_end: int
    store_timestamp_ms: int


QueueSnapshots = dict[tuple[str, int], QueueSnapshot]


def read_queue_snapshots(io: StoreIO, paths: StorePaths) -> QueueSnapshots | None:
    """Queues of the previous run's table by (topic, queue id); None without a whole table.

    The table is not synced while a group runs: after a power loss it may be older than the files. But a queue that had
    a unit must still have it, so recovery can detect lost units.
    """
    return _read_table(io, paths, _snapshots_of)


def read_next_offsets(io: StoreIO, paths: StorePaths) -> dict[tuple[str, int], int]:
    """Next queue offsets in the previous run's table, which include undispatched records."""
    return _read_table(io, paths, _next_offsets_of) or {}


def _read_table(io: StoreIO, paths: StorePaths, read: Callable[[QueueTable], T]) -> T | None:
    entry = io.entry(paths.queues)
    if entry is None or entry.kind is not Kind.FILE:
        return None
    try:
        table = QueueTable(io, paths.queues)
        try:
            whole = table.bytes_view.size == layout.file_size(table.capacity) and 0 <= table.count <= table.capacity
            return read(table) if whole else None
        finally:
            table.close()
    except (FileNotFoundError, CorruptStoreError, ValueError, OverflowError):
        # Garbage after a whole header: contradictory sizes, invalid names.
        return None


def _next_offsets_of(table: QueueTable) -> dict[tuple[str, int], int]:
    offsets = table.column(layout.NEXT_OFFSET).tolist()
    return {(topic, queue_id): offsets[number] for number, topic, queue_id in table.live()}


def _snapshots_of(table: QueueTable) -> QueueSnapshots:
    columns = (layout.MIN_OFFSET, layout.MAX_OFFSET, layout.LAST_PHYSICAL_END, layout.LAST_STORE_TIMESTAMP_MS)
    words = [table.column(word).tolist() for word in columns]
    # Offsets up to here may belong to a deleted queue of the same name.
    firsts = table.column(layout.FIRST_OFFSET).tolist()
    return {
        (topic, queue_id): QueueSnapshot(
            max(words[0][number], firsts[number]), *(column[number] for column in words[1:])
        )
        for number, topic, queue_id in table.live()
        if words[1][number] > firsts[number]
    }
