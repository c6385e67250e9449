"""topics.json, its journal and deletedTopics.json, after failures and power losses.

Tests simulate a power loss by dropping or zeroing unsynced pages.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.topics import TopicDeletion, Topics, load_deletions
from mqproc.util.units import PAGE_BYTES


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    paths = StorePaths(tmp_path)
    paths.own.mkdir()
    return paths


def loaded(paths: StorePaths, io: StoreIO | None = None) -> Topics:
    topics = Topics(io or StoreIO(), paths)
    topics.load()
    return topics


def add(topics: Topics, *names: str, queues: int = 4) -> None:
    """Create topics and commit them to the journal."""
    for name in names:
        topics.add(name, queues)
        topics.note(name)
    topics.commit()


class FailingIO(StoreIO):
    """Fails calls of the named kinds while `broken` is set."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.broken = False

    def _fail_if_broken(self, kind: str) -> None:
        if self.broken and kind in self.kinds:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._fail_if_broken("pwrite")
        super().pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._fail_if_broken("sync")
        super().sync(fd)

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None:
        self._fail_if_broken(f"rename {target.name}")
        super().rename(source, target, between)

    def unlink(self, path: Path) -> None:
        self._fail_if_broken(f"unlink {path.name}")
        super().unlink(path)


# The journal


def test_topics_journal_is_read(paths: StorePaths) -> None:
    topics = loaded(paths)
    add(topics, "A", "B", "C")
    topics.delete("B", 1000, [5, 0, 7, 0])
    topics.add("C", 6, 4)
    topics.note("C")
    topics.commit()
    again = loaded(paths)
    assert again.names() == ["A", "C"]
    config = again.get("C")
    assert config is not None
    assert (config.queues, config.perm) == (6, 4)
    assert again.deletions == {"B": TopicDeletion(1000, (5, 0, 7))}
    assert again.remark == ""


def test_topics_write_is_visible_before_commit(paths: StorePaths) -> None:
    """The change survives a kill; a later commit syncs it, with each line written once."""
    io = FailingIO("sync")
    io.broken = True
    topics = loaded(paths, io)
    for name in "AB":
        topics.add(name, 4)
        topics.note(name)
        topics.write()
    assert loaded(paths).names() == ["A", "B"]
    io.broken = False
    add(topics, "C")
    topics.write()
    assert paths.topics_journal.read_bytes() == b'["A",4,6]\n["B",4,6]\n["C",4,6]\n'


def test_topics_journal_of_earlier_version_is_read(paths: StorePaths) -> None:
    paths.topics_journal.write_bytes(b'["A",4,6]\n["B",4,6]\n["A",0,0]\n')
    topics = loaded(paths)
    assert topics.names() == ["B"]
    assert topics.deletions == {}


@pytest.mark.parametrize("page", [0, 1, 2, 3])
def test_topics_journal_ends_at_a_lost_page(paths: StorePaths, page: int) -> None:
    """A power loss dropped one page of an unacknowledged commit."""
    topics = loaded(paths)
    add(topics, "acknowledged")
    synced = paths.topics_journal.stat().st_size
    add(topics, *(f"topic-{number:04d}" for number in range(PAGE_BYTES // 4)))
    data = bytearray(paths.topics_journal.read_bytes())
    assert len(data) > 4 * PAGE_BYTES
    lost = slice(max(synced, page * PAGE_BYTES), (page + 1) * PAGE_BYTES)
    data[lost] = bytes(lost.stop - lost.start)
    paths.topics_journal.write_bytes(data)

    found = loaded(paths)
    bad = data.rfind(b"\n", 0, lost.start) + 1
    lines = bytes(data[:bad]).splitlines()
    assert found.names() == sorted(json.loads(line)[0] for line in lines)
    assert len(lines) >= 1
    assert f"topics.journal ends early: byte {bad}:" in found.remark


STALE = b'["stale",4,6]\n'


@pytest.mark.parametrize(
    "tail",
    [
        b'["torn",4',
        b'["torn",4,6]',
        b'["torn",4\n' + STALE,
        b"\0" * 20 + b"\n" + STALE,
        b"\xff\xfe\n" + STALE,
        b'["torn",70000,6]\n' + STALE,
        b"[]\n" + STALE,
        b"\n" + STALE,
        b'["torn",4,6,0,[],' + b"[" * 100_000 + b"\n" + STALE,
    ],
)
def test_topics_commit_truncates_torn_journal(paths: StorePaths, tail: bytes) -> None:
    """The valid lines after the torn one must not reappear."""
    add(loaded(paths), "A")
    acknowledged = paths.topics_journal.read_bytes()
    paths.topics_journal.write_bytes(acknowledged + tail)
    topics = loaded(paths)
    assert topics.names() == ["A"]
    topics.add("B", 1)
    topics.note("B")
    topics.commit()
    assert paths.topics_journal.read_bytes() == acknowledged + b'["B",1,6]\n'
    assert loaded(paths).names() == ["A", "B"]


def test_topics_failed_commit_is_repeated(paths: StorePaths) -> None:
    io = FailingIO("sync")
    topics = loaded(paths, io)
    add(topics, "A")
    io.broken = True
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        add(topics, "B")
    io.broken = False
    add(topics, "C")
    assert paths.topics_journal.read_bytes() == b'["A",4,6]\n["B",4,6]\n["C",4,6]\n'


# Deleting


def test_topics_failed_delete_changes_nothing(paths: StorePaths) -> None:
    io = FailingIO("pwrite")
    topics = loaded(paths, io)
    add(topics, "A", "B")
    topics.delete("B", 10, [2])
    add(topics, "B", queues=1)
    io.broken = True
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        topics.delete("B", 500, [9])
    assert topics.names() == ["A", "B"]
    assert topics.deletions == {"B": TopicDeletion(10, (2,))}
    io.broken = False
    add(topics, "C")
    again = loaded(paths)
    assert again.names() == ["A", "B", "C"]
    assert again.deletions == {"B": TopicDeletion(10, (2,))}


def test_topics_deletions_are_in_their_own_file(paths: StorePaths) -> None:
    topics = loaded(paths)
    add(topics, "A", "B", "C")
    topics.delete("B", 77, [0, 3])
    topics.delete("C", 78, [0, 0])
    topics.save(1)
    assert not paths.topics_journal.exists()
    written = json.loads(paths.topics.read_text())
    assert set(written) == {"dataVersion", "topicConfigTable"}
    assert list(written["topicConfigTable"]) == ["A"]
    kept = json.loads(paths.deleted_topics.read_text())
    # A topic without messages needs no entry.
    assert kept == {"deletedTopicTable": {"B": {"physicalOffset": 77, "nextOffsets": [0, 3]}}}
    again = loaded(paths)
    assert (again.names(), again.deletions) == (["A"], {"B": TopicDeletion(77, (0, 3))})


def test_topics_recreated_topic_keeps_its_deletion(paths: StorePaths) -> None:
    topics = loaded(paths)
    add(topics, "A")
    topics.delete("A", 50, [4])
    add(topics, "A", queues=2)
    for again in (loaded(paths), topics):
        again.save(1)
        found = loaded(paths)
        assert (found.names(), found.deletions) == (["A"], {"A": TopicDeletion(50, (4,))})


def test_topics_without_deletions_has_no_deletions_file(paths: StorePaths) -> None:
    topics = loaded(paths)
    add(topics, "A")
    topics.save(1)
    assert not paths.deleted_topics.exists()


def test_topics_forget_deletions_of_expired_records(paths: StorePaths) -> None:
    topics = loaded(paths)
    add(topics, "A", "B", "C")
    for position, name in enumerate("ABC", 100):
        topics.delete(name, position, [1])
    add(topics, "A")
    assert topics.forget_deletions(101)
    assert set(topics.deletions) == {"A", "C"}  # A was recreated: its offsets continue
    assert not topics.forget_deletions(101)
    topics.save(1)
    assert set(loaded(paths).deletions) == {"A", "C"}


@pytest.mark.parametrize(
    "text", ["[", '{"deletedTopicTable": {"A": {"physicalOffset": -1, "nextOffsets": []}}}', "[1]"]
)
def test_load_deletions_unreadable_file_raises(paths: StorePaths, text: str) -> None:
    paths.config.mkdir()
    paths.deleted_topics.write_text(text)
    with pytest.raises(CorruptStoreError, match=r"deletedTopics\.json"):
        load_deletions(StoreIO(), paths)


# Saving


@pytest.mark.parametrize("step", ["rename topics.json", "rename deletedTopics.json", "unlink topics.journal"])
def test_topics_save_failing_at_any_step_loses_nothing(paths: StorePaths, step: str) -> None:
    """A failed save leaves the same files as a kill at this step."""
    io = FailingIO(step)
    topics = loaded(paths, io)
    add(topics, "A", "B", "C")
    topics.save(1)
    topics.delete("B", 60, [8])
    topics.delete("C", 60, [9])
    topics.add("C", 2)
    topics.note("C")  # created by a send: not committed
    io.broken = True
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        topics.save(2)
    expected = (["A", "C"], {"B": TopicDeletion(60, (8,)), "C": TopicDeletion(60, (9,))})
    found = loaded(paths)
    assert (found.names(), found.deletions) == expected
    # The next save succeeds.
    io.broken = False
    topics.save(3)
    assert not paths.topics_journal.exists()
    found = loaded(paths)
    assert (found.names(), found.deletions) == expected


def test_topics_save_syncs_unlink_of_journal(paths: StorePaths) -> None:
    """Otherwise the journal could reappear after a power loss and undo changes."""
    calls: list[str] = []

    class RecordingIO(StoreIO):
        def unlink(self, path: Path) -> None:
            calls.append(f"unlink {path.name}")
            super().unlink(path)

        def sync_folder(self, folder: Path) -> None:
            calls.append(f"sync {folder.name}")
            super().sync_folder(folder)

    topics = loaded(paths, RecordingIO())
    add(topics, "A")
    topics.save(1)
    assert calls[-2:] == ["unlink topics.journal", "sync mqproc"]


# Unusable file


def test_topics_save_unusable_file_does_not_replace_copy(paths: StorePaths) -> None:
    """A kill between the two renames would leave no usable file."""
    paths.config.mkdir()
    copy = paths.topics.with_name("topics.json.bak")
    for path, table in ((paths.topics, [1]), (copy, {"A": {"writeQueueNums": 3}})):
        path.write_text(json.dumps({"topicConfigTable": table}))
    io = FailingIO("rename topics.json")
    topics = loaded(paths, io)
    add(topics, "B")
    io.broken = True
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        topics.save(1)
    assert loaded(paths).names() == ["A", "B"]
    io.broken = False
    topics.save(2)
    topics.save(3)
    assert [json.loads(path.read_text())["dataVersion"]["counter"] for path in (paths.topics, copy)] == [3, 2]


# Invalid queue counts


@pytest.mark.parametrize("field_name", ["readQueueNums", "writeQueueNums"])
def test_topics_queue_count_above_limit_is_ignored(paths: StorePaths, field_name: str) -> None:
    """A start must not fill the queue table with such queues."""
    counts = {"A": 65_536, "B": 65_535}
    paths.config.mkdir()
    paths.topics.write_text(json.dumps({"topicConfigTable": {name: {field_name: counts[name]} for name in counts}}))
    found = loaded(paths)
    assert {name: config.queues for name in counts if (config := found.get(name))} == {"A": 1, "B": 65_535}
    assert found.remark == "topic 'A': 65,536 queues; a topic has 65,535 at most"
