"""The writer's topics: created, deleted and recreated; full disks and killed writers.

A killed writer is simulated by omitting its last steps; its successor is a new object over the same files.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mqproc.config.options import Options
from mqproc.errors import BadRequestError, TooManyQueuesError, TopicNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.layout import queue_table as layout
from mqproc.paths import StorePaths, segment_name
from mqproc.roles.writer.topics import WriterTopics
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.topics import TopicDeletion, Topics
from mqproc.topic_names import REVIVE_QUEUES, REVIVE_TOPIC, SCHEDULE_TOPIC
from mqproc.util.units import DELAY_LEVELS


class FaultyIO(StoreIO):
    """Fails calls of one kind with an errno while `left` is positive; −1 for ever."""

    def __init__(self, kind: str = "", number: int = errno.ENOSPC, left: int = 0) -> None:
        super().__init__()
        self.kind, self.number, self.left = kind, number, left
        self.removed: list[Path] = []

    def _try(self, kind: str) -> None:
        if kind == self.kind and self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._try("pwrite")
        super().pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._try("sync")
        super().sync(fd)

    def remove_folder(self, folder: Path) -> None:
        self._try("remove_folder")
        super().remove_folder(folder)
        self.removed.append(folder)


class Store:
    """A store's folder, its queue table, and the topics of its writer."""

    def __init__(self, root: Path, capacity: int = 64, io: StoreIO | None = None, **options: Any) -> None:
        self.paths = StorePaths(root)
        for folder in (self.paths.own, self.paths.consume_queue, self.paths.commit_log):
            folder.mkdir(parents=True)
        self.io = io or StoreIO()
        self.table = QueueTable.create(StoreIO(), self.paths.queues, capacity)
        self.options = Options(**({"default_topic_queue_nums": 4} | options))
        self.topics = self.successor()

    def successor(self) -> WriterTopics:
        self.topics = WriterTopics(self.io, self.io, self.paths, self.options, self.table)
        return self.topics

    def use(self, topic: str, count: int) -> None:
        """As if `count` messages had been sent to each queue and dispatched."""
        for number in self.topics.find(topic).queue_numbers.tolist():
            self.table.words.add(layout.entry_word(number, layout.NEXT_OFFSET), count)
            queue_id = self.table.name(number)[1]
            self.paths.queue(topic, queue_id).mkdir(parents=True, exist_ok=True)
            (self.paths.queue(topic, queue_id) / segment_name(0)).write_bytes(b"units")

    def files_of(self, topic: str) -> bool:
        return (self.paths.consume_queue / topic).exists()

    def next_offsets(self, topic: str) -> list[int]:
        return [self.table.next_offset(number) for number in self.topics.find(topic).queue_numbers.tolist()]

    def durable(self) -> Topics:
        """The topics that a new process would read."""
        topics = Topics(StoreIO(), self.paths)
        topics.load()
        return topics


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_topic_recreated_by_a_send_continues_its_offsets(store: Store) -> None:
    store.use("T", 3)
    before = store.topics.find("T").queue_numbers.tolist()
    store.topics.delete("T", 1000)
    assert not store.files_of("T")
    assert store.durable().names() == []
    assert store.durable().deletions == {"T": TopicDeletion(1000, (3, 3, 3, 3))}
    with pytest.raises(TopicNotFoundError):
        store.topics.delete("T", 1000)
    assert store.topics.find("T").queue_numbers.tolist() == before
    assert store.next_offsets("T") == [3, 3, 3, 3]


def test_topic_queues_of_earlier_widths_keep_their_offsets(store: Store) -> None:
    store.use("T", 3)
    store.topics.delete("T", 1000)
    store.topics.create("T", 1)
    store.use("T", 2)
    assert [queue_id for _, _, queue_id in store.table.live()] == [0]
    store.topics.delete("T", 2000)
    assert store.durable().deletions == {"T": TopicDeletion(2000, (5, 3, 3, 3))}
    store.topics.create("T", 6)
    assert store.next_offsets("T") == [5, 3, 3, 3, 0, 0]


def test_topics_recreated_by_thousands_reuse_their_entries(tmp_path: Path) -> None:
    names = [f"topic-{number}" for number in range(1000)]
    store = Store(tmp_path / "store", capacity=4 * len(names))
    for turn in range(4):
        for name in names:
            store.topics.create(name, 4)
        store.topics.topics.commit()
        for name in names:
            store.topics.delete(name, turn)
        store.topics.save(turn)
    assert store.table.count == 4 * len(names)
    store.topics.create(names[0], 4)
    kept = "deleted queues occupy 3,996 until the next start, or while the log has messages of them"
    with pytest.raises(TooManyQueuesError, match=f"1 more queues exceed max_queues = 4,000; 0 are left; {kept}"):
        store.topics.create("other", 1)
    assert store.topics.topics.get("other") is None


def test_topic_too_many_queues_is_refused_at_once(store: Store) -> None:
    with pytest.raises((BadRequestError, TooManyQueuesError)):
        store.topics.create("T", 1 << 60)
    assert store.topics.topics.get("T") is None


# Full disks, files that are in use


def test_topic_deletion_without_space_changes_nothing(tmp_path: Path) -> None:
    io = FaultyIO("pwrite")
    store = Store(tmp_path / "store", io=io)
    store.use("T", 3)
    store.topics.save(1)
    io.left = 1
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        store.topics.delete("T", 1000)
    assert store.files_of("T")
    assert (store.table.deletions, len(list(store.table.live()))) == (0, 4)
    assert store.next_offsets("T") == [3, 3, 3, 3]
    assert store.durable().names() == ["T"]
    store.topics.delete("T", 1000)
    assert store.durable().deletions == {"T": TopicDeletion(1000, (3, 3, 3, 3))}


def test_topic_deletion_removes_files_created_meanwhile(tmp_path: Path) -> None:
    """The dispatcher writes a unit at this moment."""
    io = FaultyIO("remove_folder", errno.ENOTEMPTY)
    store = Store(tmp_path / "store", io=io)
    store.use("T", 3)
    io.left = 2
    store.topics.delete("T", 1000)
    assert not store.files_of("T")


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EACCES])
def test_topic_deletion_continues_past_undeletable_files(tmp_path: Path, number: int) -> None:
    io = FaultyIO("remove_folder", number)
    store = Store(tmp_path / "store", io=io)
    store.use("T", 3)
    io.left = -1
    store.topics.delete("T", 1000)
    assert store.files_of("T")
    assert store.topics.unsaved
    assert list(store.table.live()) == []
    assert store.durable().deletions == {"T": TopicDeletion(1000, (3, 3, 3, 3))}
    io.left = 0
    store.successor()
    assert not store.files_of("T")


def test_topics_failed_save_is_retried_until_it_succeeds(tmp_path: Path) -> None:
    io = FaultyIO("pwrite")
    store = Store(tmp_path / "store", io=io)
    io.left = -1
    store.topics.find("T")
    for _try in range(3):
        store.topics.save(1)
        assert store.topics.unsaved
    assert store.durable().names() == []
    io.left = 0
    store.topics.save(2)
    assert not store.topics.unsaved
    assert store.durable().names() == ["T"]


# Killed writers


def test_successor_saves_topics_found_only_in_the_journal(store: Store) -> None:
    store.use("T", 3)
    store.topics.create("U", 2)
    store.topics.delete("T", 1000)
    topics = store.successor()
    assert topics.unsaved
    topics.save(1)
    assert not store.paths.topics_journal.exists()
    assert store.durable().names() == ["U"]
    assert store.durable().deletions == {"T": TopicDeletion(1000, (3, 3, 3, 3))}
    assert not store.successor().unsaved


@pytest.mark.parametrize("queues_done", [0, 1, 3])
def test_successor_finishes_a_deletion(store: Store, queues_done: int) -> None:
    """Killed after the durable line, after some tombstones, or before removing the files."""
    store.topics.create("T", 4)
    for number, count in enumerate([0, 5, 0, 2]):
        store.table.store(number, layout.NEXT_OFFSET, count)
    store.use("other", 1)
    store.topics.save(1)
    (store.paths.consume_queue / "T" / "1").mkdir(parents=True)
    store.topics.topics.delete("T", 1000, [0, 5, 0, 2])
    for number in [0, 2, 3][:queues_done]:
        store.table.delete_queue(number, 1000)
    topics = store.successor()
    assert topics.topics.names() == ["other"]
    assert {topic for _, topic, _ in store.table.live()} == {"other"}
    assert not store.files_of("T")
    assert store.files_of("other")
    assert store.next_offsets("T") == [0, 5, 0, 2]
    number = store.table.find("T", 1)
    assert store.table.deletion(number) == (1000, 5)


def test_successor_keeps_files_until_the_deletion_is_durable(store: Store) -> None:
    """Killed before the sync of the deletion's line: without it the topic needs its units."""
    store.use("T", 3)
    store.topics.save(1)
    store.topics.topics.delete("T", 1000, [3, 3, 3, 3])
    store.io = FaultyIO("sync", errno.EIO, left=1)
    store.successor()
    assert store.files_of("T")
    store.successor()
    assert not store.files_of("T")


def test_successor_removes_files_of_deleted_topics_in_order(store: Store) -> None:
    """The order must not depend on the hash seed of the process."""
    deleted = [f"T{number:02}" for number in range(40)]
    for topic in deleted:
        store.topics.create(topic, 1)
        store.use(topic, 1)
        store.topics.delete(topic, 1000)
        (store.paths.consume_queue / topic / "0").mkdir(parents=True)
    store.io = io = FaultyIO()
    store.successor()
    assert [folder.name for folder in io.removed] == deleted


def test_successor_keeps_topic_deleted_with_fewer_queues_before(store: Store) -> None:
    """Queues of its first life only, recreated by the send, were no part of that deletion."""
    store.use("T", 3)
    store.topics.delete("T", 1000)
    store.topics.create("T", 1)
    store.topics.delete("T", 2000)
    assert store.durable().deletions == {"T": TopicDeletion(2000, (3, 3, 3, 3))}
    assert {store.table.deletion(number) for number in range(4)} == {(2000, 3)}
    journal = store.paths.topics_journal.read_bytes()
    store.use("T", 1)
    store.paths.topics_journal.write_bytes(journal)  # Without space, it was not updated.
    assert store.durable().names() == []
    topics = store.successor()
    assert topics.topics.names() == ["T"]
    assert store.next_offsets("T") == [4, 4, 4, 4]
    assert store.files_of("T")


def test_successor_keeps_a_topic_recreated_by_a_send(store: Store) -> None:
    """Its records may be in the log already; the journal, without space, lacked it at the kill."""
    store.use("T", 3)
    store.topics.delete("T", 1000)
    journal = store.paths.topics_journal.read_bytes()
    store.topics.find("T")
    store.paths.topics_journal.write_bytes(journal)
    (store.paths.consume_queue / "T" / "0").mkdir(parents=True)
    assert store.durable().names() == []
    topics = store.successor()
    config = topics.topics.get("T")
    assert config is not None
    assert config.queues == 4
    assert topics.unsaved
    assert store.files_of("T")
    assert store.next_offsets("T") == [3, 3, 3, 3]


def test_topic_deletion_is_forgotten_after_log_start_passes_it(store: Store) -> None:
    for name in ("old", "young", "remade"):
        store.use(name, 1)
        store.topics.delete(name, 2048 if name == "young" else 1024)
    store.topics.create("remade", 1)
    store.topics.topics.commit()
    for start in (1024, 2048):
        (store.paths.commit_log / segment_name(start)).touch()
    topics = store.successor()
    assert topics.unsaved
    topics.save(1)
    assert set(store.durable().deletions) == {"young", "remade"}


@pytest.mark.parametrize(("topic", "queues"), [(SCHEDULE_TOPIC, DELAY_LEVELS), (REVIVE_TOPIC, REVIVE_QUEUES)])
def test_system_topic_has_all_queues_despite_remnants(topic: str, queues: int, store: Store) -> None:
    """A power loss took the config files, and recovery found some queues again."""
    store.table.create_queue(topic, 2)
    topics = store.successor()
    found = topics.topics.get(topic)
    assert found is not None
    assert found.queues == 3
    assert len(topics.find_internal(topic).queue_numbers) == queues
    topics.save(1)
    assert len(store.successor().find_internal(topic).queue_numbers) == queues


def test_rocketmq_light_queues_become_no_topics(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.table.create_queue("Orders", 1)
    store.table.create_queue("%LMQ%light", 0)
    topics = WriterTopics(store.io, store.io, store.paths, store.options, store.table)
    assert topics.topics.get("Orders") is not None
    assert topics.topics.get("%LMQ%light") is None


def test_topic_ignores_folders_with_invalid_queue_numbers(tmp_path: Path) -> None:
    """The journal cannot hold so many queues, so sends to the topic would find no room."""
    store = Store(tmp_path)
    store.table.create_queue("Orders", 1)
    store.table.create_queue("Orders", 20_261_126)
    store.table.create_queue("Dates", 65_535)
    topics = WriterTopics(store.io, store.io, store.paths, store.options, store.table)
    orders = topics.topics.get("Orders")
    assert orders is not None
    assert orders.queues == 2
    assert topics.topics.get("Dates") is None
    assert len(topics.find("Dates").queue_numbers) == 4
