"""The queue table: names, numbers and words through deletion and being made again, seen by a writer and a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqproc.errors import TooManyQueuesError
from mqproc.io.fault_injection import FaultInjectionIO
from mqproc.io.store_io import StoreIO
from mqproc.ipc.words import Words
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


def used(table: QueueTable, number: int, dispatched: int, written: int) -> None:
    """Put the words to what they are when so many messages were written and dispatched."""
    table.store(number, layout.NEXT_OFFSET, written)
    table.store(number, layout.MAX_OFFSET, dispatched)


def test_a_queue_made_again_goes_on_where_the_deleted_one_stood(table: QueueTable, reader: QueueTable) -> None:
    number = table.create_queue("T", 3)
    used(table, number, 4, 7)
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
    # The dispatcher has published 4 of the deleted queue; nothing of the new one is there.
    assert (after.min_offset, after.max_offset) == (7, 7)
    assert after.number != before.number
    assert table.next_offset(number) == 7
    table.store(number, layout.MAX_OFFSET, 6)  # a step that was under way when the queue was deleted
    assert (reader.min_offset(number), reader.max_offset(number)) == (7, 7)
    table.store(number, layout.MAX_OFFSET, 9)
    assert (reader.min_offset(number), reader.max_offset(number)) == (7, 9)


def test_deleting_and_making_again_takes_no_room(table: QueueTable, reader: QueueTable) -> None:
    for turn in range(100):
        for queue_id in range(8):
            number = table.create_queue("T", queue_id)
            assert number == queue_id
            used(table, number, turn, turn + 1)
        assert sorted(queue_id for _, _, queue_id in reader.live()) == list(range(8))
        for queue_id in range(8):
            table.delete_queue(queue_id)
    assert (table.count, table.words[layout.HEADER_LIVE]) == (8, 0)
    assert np.count_nonzero(table.slots) == 8
    assert [reader.next_offset(number) for number in range(8)] == [100] * 8


def test_beyond_the_capacity_deleted_names_can_still_be_made_again(table: QueueTable) -> None:
    for queue_id in range(16):
        table.create_queue("T", queue_id)
    table.delete_queue(5)
    with pytest.raises(TooManyQueuesError, match="max_queues = 16 queues are in use, deleted ones included"):
        table.create_queue("U", 0)
    assert table.create_queue("T", 5) == 5


def test_a_deletion_of_an_earlier_run_leaves_a_tombstone(table: QueueTable, reader: QueueTable) -> None:
    table.remember_deletion("T", 0, 5000, 40)
    assert (reader.find("T", 0), list(reader.live()), reader.words[layout.HEADER_LIVE]) == (-1, [], 0)
    number = table.create_queue("T", 0)
    assert (reader.find("T", 0), reader.deletion(number)) == (number, (5000, 40))
    assert (reader.min_offset(number), reader.max_offset(number), reader.next_offset(number)) == (40, 40, 40)


def test_a_queue_of_files_keeps_what_the_files_say(table: QueueTable) -> None:
    """Made again after a deletion at 40; its files hold [40, 55), or [50, 55) when retention took the others."""
    for queue_id, minimum in ((0, 40), (1, 50)):
        number = table.create_queue("T", queue_id, 55, minimum)
        table.remember_deletion("T", queue_id, 5000, 40)
        assert table.is_live(number)
        assert (table.min_offset(number), table.max_offset(number)) == (minimum, 55)


def test_a_queue_that_another_program_made_again_begins_where_that_one_did(table: QueueTable) -> None:
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
    """A reader's words; once, just behind the load of one of them, the writer comes."""

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
def test_a_reader_never_mixes_two_lives_of_a_queue(table: QueueTable, reader: QueueTable, word: int) -> None:
    """The queue is deleted and made again between two of a reader's loads."""
    number = table.create_queue("T", 0)
    used(table, number, 5, 5)
    queues = TableQueues(reader)

    def make_again() -> None:
        table.delete_queue(number)
        table.create_queue("T", 0)
        table.store(number, layout.MAX_OFFSET, 8)

    words, reader.words = reader.words, InterruptedWords(reader.words, layout.entry_word(number, word), make_again)
    assert queues.bounds("T", 0) == QueueBounds(table.generation(number), 5, 8)
    reader.words = words


def test_a_queue_that_is_made_while_others_are_listed_is_listed_next_time(
    table: QueueTable, reader: QueueTable
) -> None:
    """The writer makes a queue while a reader goes over those that it does not know yet."""
    table.create_queue("T", 0)
    queues = TableQueues(reader)
    load = reader.name

    def interrupted(number: int) -> tuple[str, int]:
        table.create_queue("T", 1)
        return load(number)

    reader.name = interrupted  # type: ignore[method-assign]
    assert queues.ids("T") == [0]
    assert queues.ids("T") == [0, 1]


def test_changes_tell_of_a_queue_that_was_deleted_and_made_again(table: QueueTable, reader: QueueTable) -> None:
    number = table.create_queue("T", 0)
    seen = [reader.changes]
    table.delete_queue(number)
    table.create_queue("T", 0)
    seen.append(reader.changes)
    table.create_queue("T", 1)
    seen.append(reader.changes)
    assert len(set(seen)) == 3


def test_queues_that_are_made_while_others_are_looked_at_do_no_harm(table: QueueTable, reader: QueueTable) -> None:
    table.create_queue("T", 0)
    seen = []
    for _number, topic, queue_id in reader.live():
        seen.append((topic, queue_id))
        if queue_id < 5:
            table.create_queue(topic, queue_id + 1)
            assert reader.find(topic, queue_id + 1) == queue_id + 1
    assert seen[0] == ("T", 0)
    assert [queue_id for _, _, queue_id in reader.live()] == list(range(table.count))


def test_a_full_disk_is_an_error_before_anything_is_changed(tmp_path: Path) -> None:
    """A store into a part of the file that the disk has no room for would be a SIGBUS."""
    io = FaultInjectionIO(fault="allocate:3:ENOSPC")
    table = QueueTable.create(io, tmp_path / "queues", 1000)
    with pytest.raises(NoRoomForQueuesError, match="no room on the disk for 1 more queue"):
        [table.create_queue("T", queue_id) for queue_id in range(1000)]
    made = table.count
    assert 1 < made < 1000
    assert table.entry("T", made) == -1
    # When there is room all goes on.
    table.make_room(500)
    assert [table.create_queue("T", queue_id) for queue_id in range(made, 1000)] == list(range(made, 1000))
    table.close()


def test_no_entry_lies_in_a_hole_of_the_file(tmp_path: Path) -> None:
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
def test_a_table_that_finds_no_room_leaves_none_of_it(tmp_path: Path, fault: str) -> None:
    """Half of what was asked for may have been allocated, on a disk that is full."""
    with pytest.raises(OSError, match="No space left"):
        QueueTable.create(FaultInjectionIO(fault=fault), tmp_path / "queues", 16)
    assert list(tmp_path.iterdir()) == []
