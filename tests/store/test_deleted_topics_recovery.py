"""Recovery of stores in which topics were deleted and made again: a queue has the records of its last life, no other.

Logs are written by the engine; what a kill or a power loss leaves of the other files is put beside them.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from mqproc.errors import TooManyQueuesError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consumequeue.files import ConsumeQueueFiles, as_units
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.recovery.recovery import Recovery
from mqproc.store.topics import Topics
from tests.support.store_builders import Engine

QUEUE_FILE_BYTES = 400
UNITS_PER_FILE = QUEUE_FILE_BYTES // 20


@dataclass(frozen=True)
class Queue:
    """What recovery found of a queue. `units` are (queue offset, physical offset) of its records."""

    min_offset: int
    max_offset: int
    next_offset: int
    units: list[tuple[int, int]]


class Store:
    """A store whose writer works; its other roles are replaced by recovery."""

    def __init__(self, root: Path) -> None:
        self.engine = Engine(
            root, mapped_file_size_consume_queue=QUEUE_FILE_BYTES, max_hash_slot_num=50, max_index_num=2000
        )
        self.paths = self.engine.paths
        self.topics = Topics(StoreIO(), self.paths)
        self.topics.load()
        self.report: list[str] = []

    def append(self, topic: str, count: int, queues: int = 2) -> list[int]:
        """`count` messages to a topic's queues in turn; their physical offsets."""
        config = self.topics.get(topic)
        if config is None:
            self.topics.add(topic, queues)
            self.topics.note(topic)
            self.topics.commit()
        return self.engine.append(topic, [b"x"] * count, queues=queues, keys=["k"] * count).tolist()

    def delete(self, topic: str, queues: int = 2) -> None:
        """As the writer does it."""
        table = self.engine.table
        numbers = [table.entry(topic, queue_id) for queue_id in range(queues)]
        self.topics.delete(topic, self.engine.written, [table.next_offset(number) for number in numbers])
        for number in numbers:
            table.delete_queue(number, self.engine.written)

    def recover(self, *, clean: bool = True) -> dict[tuple[str, int], Queue]:
        """Recovery of the store as it lies there; then every queue that is there."""
        words = Words(bytearray(words_of.FILE_SIZE))
        options = self.engine.options
        self.report.clear()
        Recovery(StoreIO(), self.paths, options, words, self.report.append, clean=clean).run()
        assert words[words_of.DISPATCHED] == self.engine.written
        table = QueueTable(StoreIO(), self.paths.queues)
        files = ConsumeQueueFiles(StoreIO(), self.paths.consume_queue, QUEUE_FILE_BYTES)
        found = {}
        for number, topic, queue_id in table.live():
            low, high = table.min_offset(number), table.max_offset(number)
            data = files.read_units(topic, queue_id, low, high - low) if high > low else b""
            physical = [int(unit["physical_offset"]) for unit in as_units(data)]
            units = list(zip(range(low, high), physical, strict=True))
            found[topic, queue_id] = Queue(low, high, table.next_offset(number), units)
        files.close()
        table.close()
        return found

    def files(self) -> dict[str, bytes]:
        found = sorted(path for path in self.paths.consume_queue.rglob("*") if path.is_file())
        return {str(path.relative_to(self.paths.consume_queue)): path.read_bytes() for path in found}

    def forget_derived(self) -> None:
        """Nothing is left but the log and `config/`."""
        for folder in (self.paths.consume_queue, self.paths.index, self.paths.own):
            shutil.rmtree(folder, ignore_errors=True)


def queue(first: int, units: list[int]) -> Queue:
    """A queue that begins at `first` and holds these records."""
    stop = first + len(units)
    return Queue(first, stop, stop, list(zip(range(first, stop), units, strict=True)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


Remade = tuple[Store, dict[tuple[str, int], Queue]]


@pytest.fixture
def remade(store: Store) -> Remade:
    """T was deleted and made again, U was deleted, V stayed; and what is to be found."""
    store.append("T", 10)
    store.append("U", 7)
    v = store.append("V", 6)
    store.delete("T")
    store.delete("U")
    t = store.append("T", 5)
    v += store.append("V", 4)
    return store, {
        ("T", 0): queue(5, t[0::2]),
        ("T", 1): queue(5, t[1::2]),
        ("V", 0): queue(0, v[0::2]),
        ("V", 1): queue(0, v[1::2]),
    }


@pytest.mark.parametrize("clean", [False, True])
def test_a_rebuild_from_the_log_does_not_bring_deleted_records_back(remade: Remade, clean: bool) -> None:
    store, expected = remade
    store.topics.save(1)
    store.forget_derived()
    assert store.recover(clean=clean) == expected
    before = store.files()
    assert not any(name.startswith("U/") for name in before)
    # A second recovery finds nothing to do.
    assert store.recover(clean=clean) == expected
    assert store.files() == before


def test_deletions_that_are_only_in_the_journal_count_as_well(remade: Remade) -> None:
    store, expected = remade
    assert not store.paths.deleted_topics.exists()
    assert store.recover(clean=False) == expected


def test_without_its_own_folder_a_stopped_store_has_lost_nothing(remade: Remade) -> None:
    store, expected = remade
    assert store.recover() == expected
    store.topics.save(1)
    shutil.rmtree(store.paths.own)
    assert store.recover() == expected


def test_without_config_too_whatever_the_log_has_is_there_again(remade: Remade) -> None:
    store, _expected = remade
    store.topics.save(1)
    store.forget_derived()
    shutil.rmtree(store.paths.config)
    found = store.recover()
    assert {name: (each.min_offset, each.max_offset) for name, each in found.items()} == {
        ("T", 0): (0, 8),
        ("T", 1): (0, 7),
        ("U", 0): (0, 4),
        ("U", 1): (0, 3),
        ("V", 0): (0, 5),
        ("V", 1): (0, 5),
    }


def test_a_file_of_deletions_that_nobody_can_read_goes_aside(remade: Remade) -> None:
    """As without it, records come back; nothing else is lost, and topics.json stays in its place."""
    store, expected = remade
    store.topics.save(1)
    store.paths.deleted_topics.write_text('{"deletedTopicTable": {"T": 7}}')
    found = store.recover()
    assert found["V", 0] == expected["V", 0]
    assert (found["T", 0].min_offset, found["T", 0].max_offset) == (0, 8)
    assert any("deletedTopics.json" in line and "moved to" in line for line in store.report)
    assert store.paths.topics.exists()
    assert not store.paths.deleted_topics.exists()
    assert store.recover() == found


@pytest.mark.parametrize("clean", [False, True])
def test_files_that_a_deletion_left_are_removed(store: Store, clean: bool) -> None:
    """The removal of the files was not durable, or never done: they lie there as before the deletion."""
    store.append("T", 50)
    store.append("U", 50)
    v = store.append("V", 2)
    store.recover()
    before = store.files()
    assert {name.split("/")[0] for name in before} == {"T", "U", "V"}
    store.delete("T")
    store.delete("U")
    t = store.append("T", 2)
    expected = {
        ("T", 0): queue(25, t[:1]),
        ("T", 1): queue(25, t[1:]),
        ("V", 0): queue(0, v[:1]),
        ("V", 1): queue(0, v[1:]),
    }
    assert store.recover(clean=clean) == expected
    assert not (store.paths.consume_queue / "U").exists()
    rebuilt = store.files()
    store.topics.save(1)
    store.forget_derived()
    assert store.recover() == expected
    assert store.files() == rebuilt
    assert len(rebuilt["T/0/00000000000000000400"]) == QUEUE_FILE_BYTES
    units = as_units(rebuilt["T/0/00000000000000000400"]).tolist()
    assert units[:6] == [(0, FILLER_SIZE, 0)] * 5 + [(t[0], units[5][1], 0)]


def test_an_empty_topic_made_again_begins_where_it_stood(store: Store) -> None:
    store.append("T", 10)
    store.delete("T")
    store.topics.add("T", 3)
    store.topics.note("T")
    store.topics.save(1)
    for clean in (False, True, False):
        found = store.recover(clean=clean)
        assert found == {("T", 0): queue(5, []), ("T", 1): queue(5, []), ("T", 2): queue(0, [])}
        # The log need not be searched for units that the deletion took.
        assert not any("lost" in line for line in store.report)


def test_a_topic_that_a_send_made_again_is_found_in_the_log(store: Store) -> None:
    """The journal knows of the deletion; that the topic was made again it was not told before the kill."""
    store.append("T", 10)
    store.delete("T")
    t = store.engine.append("T", [b"x"] * 3, queues=2).tolist()
    expected = {("T", 0): queue(5, t[0::2]), ("T", 1): queue(5, t[1::2])}
    assert store.recover(clean=False) == expected
    # Now with files that the new life has.
    assert store.recover(clean=True) == expected
    assert store.recover(clean=False) == expected


def test_deleted_several_times_a_queue_has_its_last_life_only(store: Store) -> None:
    first = 0
    for turn in range(4):
        store.append("T", 2 * UNITS_PER_FILE + 2 * turn)
        first += UNITS_PER_FILE + turn
        store.delete("T")
    store.append("other", 3)
    t = store.append("T", 4)
    found = store.recover(clean=False)
    assert (found["T", 0], found["T", 1]) == (queue(first, t[0::2]), queue(first, t[1::2]))
    before = store.files()
    store.topics.save(1)
    store.forget_derived()
    assert store.recover() == found
    assert store.files() == before


def test_made_again_with_fewer_and_then_more_queues_all_offsets_go_on(store: Store) -> None:
    store.append("T", 12, queues=4)
    store.delete("T", queues=4)
    store.append("T", 2, queues=1)
    found = store.recover(clean=False)
    assert {name: (each.min_offset, each.max_offset) for name, each in found.items()} == {("T", 0): (3, 5)}
    store.delete("T", queues=4)
    t = store.append("T", 6, queues=6)
    found = store.recover(clean=False)
    firsts = [5, 3, 3, 3, 0, 0]
    assert found == {("T", queue_id): queue(first, t[queue_id : queue_id + 1]) for queue_id, first in enumerate(firsts)}


def test_a_log_that_lost_its_end_after_a_deletion_keeps_what_is_appended_below_it(store: Store) -> None:
    """The journal of topics was synced, the log was not: its new records lie below the position of the deletion."""
    store.append("T", 4)
    number = store.engine.table.find("T", 0)
    # Six records more, 3 a queue, were in the log when the topic was deleted.
    store.topics.delete("T", store.engine.written + 5000, [5, 5])
    for each in (number, store.engine.table.find("T", 1)):
        store.engine.table.store(each, table_layout.NEXT_OFFSET, 5)
    store.engine.appender.read_next_offsets()
    t = store.append("T", 4)
    expected = {("T", 0): queue(5, t[0::2]), ("T", 1): queue(5, t[1::2])}
    for _restart in range(2):
        assert store.recover(clean=False) == expected


def test_a_topic_that_another_program_made_again_begins_at_0(store: Store) -> None:
    """RocketMQ knows nothing of our deletions: it counts from 0 on, as it does after any deletion."""
    store.append("T", 10)
    store.delete("T")
    store.topics.save(1)
    for queue_id in (0, 1):
        store.engine.table.store(store.engine.table.entry("T", queue_id), table_layout.NEXT_OFFSET, 0)
    store.engine.appender.read_next_offsets()
    t = store.append("T", 4)
    expected = {("T", 0): queue(0, t[0::2]), ("T", 1): queue(0, t[1::2])}
    for clean in (False, True, False):
        assert store.recover(clean=clean) == expected


def test_what_a_kill_can_leave_beside_any_log_is_mended(store: Store, tmp_path: Path) -> None:
    """Every state of the ConsumeQueue files on the way, under the log and the topics of the end."""
    states: list[Path] = []

    def keep() -> None:
        states.append(tmp_path / f"state{len(states)}")
        shutil.copytree(store.paths.consume_queue, states[-1])

    firsts = 0
    for _life in range(3):
        store.append("T", 30)
        store.append("U", 10)
        store.recover()
        keep()
        store.delete("T")
        store.recover()
        keep()
        firsts += 15
    t = store.append("T", 30)
    found = store.recover()
    assert found["T", 0] == queue(firsts, t[0::2])
    expected = store.files()
    for state in states:
        shutil.rmtree(store.paths.consume_queue)
        shutil.copytree(state, store.paths.consume_queue)
        assert store.recover(clean=False) == found
        assert store.files() == expected


def test_a_table_too_small_for_what_was_deleted_says_so(store: Store) -> None:
    for number in range(9):
        store.append(f"T{number}", 2)
        store.delete(f"T{number}")
    store.engine.options = dataclasses.replace(store.engine.options, max_queues=16)
    with pytest.raises(TooManyQueuesError, match="max_queues = 16 queues are in use, deleted ones included"):
        store.recover()
    store.engine.options = dataclasses.replace(store.engine.options, max_queues=18)
    assert store.recover() == {}
