"""The queue table as a mapped file: which queues there are, and the offsets that the roles share.

The writer creates and deletes queues and stores `next_offset`; the dispatcher stores `max_offset`; the keeper
`min_offset`; the query role counts what it hands out. Everybody reads. The file is made anew by recovery at each start.
"""

from __future__ import annotations

import errno
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError, DiskFullError, TooManyQueuesError
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.kernels.intrinsics import store_release
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import queue_table as layout
from mqproc.layout.java_hash import java_hash
from mqproc.quantities import counted

POSITION_UNKNOWN: Final = (1 << 63) - 1
"""Where in the log a queue was deleted, when nobody can say: then its queue offsets alone tell its records."""

_ROOM_ENTRIES: Final = 128
"""Space is allocated for so many entries at once: a store into a hole of the file on a full disk is a SIGBUS."""

# A generation above the bits that numbers take.
_GENERATION_SHIFT: Final = 32


class NoRoomForQueuesError(DiskFullError):
    """The disk has no room for more entries; nothing was changed."""


class QueueTable:
    """A mapped queue table.

    `words` is the int64 view by word index, `cells` the same as an array int64[n], `bytes_view` uint8[n] of the whole
    file for kernels, `slots` int32[hash slots].
    """

    def __init__(self, io: StoreIO, path: Path, *, write: bool = False) -> None:
        """Open an existing table. Raises CorruptStoreError when it is no table of this version."""
        self._io = io
        self._path = path
        fd = io.open(path, write=write)
        try:
            size = io.size(fd)
            if size < layout.HEADER_SIZE or size % layout.WORD_SIZE:
                raise CorruptStoreError(f"{path}: {size} bytes are no queue table")
            mapping = io.map(fd, size, write=write)
        finally:
            io.close(fd)
        self.words = Words(mapping)
        if self.words[layout.HEADER_MAGIC] != layout.MAGIC or self.words[layout.HEADER_VERSION] != layout.VERSION:
            self.close()
            raise CorruptStoreError(f"{path}: offset 0: not a queue table of version {layout.VERSION}")
        self._attach(mapping)
        # Whoever made the entries that are there has allocated whole steps.
        self._room = _whole_steps(self.count)

    def _attach(self, memory: mmap.mmap | memoryview) -> None:
        """Make the arrays over a table, whose words are there already."""
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
        """An empty table for `capacity` queues without a file: for tools that number the queues that they meet."""
        # Pages of it that nobody touches are never made.
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
        """Make an empty table for `capacity` queues in place of whatever is there, and open it for writing."""
        temporary = path.with_name(path.name + ".tmp")
        io.unlink(temporary)
        fd = io.open(temporary, write=True, create=True, mode=0o600)
        try:
            io.set_size(fd, layout.file_size(capacity))
            io.pwrite(fd, _header(capacity), 0)
            io.allocate(fd, layout.hash_offset(capacity), 4 * layout.hash_slots(capacity))
        except OSError:
            # A full disk needs what was allocated of it.
            io.unlink(temporary)
            raise
        finally:
            io.close(fd)
        io.rename(temporary, path)
        return cls(io, path, write=True)

    def close(self) -> None:
        """Release the views; the map goes with its last array."""
        self.words.close()

    @property
    def count(self) -> int:
        """Entries made so far, tombstones included: numbers are 0…count−1."""
        return self.words.cells[layout.HEADER_COUNT]

    @property
    def tombstones(self) -> int:
        """Entries of queues that are deleted, which only a new table is without."""
        return self.words.cells[layout.HEADER_COUNT] - self.words.cells[layout.HEADER_LIVE]

    @property
    def deletions(self) -> int:
        """Queues that have been deleted so far; while it is 0 no queue has an earlier life."""
        return self.words.cells[layout.HEADER_DELETIONS]

    @property
    def gone(self) -> tuple[int, int]:
        """Another one whenever a queue was deleted since. It is counted before it is gone, so one number is too few."""
        cells = self.words.cells
        deletions = cells[layout.HEADER_DELETIONS]
        return deletions, cells[layout.HEADER_COUNT] - cells[layout.HEADER_LIVE]

    @property
    def changes(self) -> tuple[int, int, int]:
        """Another one whenever a queue was made or deleted since."""
        cells = self.words.cells
        return cells[layout.HEADER_COUNT], cells[layout.HEADER_LIVE], cells[layout.HEADER_DELETIONS]

    def find(self, topic: str, queue_id: int) -> int:
        """The queue's number, −1 when there is none."""
        number = self.entry(topic, queue_id)
        return number if number >= 0 and self.is_live(number) else -1

    def entry(self, topic: str, queue_id: int) -> int:
        """The number of a queue or of its tombstone, −1 when the table has neither."""
        number = self._numbers.get((topic, queue_id))
        if number is None:
            self._read_new_names()
            number = self._numbers.get((topic, queue_id), -1)
        return number

    def is_live(self, number: int) -> bool:
        """Whether the queue is there; else it is a tombstone."""
        return self.words.cells[layout.entry_word(number, layout.STATE)] == layout.STATE_LIVE

    def generation(self, number: int) -> int:
        """A number that tells the queue from others, and from the deleted ones that had its name before it."""
        return number + (self.words.cells[layout.entry_word(number, layout.GENERATION)] << _GENERATION_SHIFT)

    def deletion(self, number: int) -> tuple[int, int]:
        """Where the log and the queue's offsets ended when it was deleted the last time; (0, 0) when it never was."""
        words = self.words
        return (
            words[layout.entry_word(number, layout.DELETED_AT)],
            words[layout.entry_word(number, layout.DELETED_NEXT)],
        )

    def name(self, number: int) -> tuple[str, int]:
        """(topic, queue id) of a number below `count`."""
        if number >= len(self._names):
            self._read_new_names()
        return self._names[number]

    def live(self) -> Iterator[tuple[int, str, int]]:
        """(number, topic, queue id) of every queue that is there now and not deleted."""
        self._read_new_names()
        states = self.column(layout.STATE).tolist()
        # Either may be the longer one: the writer makes queues meanwhile.
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
        """What the queue's offsets began with when it was made the last time."""
        return self.words[layout.entry_word(number, layout.FIRST_OFFSET)]

    def max_offset(self, number: int) -> int:
        # Two owners: the dispatcher's word may still be that of a deleted queue.
        return max(self.words[layout.entry_word(number, layout.MAX_OFFSET)], self.first_offset(number))

    def min_offset(self, number: int) -> int:
        return max(self.words[layout.entry_word(number, layout.MIN_OFFSET)], self.first_offset(number))

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int, int] | None:
        """(generation, minimum offset, maximum offset), None without such a queue. Each pull asks for them.

        The minimum is read first: it never passes the maximum then. A queue that is deleted and made again meanwhile is
        looked at once more.
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
        """Store one of a queue's words; the caller's role owns it."""
        self.words[layout.entry_word(number, word)] = value

    # The keeper's side

    def raise_min_offset(self, number: int, offset: int) -> None:
        """What lies below has expired; a minimum never goes down."""
        if offset > self.min_offset(number):
            self.store(number, layout.MIN_OFFSET, offset)

    # The writer's side

    def create_queue(self, topic: str, queue_id: int, next_offset: int = 0, min_offset: int = 0) -> int:
        """Make a queue and publish it. Returns its number, the existing one's when it is there.

        A deleted queue takes its entry back, and its offsets go on where they stood: `next_offset` and `min_offset`
        are for a queue that the table has never had. Raises TooManyQueuesError beyond `max_queues`, and what
        `make_room` does.
        """
        number = self.entry(topic, queue_id)
        if number >= 0:
            if not self.is_live(number):
                self._revive(number)
            return number
        return self._add(topic, queue_id, next_offset, min_offset, layout.STATE_LIVE)

    def make_room(self, queues: int) -> None:
        """Allocate the entries of so many more queues. Raises NoRoomForQueuesError."""
        end = min(self.count + queues, self.capacity)
        if end <= self._room:
            return
        start = layout.entry_offset(self._room)
        room = min(_whole_steps(end), self.capacity)
        fd = self._io.open(self._path, write=True)
        try:
            self._io.allocate(fd, start, layout.entry_offset(room) - start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            text = f"no room on the disk for {counted(queues, 'more queue')}"
            raise NoRoomForQueuesError(text, hint_ms=1000) from error
        finally:
            self._io.close(fd)
        self._room = room

    def delete_queue(self, number: int, physical_offset: int = POSITION_UNKNOWN) -> None:
        """Leave a tombstone, which keeps the name and the next offset for when the queue is made again.

        `physical_offset` is the log's end: whatever the queue has got lies below it. One that is a tombstone already is
        told of this deletion too.
        """
        self._remember(number, physical_offset, self.next_offset(number))
        if self.is_live(number):
            store_release(self.cells, layout.entry_word(number, layout.STATE), layout.STATE_TOMBSTONE)
            self.words.add(layout.HEADER_LIVE, -1)

    # Recovery's side

    def remember_deletion(self, topic: str, queue_id: int, physical_offset: int, next_offset: int) -> None:
        """Tell of a queue that was deleted in an earlier run: a tombstone, or what a queue that is there had before.

        Raises TooManyQueuesError.
        """
        number = self.entry(topic, queue_id)
        if number < 0:
            number = self._add(topic, queue_id, next_offset, next_offset, layout.STATE_TOMBSTONE)
        first_offset = self.min_offset(number)
        self._remember(number, physical_offset, next_offset)
        # A queue that another program made again began at 0: its units say so.
        self.words[layout.entry_word(number, layout.FIRST_OFFSET)] = min(next_offset, first_offset)

    def begin_at(self, number: int, queue_offset: int) -> None:
        """Lower all offsets of a queue without units to the one that its first record bears."""
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
        words = self.words
        start = layout.entry_offset(number) + layout.TOPIC_OFFSET_BYTES
        self._map[start : start + len(name)] = name
        words[layout.entry_word(number, layout.QUEUE_ID)] = queue_id
        words[layout.entry_word(number, layout.TOPIC_SIZE)] = len(name)
        words[layout.entry_word(number, layout.TOPIC_HASH)] = topic_hash
        words[layout.entry_word(number, layout.NEXT_OFFSET)] = next_offset
        words[layout.entry_word(number, layout.MAX_OFFSET)] = next_offset
        words[layout.entry_word(number, layout.MIN_OFFSET)] = min_offset
        words[layout.entry_word(number, layout.STATE)] = state
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
            # Each process has all names: one text a topic and one pair a queue.
            topic = sys.intern(bytes(self._map[start : start + size]).decode())
            name = topic, self.words[layout.entry_word(number, layout.QUEUE_ID)]
            self._names.append(name)
            self._numbers[name] = number


def _whole_steps(entries: int) -> int:
    return -(-entries // _ROOM_ENTRIES) * _ROOM_ENTRIES


def _header(capacity: int) -> bytes:
    """The words that a new table begins with."""
    header = np.zeros(layout.HEADER_CAPACITY + 2, np.int64)
    header[layout.HEADER_MAGIC] = layout.MAGIC
    header[layout.HEADER_VERSION] = layout.VERSION
    header[layout.HEADER_CAPACITY] = capacity
    header[layout.HEADER_HASH_SLOTS] = layout.hash_slots(capacity)
    return header.tobytes()
