"""Memory-mapped file of committed offsets: a word for each queue and group.

Each commit stores a word. The page cache keeps the file (`layout.committed_offsets`) across a kill of its process or of
the whole group. After a reboot the age of its pages is unknown, and `consumerOffset.json` is current instead.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import committed_offsets as layout
from mqproc.store.offsets.consumer_offset_json import CommittedOffset, Table
from mqproc.store.sync_guard import Syncing

GROWTH_BYTES: Final = 64 << 10
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MASK: Final = (1 << 63) - 1


def boot_id() -> tuple[int, int]:
    """Two words that identify the current boot of the machine."""
    value = int(BOOT_ID.read_text().strip().replace("-", ""), 16)
    return value & _MASK, (value >> 63) & _MASK


class OffsetFile:
    """An open offset file. One process writes it; others read its current values."""

    def __init__(self, io: StoreIO, path: Path, *, write: bool = False) -> None:
        """Open an existing file. Raises FileNotFoundError, CorruptStoreError."""
        self._io = io
        self._path = path
        self._write = write
        self._places: dict[str, dict[str, dict[int, int]]] = {}
        self._states: dict[str, list[int]] = {}
        self._attach()
        words = self._words
        if words[layout.HEADER_MAGIC] != layout.MAGIC or words[layout.HEADER_VERSION] != layout.VERSION:
            self.close()
            raise CorruptStoreError(f"{path}: offset 0: not a progress file of version {layout.VERSION}")
        self._read = layout.HEADER_SIZE
        self._read_blocks()

    def _attach(self) -> None:
        with self._io.opened(self._path, write=self._write) as fd:
            size = self._io.size(fd)
            if size < layout.HEADER_SIZE or size % layout.WORD_SIZE:
                raise CorruptStoreError(f"{self._path}: {size} bytes is not the size of a progress file")
            self._map: mmap.mmap = self._io.map(fd, size, write=self._write)
        self._words = Words(self._map)

    @classmethod
    def create(
        cls, io: StoreIO, path: Path, progress: Iterable[CommittedOffset], saved: int, epoch: int, reset_at: int = 0
    ) -> OffsetFile:
        """Create the file, replacing an existing one, and open it for writing.

        `saved` is the fingerprint of the consumerOffset.json that `progress` comes from, `epoch` the next epoch,
        `reset_at` the property's value.
        """
        temporary = path.with_name(path.name + ".tmp")
        io.unlink(temporary)
        try:
            with io.opened(temporary, write=True, create=True, mode=0o600) as fd:
                io.allocate(fd, 0, layout.HEADER_SIZE + GROWTH_BYTES)
                io.pwrite(fd, _header(saved, epoch, reset_at), 0)
        except OSError:
            io.unlink(temporary)
            raise
        file = cls(io, temporary, write=True)
        try:
            for at in progress:
                file.put(at.group, at.topic, at.queue_id, at.offset)
            file._words[layout.HEADER_CHANGES] = 0
            io.rename(temporary, path)
        except BaseException:
            file.close()
            raise
        file._path = path
        return file

    def close(self) -> None:
        self._words.close()
        self._map.close()

    # Header

    @property
    def boot(self) -> tuple[int, int]:
        """Boot in which the words were stored."""
        return self._words[layout.HEADER_BOOT[0]], self._words[layout.HEADER_BOOT[1]]

    @property
    def fingerprints(self) -> tuple[int, int]:
        """Fingerprints of consumerOffset.json before and after a rename that may be in progress."""
        return self._words[layout.HEADER_SAVED], self._words[layout.HEADER_SAVING]

    @property
    def unsaved(self) -> bool:
        """Whether consumerOffset.json is out of date."""
        return self.changes != self._words[layout.HEADER_SAVED_CHANGES]

    @property
    def changes(self) -> int:
        return self._words[layout.HEADER_CHANGES]

    def begin_save(self, current: int, fingerprint: int) -> None:
        """Note a rename between two fingerprints; an earlier save may lack its `end_save`."""
        self._words[layout.HEADER_SAVED] = current
        self._words[layout.HEADER_SAVING] = fingerprint

    def end_save(self, fingerprint: int, changes: int) -> None:
        self._words[layout.HEADER_SAVED] = fingerprint
        self._words[layout.HEADER_SAVED_CHANGES] = changes

    def allocate_epoch(self, above: int = 0) -> int:
        """Allocate an assignment epoch, larger than all before it and than `above`."""
        epoch = max(self._words[layout.HEADER_EPOCH], above + 1)
        self._words[layout.HEADER_EPOCH] = epoch + 1
        return epoch

    @property
    def next_epoch(self) -> int:
        """The epoch that `allocate_epoch` would return."""
        return self._words[layout.HEADER_EPOCH]

    @property
    def reset_at(self) -> int:
        """End of the log at the last reset or deletion of a group."""
        return self._words[layout.HEADER_RESET_AT]

    @reset_at.setter
    def reset_at(self, log_end: int) -> None:
        self._words[layout.HEADER_RESET_AT] = log_end

    def touch(self) -> None:
        """Mark consumerOffset.json as out of date."""
        self._words.add(layout.HEADER_CHANGES, 1)

    def sync(self, syncs: Syncing) -> None:
        """Make the words durable. Raises FailedSyncError."""
        with self._io.opened(self._path, write=True) as fd:
            syncs.sync(fd)

    # Words

    def _index(self, group: str, topic: str, queue_id: int) -> int | None:
        return self._places.get(group, {}).get(topic, {}).get(queue_id)

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Next queue offset to consume; None if unknown."""
        index = self._index(group, topic, queue_id)
        value = self._words[index] if index is not None else 0
        return value - 1 if value else None

    def offsets(self, group: str, topic: str) -> dict[int, int]:
        """Next queue offsets by queue id, where known."""
        cells, places = self._words.cells, self._places.get(group, {}).get(topic, {})
        return {queue_id: value - 1 for queue_id, index in places.items() if (value := cells[index])}

    def put(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Store an offset. Raises OSError if the file must grow and cannot; then nothing is stored."""
        index = self._index(group, topic, queue_id)
        if index is None:
            index = self._add(group, topic, queue_id)
        self._words[index] = offset + 1
        self.touch()

    def reset_offset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """As `put`; also invalidates all epochs allocated so far for the queue's block."""
        index = self._index(group, topic, queue_id)
        if index is not None:
            self._words[self._state_at(group, index)] = layout.state_of(self.next_epoch)
        self.put(group, topic, queue_id, offset)

    def oldest_epoch(self, group: str, topic: str, queue_id: int) -> int:
        """Smallest epoch still valid for the queue."""
        index = self._index(group, topic, queue_id)
        return layout.oldest_epoch_of(self._words[self._state_at(group, index)]) if index is not None else 0

    def _state_at(self, group: str, index: int) -> int:
        """Index of the state word of a queue's block: the last state word before the queue's word."""
        states = self._states[group]
        return states[bisect_left(states, index) - 1]

    def delete_group(self, group: str) -> None:
        for index in self._states.pop(group, ()):
            self._words[index] = layout.STATE_DELETED
        del self._places[group]
        self.touch()

    def groups(self) -> list[str]:
        """Groups with blocks, sorted."""
        return sorted(self._places)

    def topics(self, group: str) -> list[str]:
        """Topics for which the group has blocks, sorted."""
        return sorted(self._places.get(group, ()))

    def all(self) -> Iterator[CommittedOffset]:
        for group in self.groups():
            yield from self.of(group)

    def of(self, group: str) -> Iterator[CommittedOffset]:
        for _, topic, queues in self._tables_of(group):
            for queue_id, offset in queues:
                yield CommittedOffset(group, topic, queue_id, offset)

    def tables(self) -> Iterator[Table]:
        """As `all`, without an object per queue."""
        for group in self.groups():
            yield from self._tables_of(group)

    def _tables_of(self, group: str) -> Iterator[Table]:
        cells = self._words.cells
        for topic in self.topics(group):
            places = sorted(self._places[group][topic].items())
            yield group, topic, [(queue_id, value - 1) for queue_id, index in places if (value := cells[index])]

    def deleted(self) -> set[tuple[str, str]]:
        """(group, topic) deleted since the file was created; new offsets may exist for them."""
        blocks = self._blocks(layout.HEADER_SIZE)
        return {(at.group, at.topic) for at in blocks if self._words[at.state] & layout.STATE_DELETED}

    # Blocks

    def _blocks(self, at: int) -> Iterator[layout.OffsetBlock]:
        end = min(self._words[layout.HEADER_END], len(self._map))
        view = memoryview(self._map)
        try:
            while (block := layout.decode_block(view, at, end)) is not None:
                yield block
                at = block.end
        finally:
            view.release()

    def _read_blocks(self) -> None:
        for block in self._blocks(self._read):
            self._read = block.end
            if not self._words[block.state] & layout.STATE_DELETED:
                self._states.setdefault(block.group, []).append(block.state)
                queues = self._places.setdefault(block.group, {}).setdefault(block.topic, {})
                for place in range(block.queues):
                    queues[block.first_queue + place] = block.first_offset + place

    def _add(self, group: str, topic: str, queue_id: int) -> int:
        """Append a block that covers the queue; return the index of its word."""
        known = self._places.get(group, {}).get(topic, {})
        first = max(known, default=-1) + 1
        queues = layout.QUEUES_MIN
        while first + queues <= queue_id:
            queues = 2 * queues + 1
        data = layout.encode_block(group, topic, first, queues)
        at = self._words[layout.HEADER_END]
        if at + len(data) > len(self._map):
            self._grow(at + len(data))
        self._map[at : at + len(data)] = data
        block = layout.decode_block(data, 0, len(data))
        assert block is not None
        self._words[at // layout.WORD_SIZE + block.state] = layout.state_of(self.next_epoch)
        self._words[layout.HEADER_END] = at + len(data)
        self._read_blocks()
        return self._places[group][topic][queue_id]

    def _grow(self, size: int) -> None:
        with self._io.opened(self._path, write=True) as fd:
            old = self._io.size(fd)
            # Grow by at least a quarter: many groups then need few remaps.
            blocks = -(-max(GROWTH_BYTES, size - old, old // 4) // layout.BLOCK_ALIGNMENT)
            self._io.allocate(fd, old, blocks * layout.BLOCK_ALIGNMENT)
        self.close()
        self._attach()


def _header(saved: int, epoch: int, reset_at: int) -> bytes:
    words = Words(bytearray(layout.HEADER_SIZE))
    words[layout.HEADER_MAGIC] = layout.MAGIC
    words[layout.HEADER_VERSION] = layout.VERSION
    words[layout.HEADER_END] = layout.HEADER_SIZE
    for index, value in zip(layout.HEADER_BOOT, boot_id(), strict=True):
        words[index] = value
    words[layout.HEADER_SAVED] = saved
    words[layout.HEADER_EPOCH] = max(1, epoch)
    words[layout.HEADER_RESET_AT] = reset_at
    return bytes(words.mapping)
