"""Recovery of stores with deleted and recreated topics."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from mqproc.errors import ConfigurationError
from mqproc.layout import queue_table as table_layout
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consumequeue.bounds import as_units
from tests.support.store_builders import SMALL_QUEUE_FILE_BYTES, RecoveredQueue, RecoveredStore, recovered_queue

UNITS_PER_FILE = SMALL_QUEUE_FILE_BYTES // 20


@pytest.fixture
def store(tmp_path: Path) -> RecoveredStore:
    return RecoveredStore(tmp_path / "store")


Recreated = tuple[RecoveredStore, dict[tuple[str, int], RecoveredQueue]]


@pytest.fixture
def recreated(store: RecoveredStore) -> Recreated:
    """Build a store where T was recreated and U deleted; return it and its expected queues."""
    store.append("T", 10)
    store.append("U", 7)
    v = store.append("V", 6)
    store.delete("T")
    store.delete("U")
    t = store.append("T", 5)
    v += store.append("V", 4)
    return store, {
        ("T", 0): recovered_queue(5, t[0::2]),
        ("T", 1): recovered_queue(5, t[1::2]),
        ("V", 0): recovered_queue(0, v[0::2]),
        ("V", 1): recovered_queue(0, v[1::2]),
    }


@pytest.mark.parametrize("clean", [False, True])
def test_recovery_rebuild_excludes_deleted_records(recreated: Recreated, clean: bool) -> None:
    store, expected = recreated
    store.topics.save(1)
    store.forget_derived()
    assert store.recover(clean=clean) == expected
    before = store.files()
    assert not any(name.startswith("U/") for name in before)
    # A second recovery changes nothing.
    assert store.recover(clean=clean) == expected
    assert store.files() == before


def test_recovery_applies_deletions_of_the_journal(recreated: Recreated) -> None:
    store, expected = recreated
    assert not store.paths.deleted_topics.exists()
    assert store.recover(clean=False) == expected


def test_recovery_without_own_folder_keeps_all_queues(recreated: Recreated) -> None:
    store, expected = recreated
    assert store.recover() == expected
    store.topics.save(1)
    shutil.rmtree(store.paths.own)
    assert store.recover() == expected


def test_recovery_without_config_restores_all_records(recreated: Recreated) -> None:
    store, _expected = recreated
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


def test_recovery_quarantines_unreadable_deleted_topics(recreated: Recreated) -> None:
    """Deleted records are restored, as without the file; topics.json is kept."""
    store, expected = recreated
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
def test_recovery_removes_queue_files_of_deleted_topics(store: RecoveredStore, clean: bool) -> None:
    """The removal of the files was not durable or did not happen."""
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
        ("T", 0): recovered_queue(25, t[:1]),
        ("T", 1): recovered_queue(25, t[1:]),
        ("V", 0): recovered_queue(0, v[:1]),
        ("V", 1): recovered_queue(0, v[1:]),
    }
    assert store.recover(clean=clean) == expected
    assert not (store.paths.consume_queue / "U").exists()
    rebuilt = store.files()
    store.topics.save(1)
    store.forget_derived()
    assert store.recover() == expected
    assert store.files() == rebuilt
    assert len(rebuilt["T/0/00000000000000000400"]) == SMALL_QUEUE_FILE_BYTES
    units = as_units(rebuilt["T/0/00000000000000000400"]).tolist()
    assert units[:6] == [(0, FILLER_SIZE, 0)] * 5 + [(t[0], units[5][1], 0)]


def test_recovery_empty_recreated_topic_continues_offsets(store: RecoveredStore) -> None:
    store.append("T", 10)
    store.delete("T")
    store.topics.add("T", 3)
    store.topics.note("T")
    store.topics.save(1)
    for clean in (False, True, False):
        found = store.recover(clean=clean)
        assert found == {
            ("T", 0): recovered_queue(5, []),
            ("T", 1): recovered_queue(5, []),
            ("T", 2): recovered_queue(0, []),
        }
        # The log is not searched for units that the deletion removed.
        assert not any("lost" in line for line in store.report)


def test_recovery_finds_recreated_topic_in_the_log(store: RecoveredStore) -> None:
    """The journal has the deletion, but not the recreation before the kill."""
    store.append("T", 10)
    store.delete("T")
    t = store.engine.append("T", [b"x"] * 3, queues=2).tolist()
    expected = {("T", 0): recovered_queue(5, t[0::2]), ("T", 1): recovered_queue(5, t[1::2])}
    assert store.recover(clean=False) == expected
    # The second time with the files of the recreated topic.
    assert store.recover(clean=True) == expected
    assert store.recover(clean=False) == expected


def test_recovery_repeated_deletion_keeps_last_records(store: RecoveredStore) -> None:
    first = 0
    for turn in range(4):
        store.append("T", 2 * UNITS_PER_FILE + 2 * turn)
        first += UNITS_PER_FILE + turn
        store.delete("T")
    store.append("other", 3)
    t = store.append("T", 4)
    found = store.recover(clean=False)
    assert (found["T", 0], found["T", 1]) == (recovered_queue(first, t[0::2]), recovered_queue(first, t[1::2]))
    before = store.files()
    store.topics.save(1)
    store.forget_derived()
    assert store.recover() == found
    assert store.files() == before


def test_recovery_other_queue_count_continues_offsets(store: RecoveredStore) -> None:
    store.append("T", 12, queues=4)
    store.delete("T", queues=4)
    store.append("T", 2, queues=1)
    found = store.recover(clean=False)
    assert {name: (each.min_offset, each.max_offset) for name, each in found.items()} == {("T", 0): (3, 5)}
    store.delete("T", queues=4)
    t = store.append("T", 6, queues=6)
    found = store.recover(clean=False)
    firsts = [5, 3, 3, 3, 0, 0]
    assert found == {
        ("T", queue_id): recovered_queue(first, t[queue_id : queue_id + 1]) for queue_id, first in enumerate(firsts)
    }


def test_recovery_log_shorter_than_deletion_keeps_new_records(store: RecoveredStore) -> None:
    """The journal was synced, the log was not: new records precede the deletion."""
    store.append("T", 4)
    number = store.engine.table.find("T", 0)
    # At the deletion the log had six more records, three per queue.
    store.topics.delete("T", store.engine.written + 5000, [5, 5])
    for each in (number, store.engine.table.find("T", 1)):
        store.engine.table.store(each, table_layout.NEXT_OFFSET, 5)
    store.engine.appender.read_next_offsets()
    t = store.append("T", 4)
    expected = {("T", 0): recovered_queue(5, t[0::2]), ("T", 1): recovered_queue(5, t[1::2])}
    for _restart in range(2):
        assert store.recover(clean=False) == expected


def test_recovery_topic_recreated_by_rocketmq_starts_at_0(store: RecoveredStore) -> None:
    """RocketMQ does not know the deletions of this store: it starts at offset 0."""
    store.append("T", 10)
    store.delete("T")
    store.topics.save(1)
    for queue_id in (0, 1):
        store.engine.table.store(store.engine.table.entry("T", queue_id), table_layout.NEXT_OFFSET, 0)
    store.engine.appender.read_next_offsets()
    t = store.append("T", 4)
    expected = {("T", 0): recovered_queue(0, t[0::2]), ("T", 1): recovered_queue(0, t[1::2])}
    for clean in (False, True, False):
        assert store.recover(clean=clean) == expected


def test_recovery_any_older_queue_files_are_repaired(store: RecoveredStore, tmp_path: Path) -> None:
    """Every earlier state of the ConsumeQueue files is recovered with the final log and topics."""
    states: list[Path] = []

    def keep() -> None:
        states.append(tmp_path / f"state{len(states)}")
        shutil.copytree(store.paths.consume_queue, states[-1])

    firsts = 0
    for _ in range(3):
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
    assert found["T", 0] == recovered_queue(firsts, t[0::2])
    expected = store.files()
    for state in states:
        shutil.rmtree(store.paths.consume_queue)
        shutil.copytree(state, store.paths.consume_queue)
        assert store.recover(clean=False) == found
        assert store.files() == expected


def test_recovery_table_too_small_for_deleted_queues_raises(store: RecoveredStore) -> None:
    for number in range(9):
        store.append(f"T{number}", 2)
        store.delete(f"T{number}")
    store.engine.options = dataclasses.replace(store.engine.options, max_queues=16)
    with pytest.raises(ConfigurationError, match="max_queues = 16: the store has 18 queues, deleted ones included"):
        store.recover()
    store.engine.options = dataclasses.replace(store.engine.options, max_queues=18)
    assert store.recover() == {}
