"""The queue table, through deletion and recreation, for a writer and a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqproc.errors import TooManyQueuesError
from mqproc.io.fault_injection import FaultInjectionIO
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import queue_table as layout
from mqproc.store.consumequeue.table import NoRoomForQueuesError, QueueTable
from mqproc.store.read.views import QueueBounds, TableQueues


@pytest.fixture
def table(tmp_path: Path) -> Iterator[QueueTable]:
    table = QueueTable.create(StoreIO(), tmp_path / "queues", 16)
    yield table
    table.close()


@pytest.fixture
def reader(table: QueueTable, tmp_path: Path) -> Iterator[QueueTable]:
    reader = QueueTable(StoreIO(), tmp_path / "queues")
    yield reader
    reader.close()


def set_offsets(table: QueueTable, number: int, dispatched: int, written: int) -> None:
    """Set the offsets as after this many written and dispatched messages."""
    table.store(number, layout.NEXT_OFFSET, written)
    table.store(number, layout.MAX_OFFSET, dispatched)


def test_table_recreated_queue_continues_offsets(table: QueueTable, reader: QueueTable) -> None:
    number = table.create_queue("T", 3)
    set_offsets(table, number, 4, 7)
    queues = TableQueues(reader)
    before = queues.bounds("T", 3)
    assert before == QueueBounds(number, 0, 4)
    table.delete_queue(number, 1234)
    assert (queues.bounds("T", 3), queues.ids("T"), queues.topics()) == (None, [], [])
    assert (reader.find("T", 3), reader.entry("T", 3)) == (-1, number)
    assert reader.deletion(number) == (1234, 7)

    assert table.create_queue("T", 3) == number
    after = queues.bounds("T", 3)
    assert after is not None
    # Of the deleted queue 4 messages were dispatched; the new queue is empty.
    assert (after.min_offset, after.max_offset) == (7, 7)
    assert after.number != before.number
    assert table.next_offset(number) == 7
    table.store(number, layout.MAX_OFFSET, 6)  # a step in progress during the deletion
    assert (reader.min_offset(number), reader.max_offset(number)) == (7, 7)
    table.store(number, layout.MAX_OFFSET, 9)
    assert (reader.min_offset(number), reader.max_offset(number)) == (7, 9)


def test_table_delete_and_recreate_uses_no_space(table: QueueTable, reader: QueueTable) -> None:
    for turn in range(100):
        for queue_id in range(8):
            number = table.create_queue("T", queue_id)
            assert number == queue_id
            set_offsets(table, number, turn, turn + 1)
        assert sorted(queue_id for _, _, queue_id in reader.live()) == list(range(8))
        for queue_id in range(8):
            table.delete_queue(queue_id)
    assert (table.count, table.words[layout.HEADER_LIVE]) == (8, 0)
    assert np.count_nonzero(table.slots) == 8
    assert [reader.next_offset(number) for number in range(8)] == [100] * 8


def test_table_full_allows_recreating_deleted_queues(table: QueueTable) -> None:
    for queue_id in range(16):
        table.create_queue("T", queue_id)
    table.delete_queue(5)
    with pytest.raises(TooManyQueuesError, match="max_queues = 16 queues are in use, deleted ones included"):
        table.create_queue("U", 0)
    assert table.create_queue("T", 5) == 5


def test_table_remember_deletion_adds_a_tombstone(table: QueueTable, reader: QueueTable) -> None:
    table.remember_deletion("T", 0, 5000, 40)
    assert (reader.find("T", 0), list(reader.live()), reader.words[layout.HEADER_LIVE]) == (-1, [], 0)
    number = table.create_queue("T", 0)
    assert (reader.find("T", 0), reader.deletion(number)) == (number, (5000, 40))
    assert (reader.min_offset(number), reader.max_offset(number), reader.next_offset(number)) == (40, 40, 40)


def test_table_remember_deletion_keeps_bounds_of_files(table: QueueTable) -> None:
    """Recreated after a deletion at 40; its files have [40, 55), or [50, 55) after retention."""
    for queue_id, minimum in ((0, 40), (1, 50)):
        number = table.create_queue("T", queue_id, 55, minimum)
        table.remember_deletion("T", queue_id, 5000, 40)
        assert table.is_live(number)
        assert (table.min_offset(number), table.max_offset(number)) == (minimum, 55)


def test_table_begin_at_sets_bounds_of_empty_queue(table: QueueTable) -> None:
    with_files = table.create_queue("T", 0, 12, 0)
    table.remember_deletion("T", 0, 5000, 40)
    assert (table.min_offset(with_files), table.max_offset(with_files)) == (0, 12)

    table.remember_deletion("T", 1, 5000, 40)
    number = table.create_queue("T", 1)
    table.begin_at(number, 0)
    assert (table.min_offset(number), table.max_offset(number), table.next_offset(number)) == (0, 0, 0)
    table.begin_at(with_files, 3)
    assert table.min_offset(with_files) == 0


class InterruptedWords(Words):
    """A reader's words that call `write` once, right after a load of word `index`."""

    def __init__(self, words: Words, index: int, write: Callable[[], None]) -> None:
        super().__init__(words.mapping)
        self._words = words
        self._index = index
        self._write: Callable[[], None] | None = write
        self.cells: Any = self

    def __getitem__(self, index: int) -> int:
        found = self._words[index]
        if index == self._index and self._write is not None:
            write, self._write = self._write, None
            write()
        return found


@pytest.mark.parametrize("word", [layout.GENERATION, layout.FIRST_OFFSET, layout.MIN_OFFSET, layout.MAX_OFFSET])
def test_bounds_concurrent_recreation_returns_one_generation(table: QueueTable, reader: QueueTable, word: int) -> None:
    """The queue is deleted and recreated between two loads of a reader."""
    number = table.create_queue("T", 0)
    set_offsets(table, number, 5, 5)
    queues = TableQueues(reader)

    def recreate() -> None:
        table.delete_queue(number)
        table.create_queue("T", 0)
        table.store(number, layout.MAX_OFFSET, 8)

    words, reader.words = reader.words, InterruptedWords(reader.words, layout.entry_word(number, word), recreate)
    assert queues.bounds("T", 0) == QueueBounds(table.generation(number), 5, 8)
    reader.words = words


def test_ids_concurrent_create_is_listed_next_time(table: QueueTable, reader: QueueTable) -> None:
    """The writer creates a queue while a reader reads new entries."""
    table.create_queue("T", 0)
    queues = TableQueues(reader)
    load = reader.name

    def interrupted(number: int) -> tuple[str, int]:
        table.create_queue("T", 1)
        return load(number)

    reader.name = interrupted  # type: ignore[method-assign]
    assert queues.ids("T") == [0]
    assert queues.ids("T") == [0, 1]


def test_table_changes_differ_after_recreation(table: QueueTable, reader: QueueTable) -> None:
    number = table.create_queue("T", 0)
    seen = [reader.changes]
    table.delete_queue(number)
    table.create_queue("T", 0)
    seen.append(reader.changes)
    table.create_queue("T", 1)
    seen.append(reader.changes)
    assert len(set(seen)) == 3


def test_table_live_concurrent_create_is_safe(table: QueueTable, reader: QueueTable) -> None:
    table.create_queue("T", 0)
    seen = []
    for _number, topic, queue_id in reader.live():
        seen.append((topic, queue_id))
        if queue_id < 5:
            table.create_queue(topic, queue_id + 1)
            assert reader.find(topic, queue_id + 1) == queue_id + 1
    assert seen[0] == ("T", 0)
    assert [queue_id for _, _, queue_id in reader.live()] == list(range(table.count))


def test_table_create_queue_full_disk_changes_nothing(tmp_path: Path) -> None:
    """Storing into an unallocated part of the file on a full disk would raise SIGBUS."""
    io = FaultInjectionIO(fault="allocate:3:ENOSPC")
    table = QueueTable.create(io, tmp_path / "queues", 1000)
    with pytest.raises(NoRoomForQueuesError, match="no room on the disk for 1 more queue"):
        [table.create_queue("T", queue_id) for queue_id in range(1000)]
    created = table.count
    assert 1 < created < 1000
    assert table.entry("T", created) == -1
    # Queues can be created once there is space.
    table.make_room(500)
    assert [table.create_queue("T", queue_id) for queue_id in range(created, 1000)] == list(range(created, 1000))
    table.close()


def test_table_entries_are_allocated(tmp_path: Path) -> None:
    path = tmp_path / "queues"
    table = QueueTable.create(StoreIO(), path, 4096)
    for number in (1, 128, 129, 300):
        for queue_id in range(number):
            table.create_queue("T", queue_id)
        allocated = path.stat().st_blocks * 512
        assert allocated >= number * layout.ENTRY_SIZE + 4 * layout.hash_slots(4096)
        table.close()
        table = QueueTable(StoreIO(), path, write=True)
    assert path.stat().st_blocks * 512 < layout.file_size(4096)
    table.close()


@pytest.mark.parametrize("fault", ["allocate:1:ENOSPC", "pwrite:1:ENOSPC"])
def test_table_create_full_disk_leaves_no_file(tmp_path: Path, fault: str) -> None:
    """A failed call may have allocated a part of the file."""
    with pytest.raises(OSError, match="No space left"):
        QueueTable.create(FaultInjectionIO(fault=fault), tmp_path / "queues", 16)
    assert list(tmp_path.iterdir()) == []
