"""topics.json, its journal and deletedTopics.json: what is durable when, and what is read after any kind of stop.

A power loss is played by leaving out or zeroing pages that were not synced, or bringing back an unlinked name.
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
from mqproc.store import topics as deleted_topics
from mqproc.store.topics import TopicDeletion, Topics
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
    """Make topics, durable in the journal."""
    for name in names:
        topics.add(name, queues)
        topics.note(name)
    topics.commit()


class FailingIO(StoreIO):
    """Fails calls of the named kinds once `broken` says so."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.broken = False

    def _try(self, kind: str) -> None:
        if self.broken and kind in self.kinds:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._try("pwrite")
        super().pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._try("sync")
        super().sync(fd)

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None:
        self._try(f"rename {target.name}")
        super().rename(source, target, between)

    def unlink(self, path: Path) -> None:
        self._try(f"unlink {path.name}")
        super().unlink(path)


# The journal


def test_changes_are_read_from_the_journal(paths: StorePaths) -> None:
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


def test_a_change_is_written_before_it_is_durable(paths: StorePaths) -> None:
    """A kill leaves it; a later commit makes it durable with its own, each line once."""
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


def test_a_journal_of_an_earlier_version_is_read(paths: StorePaths) -> None:
    paths.topics_journal.write_bytes(b'["A",4,6]\n["B",4,6]\n["A",0,0]\n')
    topics = loaded(paths)
    assert topics.names() == ["B"]
    assert topics.deletions == {}


@pytest.mark.parametrize("page", [0, 1, 2, 3])
def test_behind_a_page_that_was_lost_no_line_is_taken(paths: StorePaths, page: int) -> None:
    """Of the pages of one commit, which was never acknowledged, the power loss left out one."""
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
def test_the_next_commit_cuts_off_what_was_torn(paths: StorePaths, tail: bytes) -> None:
    """Also a whole line behind the bad one, where a shorter line in its place would uncover it."""
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


def test_a_commit_that_failed_half_way_is_written_again(paths: StorePaths) -> None:
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


def test_a_deletion_that_cannot_be_made_durable_changes_nothing(paths: StorePaths) -> None:
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


def test_deletions_are_kept_beside_topics_json_which_stays_rocketmqs(paths: StorePaths) -> None:
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
    # Of a topic that never had a message nothing need be known.
    assert kept == {"deletedTopicTable": {"B": {"physicalOffset": 77, "nextOffsets": [0, 3]}}}
    again = loaded(paths)
    assert (again.names(), again.deletions) == (["A"], {"B": TopicDeletion(77, (0, 3))})


def test_a_topic_made_again_keeps_the_memory_of_its_deletion(paths: StorePaths) -> None:
    topics = loaded(paths)
    add(topics, "A")
    topics.delete("A", 50, [4])
    add(topics, "A", queues=2)
    for again in (loaded(paths), topics):
        again.save(1)
        found = loaded(paths)
        assert (found.names(), found.deletions) == (["A"], {"A": TopicDeletion(50, (4,))})


def test_without_deletions_there_is_no_such_file(paths: StorePaths) -> None:
    topics = loaded(paths)
    add(topics, "A")
    topics.save(1)
    assert not paths.deleted_topics.exists()


def test_deletions_are_forgotten_with_the_last_of_their_records(paths: StorePaths) -> None:
    topics = loaded(paths)
    add(topics, "A", "B", "C")
    for position, name in enumerate("ABC", 100):
        topics.delete(name, position, [1])
    add(topics, "A")
    assert topics.forget_deletions(101)
    assert set(topics.deletions) == {"A", "C"}  # A is there again: its offsets go on
    assert not topics.forget_deletions(101)
    topics.save(1)
    assert set(loaded(paths).deletions) == {"A", "C"}


@pytest.mark.parametrize(
    "text", ["[", '{"deletedTopicTable": {"A": {"physicalOffset": -1, "nextOffsets": []}}}', "[1]"]
)
def test_a_file_of_deletions_that_cannot_be_read_is_not_passed_over(paths: StorePaths, text: str) -> None:
    paths.config.mkdir()
    paths.deleted_topics.write_text(text)
    with pytest.raises(CorruptStoreError, match=r"deletedTopics\.json"):
        deleted_topics.load_deletions(StoreIO(), paths)


# Saving


@pytest.mark.parametrize("step", ["rename topics.json", "rename deletedTopics.json", "unlink topics.journal"])
def test_a_save_that_ends_anywhere_loses_nothing(paths: StorePaths, step: str) -> None:
    """What the failed save has left is what a kill at this place would leave."""
    io = FailingIO(step)
    topics = loaded(paths, io)
    add(topics, "A", "B", "C")
    topics.save(1)
    topics.delete("B", 60, [8])
    topics.delete("C", 60, [9])
    topics.add("C", 2)
    topics.note("C")  # made by a send: not committed
    io.broken = True
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        topics.save(2)
    expected = (["A", "C"], {"B": TopicDeletion(60, (8,)), "C": TopicDeletion(60, (9,))})
    found = loaded(paths)
    assert (found.names(), found.deletions) == expected
    # Tried again it goes well.
    io.broken = False
    topics.save(3)
    assert not paths.topics_journal.exists()
    found = loaded(paths)
    assert (found.names(), found.deletions) == expected


def test_an_unlinked_journal_is_gone_for_good_before_the_files_change_again(paths: StorePaths) -> None:
    """Else it could come back after a power loss and undo what they say."""
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


# A file that cannot be used


def test_a_file_that_cannot_be_used_does_not_replace_its_copy(paths: StorePaths) -> None:
    """A kill between the two would have left none that can."""
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


# Numbers that no topic has


@pytest.mark.parametrize("field_name", ["readQueueNums", "writeQueueNums"])
def test_more_queues_than_a_topic_has_count_for_none(paths: StorePaths, field_name: str) -> None:
    """A start made queues until the table was full, and ended with an error that named no file."""
    counts = {"A": 65_536, "B": 65_535}
    paths.config.mkdir()
    paths.topics.write_text(json.dumps({"topicConfigTable": {name: {field_name: counts[name]} for name in counts}}))
    found = loaded(paths)
    assert {name: config.queues for name in counts if (config := found.get(name))} == {"A": 1, "B": 65_535}
    assert found.remark == "topic 'A': 65,536 queues; a topic has 65,535 at most"
