"""The mapped file of progress (`layout.progress`): a word a queue and group, stored at each commit.

It outlives a kill of its process and of the whole group, since the page cache does. After the machine itself went down
nobody can say which of its pages are how old: then `consumerOffset.json` counts.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import progress as layout
from mqproc.store.final_syncs import Syncing
from mqproc.store.groups.offsets_json import Progress, Table

GROWTH_BYTES: Final = 64 << 10
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MASK: Final = (1 << 63) - 1


def boot_id() -> tuple[int, int]:
    """Two numbers that tell this run of the machine from every other."""
    value = int(_BOOT_ID.read_text().strip().replace("-", ""), 16)
    return value & _MASK, (value >> 63) & _MASK


class ProgressFile:
    """An open progress file. One process has it open for writing; others read what it says at the moment."""

    def __init__(self, io: StoreIO, path: Path, *, write: bool = False) -> None:
        """Open one that is there. Raises FileNotFoundError, CorruptStoreError when it is none of this version."""
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
        fd = self._io.open(self._path, write=self._write)
        try:
            size = self._io.size(fd)
            if size < layout.HEADER_SIZE or size % layout.WORD_SIZE:
                raise CorruptStoreError(f"{self._path}: {size} bytes are no progress file")
            self._map: mmap.mmap = self._io.map(fd, size, write=self._write)
        finally:
            self._io.close(fd)
        self._words = Words(self._map)

    @classmethod
    def create(
        cls, io: StoreIO, path: Path, progress: Iterable[Progress], saved: int, epoch: int, reset_at: int = 0
    ) -> ProgressFile:
        """Make a file in place of whatever is there, and open it for writing.

        `saved` is the fingerprint of the consumerOffset.json that these came from, `epoch` the next one to be given,
        `reset_at` what the property says.
        """
        temporary = path.with_name(path.name + ".tmp")
        io.unlink(temporary)
        fd = io.open(temporary, write=True, create=True, mode=0o600)
        try:
            io.allocate(fd, 0, layout.HEADER_SIZE + GROWTH_BYTES)
            io.pwrite(fd, _header(saved, epoch, reset_at), 0)
        except OSError:
            io.unlink(temporary)
            raise
        finally:
            io.close(fd)
        made = cls(io, temporary, write=True)
        try:
            for at in progress:
                made.put(at.group, at.topic, at.queue_id, at.offset)
            made._words[layout.HEADER_CHANGES] = 0
            io.rename(temporary, path)
        except BaseException:
            made.close()
            raise
        made._path = path
        return made

    def close(self) -> None:
        """Release the map."""
        self._words.close()
        self._map.close()

    # Header

    @property
    def boot(self) -> tuple[int, int]:
        """The run of the machine in which the words were stored."""
        return self._words[layout.HEADER_BOOT[0]], self._words[layout.HEADER_BOOT[1]]

    @property
    def fingerprints(self) -> tuple[int, int]:
        """Of the consumerOffset.json that lies beside it, before and after a rename that may be under way."""
        return self._words[layout.HEADER_SAVED], self._words[layout.HEADER_SAVING]

    @property
    def unsaved(self) -> bool:
        """Whether consumerOffset.json lacks something."""
        return self.changes != self._words[layout.HEADER_SAVED_CHANGES]

    @property
    def changes(self) -> int:
        return self._words[layout.HEADER_CHANGES]

    def begin_save(self, lies_there: int, fingerprint: int) -> None:
        """A rename is next, from one fingerprint to another. An earlier one may have been made and not been ended."""
        self._words[layout.HEADER_SAVED] = lies_there
        self._words[layout.HEADER_SAVING] = fingerprint

    def end_save(self, fingerprint: int, changes: int) -> None:
        self._words[layout.HEADER_SAVED] = fingerprint
        self._words[layout.HEADER_SAVED_CHANGES] = changes

    def take_epoch(self, above: int = 0) -> int:
        """A number that no queue has been assigned with, larger than all before it and than `above`."""
        epoch = max(self._words[layout.HEADER_EPOCH], above + 1)
        self._words[layout.HEADER_EPOCH] = epoch + 1
        return epoch

    @property
    def next_epoch(self) -> int:
        """What `take_epoch` would give."""
        return self._words[layout.HEADER_EPOCH]

    @property
    def reset_at(self) -> int:
        """Where the log ended when a group was reset or deleted last: what lies below knows nothing of that."""
        return self._words[layout.HEADER_RESET_AT]

    @reset_at.setter
    def reset_at(self, log_end: int) -> None:
        self._words[layout.HEADER_RESET_AT] = log_end

    def touch(self) -> None:
        """Say that consumerOffset.json lacks something."""
        self._words.add(layout.HEADER_CHANGES, 1)

    def sync(self, syncs: Syncing) -> None:
        """Make the words durable. Raises FailedSyncError."""
        fd = self._io.open(self._path, write=True)
        try:
            syncs.sync(fd)
        finally:
            self._io.close(fd)

    # Words

    def offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The queue offset to consume next, None when nothing is known."""
        index = self._places.get(group, {}).get(topic, {}).get(queue_id)
        value = self._words[index] if index is not None else 0
        return value - 1 if value else None

    def put(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Store a queue offset. Raises OSError when the file must grow and cannot; then nothing is stored."""
        index = self._places.get(group, {}).get(topic, {}).get(queue_id)
        if index is None:
            index = self._add(group, topic, queue_id)
        self._words[index] = offset + 1
        self.touch()

    def begin_anew(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The same as `put`; no epoch that was given counts any more for who comes back to a queue of this block."""
        index = self._places.get(group, {}).get(topic, {}).get(queue_id)
        if index is not None:
            self._words[self._state_at(group, index)] = layout.state_of(self.next_epoch)
        self.put(group, topic, queue_id, offset)

    def oldest_epoch(self, group: str, topic: str, queue_id: int) -> int:
        """What a member may come back with, at least."""
        index = self._places.get(group, {}).get(topic, {}).get(queue_id)
        return layout.oldest_epoch_of(self._words[self._state_at(group, index)]) if index is not None else 0

    def _state_at(self, group: str, index: int) -> int:
        """The state's word of the block that has a queue's: the last one before it."""
        states = self._states[group]
        return states[bisect_left(states, index) - 1]

    def forget(self, group: str) -> None:
        """Let a group's progress be unknown."""
        for index in self._states.pop(group, ()):
            self._words[index] = layout.STATE_DELETED
        del self._places[group]
        self.touch()

    def groups(self) -> list[str]:
        """Groups that something may be known of, sorted."""
        return sorted(self._places)

    def topics(self, group: str) -> list[str]:
        """Topics that something may be known of, sorted."""
        return sorted(self._places.get(group, ()))

    def all(self) -> Iterator[Progress]:
        """What is known."""
        for group in self.groups():
            yield from self.of(group)

    def of(self, group: str) -> Iterator[Progress]:
        """What is known of one group."""
        for _, topic, queues in self._tables_of(group):
            for queue_id, offset in queues:
                yield Progress(group, topic, queue_id, offset)

    def tables(self) -> Iterator[Table]:
        """The same as `all`, with no object for each queue."""
        for group in self.groups():
            yield from self._tables_of(group)

    def _tables_of(self, group: str) -> Iterator[Table]:
        cells = self._words.cells
        for topic in self.topics(group):
            places = sorted(self._places[group][topic].items())
            yield group, topic, [(queue_id, value - 1) for queue_id, index in places if (value := cells[index])]

    def deleted(self) -> set[tuple[str, str]]:
        """(group, topic) that were forgotten since the file was made; something may be known of them anew."""
        blocks = self._blocks(layout.HEADER_SIZE)
        return {(at.group, at.topic) for at in blocks if self._words[at.state] & layout.STATE_DELETED}

    # Blocks

    def _blocks(self, at: int) -> Iterator[layout.Block]:
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
        """A block that covers the queue; the word's index."""
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
        fd = self._io.open(self._path, write=True)
        try:
            old = self._io.size(fd)
            # A quarter more, so that many groups cost few maps.
            blocks = -(-max(GROWTH_BYTES, size - old, old // 4) // layout.BLOCK_ALIGNMENT)
            self._io.allocate(fd, old, blocks * layout.BLOCK_ALIGNMENT)
        finally:
            self._io.close(fd)
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
