"""The queue table as a mapped file: which queues there are, and the offsets that the roles share.

The writer creates queues and stores `next_offset`; the dispatcher stores `max_offset`; the keeper `min_offset`.
Everybody reads. The file is made anew by recovery at each start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError, TooManyQueuesError
from mqproc.io import StoreIO
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import queue_table as layout
from mqproc.layout.java_hash import java_hash
from mqproc.shm.words import Words


class QueueTable:
    """A mapped queue table.

    `words` is the int64 view by word index, `cells` the same as an array int64[n], `bytes_view` uint8[n] of the whole
    file for kernels, `slots` int32[hash slots].
    """

    def __init__(self, io: StoreIO, path: Path, *, write: bool = False) -> None:
        """Open an existing table. Raises CorruptStoreError when it is no table of this version."""
        fd = io.open(path, write=write)
        try:
            size = io.size(fd)
            if size < layout.HEADER_SIZE:
                raise CorruptStoreError(f"{path}: {size} bytes are no queue table")
            self._map = io.map(fd, size, write=write)
        finally:
            io.close(fd)
        self.words = Words(self._map)
        if self.words[layout.HEADER_MAGIC] != layout.MAGIC or self.words[layout.HEADER_VERSION] != layout.VERSION:
            self.close()
            raise CorruptStoreError(f"{path}: offset 0: not a queue table of version {layout.VERSION}")
        self.capacity = self.words[layout.HEADER_CAPACITY]
        self.bytes_view: NDArray[np.uint8] = as_kernel_array(self._map)
        self.cells: NDArray[np.int64] = self.bytes_view[: size & ~7].view(np.int64)
        hash_start = layout.hash_offset(self.capacity)
        self.slots: NDArray[np.int32] = self.bytes_view[
            hash_start : hash_start + 4 * layout.hash_slots(self.capacity)
        ].view(np.int32)
        self._numbers: dict[tuple[str, int], int] = {}
        self._names: list[tuple[str, int]] = []

    @classmethod
    def create(cls, io: StoreIO, path: Path, capacity: int) -> QueueTable:
        """Make an empty table for `capacity` queues in place of whatever is there, and open it for writing."""
        temporary = path.with_name(path.name + ".tmp")
        io.unlink(temporary)
        fd = io.open(temporary, write=True, create=True, mode=0o600)
        try:
            io.set_size(fd, layout.file_size(capacity))
            header = np.zeros(layout.HEADER_CAPACITY + 2, np.int64)
            header[layout.HEADER_MAGIC] = layout.MAGIC
            header[layout.HEADER_VERSION] = layout.VERSION
            header[layout.HEADER_CAPACITY] = capacity
            header[layout.HEADER_HASH_SLOTS] = layout.hash_slots(capacity)
            io.pwrite(fd, header.tobytes(), 0)
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
        return self.words[layout.HEADER_COUNT]

    def find(self, topic: str, queue_id: int) -> int:
        """The queue's number, −1 when there is none."""
        number = self._numbers.get((topic, queue_id))
        if number is None:
            self._read_new_names()
            number = self._numbers.get((topic, queue_id), -1)
        if number >= 0 and self.words[layout.entry_word(number, layout.STATE)] != layout.STATE_LIVE:
            return self._find_in_hash(topic, queue_id)
        return number

    def name(self, number: int) -> tuple[str, int]:
        """(topic, queue id) of a number below `count`."""
        if number >= len(self._names):
            self._read_new_names()
        return self._names[number]

    def live(self) -> Iterator[tuple[int, str, int]]:
        """(number, topic, queue id) of every queue that is not deleted."""
        self._read_new_names()
        states = self.column(layout.STATE)
        for number, (topic, queue_id) in enumerate(self._names):
            if states[number] == layout.STATE_LIVE:
                yield number, topic, queue_id

    def column(self, word: int) -> NDArray[np.int64]:
        """A copy of one word of all entries: int64[count]."""
        start = layout.entry_word(0, word)
        stop = start + self.count * layout.ENTRY_WORDS
        return self.cells[start : stop : layout.ENTRY_WORDS].copy()

    # Words of one queue

    def next_offset(self, number: int) -> int:
        return self.words[layout.entry_word(number, layout.NEXT_OFFSET)]

    def max_offset(self, number: int) -> int:
        return self.words[layout.entry_word(number, layout.MAX_OFFSET)]

    def min_offset(self, number: int) -> int:
        return self.words[layout.entry_word(number, layout.MIN_OFFSET)]

    def last_physical_end(self, number: int) -> int:
        return self.words[layout.entry_word(number, layout.LAST_PHYSICAL_END)]

    def store(self, number: int, word: int, value: int) -> None:
        """Store one of a queue's words; the caller's role owns it."""
        self.words[layout.entry_word(number, word)] = value

    # The writer's side

    def create_queue(self, topic: str, queue_id: int, next_offset: int = 0, min_offset: int = 0) -> int:
        """Make a queue and publish it. Returns its number, the existing one's when it is there.

        Raises TooManyQueuesError beyond `max_queues`.
        """
        found = self.find(topic, queue_id)
        if found >= 0:
            return found
        number = self.count
        if number >= self.capacity:
            raise TooManyQueuesError(f"max_queues = {self.capacity:,} queues are in use")
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
        words[layout.entry_word(number, layout.STATE)] = layout.STATE_LIVE
        self.slots[self._free_slot(topic_hash, queue_id)] = number + 1
        words[layout.HEADER_COUNT] = number + 1
        words.add(layout.HEADER_LIVE, 1)
        return number

    def delete_queue(self, number: int) -> None:
        """Leave a tombstone: the number stays taken, the name may be used again."""
        self.words[layout.entry_word(number, layout.STATE)] = layout.STATE_TOMBSTONE
        self.words.add(layout.HEADER_LIVE, -1)
        self._numbers.pop(self._names[number], None)

    def _free_slot(self, topic_hash: int, queue_id: int) -> int:
        mask = len(self.slots) - 1
        slot = layout.first_slot(topic_hash, queue_id, len(self.slots))
        while self.slots[slot] != 0:
            slot = (slot + 1) & mask
        return slot

    def _find_in_hash(self, topic: str, queue_id: int) -> int:
        """A live queue by the hash, for a name that a tombstone bears too."""
        mask = len(self.slots) - 1
        slot = layout.first_slot(java_hash(topic), queue_id, len(self.slots))
        while (entry := int(self.slots[slot])) != 0:
            number = entry - 1
            live = self.words[layout.entry_word(number, layout.STATE)] == layout.STATE_LIVE
            if live and self.name(number) == (topic, queue_id):
                self._numbers[topic, queue_id] = number
                return number
            slot = (slot + 1) & mask
        return -1

    def _read_new_names(self) -> None:
        for number in range(len(self._names), self.count):
            start = layout.entry_offset(number) + layout.TOPIC_OFFSET_BYTES
            size = self.words[layout.entry_word(number, layout.TOPIC_SIZE)]
            topic = self._map[start : start + size].decode()
            queue_id = self.words[layout.entry_word(number, layout.QUEUE_ID)]
            self._names.append((topic, queue_id))
            if self.words[layout.entry_word(number, layout.STATE)] == layout.STATE_LIVE:
                self._numbers[topic, queue_id] = number
