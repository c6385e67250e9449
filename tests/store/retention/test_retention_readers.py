"""Readers while retention deletes: they finish, or learn the new minimum; and they keep no deleted file's space."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mqproc.layout import control as words_of
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue import table as queue_table
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.cooperative import finish
from mqproc.store.dispatch import Dispatch
from mqproc.store.index.files import IndexFiles
from mqproc.store.read import by_time as by_time
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import QueueBounds, Queues, WordsView
from mqproc.types import PullStatus
from tests.open_files import open_below
from tests.store.retention.retaining import OLD, SEGMENT, YOUNG, Aged


class Meanwhile:
    """Queues that let something happen right after a bound was told for the first time."""

    def __init__(self, queues: Queues, happens: Callable[[], None]) -> None:
        self._queues = queues
        self._happens: Callable[[], None] | None = happens

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        found = self._queues.bounds(topic, queue_id)
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()
        return found

    def ids(self, topic: str) -> list[int]:
        return self._queues.ids(topic)

    def topics(self) -> list[str]:
        return self._queues.topics()


@pytest.fixture
def store(tmp_path: Path) -> Aged:
    """21 old records and 4 young ones of a queue: three of its files go."""
    store = Aged(tmp_path, delete_file_batch_max=100)
    store.fill(21, OLD)
    store.fill(4, YOUNG)
    return store


def reading_while(store: Aged, happens: Callable[[], None]) -> StoreQueries:
    view = WordsView(store.words, store.table, sync_flush=False)
    queues = Meanwhile(view.queues, happens)
    view_while = SimpleNamespace(queues=queues, visible=view.visible, newest_index_ms=view.newest_index_ms)
    return StoreQueries(store.io, store.paths, store.options, view_while)


def deleted_in_use(store: Aged) -> list[str]:
    """Deleted files of the store that this process has open or mapped."""
    root = str(store.paths.root)
    maps = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if root in line]
    found = [*open_below(store.paths.root), *(name for name in maps if name.startswith(root))]
    return [name for name in found if name.strip().endswith("(deleted)")]


@pytest.mark.parametrize("offset", [0, 5, 14, 20])
def test_a_pull_that_retention_overtakes_learns_the_new_minimum(store: Aged, offset: int) -> None:
    reading = reading_while(store, store.pass_by)
    pulled = reading.pull("T", 0, offset, 10, 1 << 20)
    assert (pulled.status, pulled.next_offset, pulled.min_offset) == (PullStatus.OFFSET_TOO_SMALL, 21, 21)
    assert reading.pull("T", 0, pulled.next_offset, 10, 1 << 20).count == 4
    reading.close()


def test_a_pull_of_what_is_kept_does_not_notice(store: Aged) -> None:
    reading = reading_while(store, store.pass_by)
    pulled = reading.pull("T", 0, 21, 10, 1 << 20)
    assert (pulled.status, pulled.count) == (PullStatus.FOUND, 4)
    reading.close()


def test_a_reader_that_is_in_a_segment_finishes(store: Aged) -> None:
    reading = store.reading()
    before = reading.pull("T", 0, 0, 3, 1 << 20)
    view = reading.segments.view(0)
    store.pass_by()
    reading.close_deleted(reading_deletions(store))
    # The minimum has moved and the file is gone, but whoever holds its map reads on.
    assert not store.engine.segments.path(0).exists()
    assert np.array_equal(view[: len(before.records) // 3], before.records[: len(before.records) // 3])
    del view
    assert deleted_in_use(store) == []
    reading.close()


def reading_deletions(store: Aged) -> object:
    return WordsView(store.words, store.table, sync_flush=False).deletions()


@pytest.mark.parametrize("upper", [False, True])
def test_a_search_by_time_that_retention_overtakes_is_done_again(store: Aged, upper: bool) -> None:
    reading = reading_while(store, store.pass_by)
    assert reading.offset_at("T", 0, 0, upper=upper) == 21
    reading.close()


def test_a_long_count_goes_on_at_the_new_minimum(store: Aged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_time, "SLICE_UNITS", 2)
    reading = store.reading()
    counting = reading.count("T", born_time=True)
    for _ in range(3):
        next(counting)
    reading.files.close()
    store.pass_by()
    # Six were counted before; of the others those are left that retention kept.
    assert finish(counting) == 6 + 4
    reading.close()


@pytest.mark.parametrize("slice_units", [2, 65_536])
def test_a_range_that_retention_overtakes_gives_what_is_left(
    store: Aged, monkeypatch: pytest.MonkeyPatch, slice_units: int
) -> None:
    monkeypatch.setattr(by_time, "SLICE_UNITS", slice_units)
    reading = reading_while(store, store.pass_by)
    count, cursor, complete = 0, (), False
    while not complete:
        asked = reading.range("T", 0, 1 << 60, born_time=True, cursor=cursor, max_messages=100, max_bytes=1 << 20)
        batch = finish(asked)
        count, cursor, complete = count + batch.count, batch.cursor, batch.complete
    assert count == 4
    reading.close()


def test_a_reader_lets_go_of_all_that_was_deleted(store: Aged) -> None:
    reading = store.reading()
    reading.pull("T", 0, 0, 25, 1 << 20)
    finish(reading.by_key("T", "nothing", max_messages=10, max_bytes=1 << 20))
    store.pass_by()
    assert len(deleted_in_use(store)) > 20
    reading.close_deleted(reading_deletions(store))
    assert deleted_in_use(store) == []
    assert reading.pull("T", 0, 21, 25, 1 << 20).count == 4
    reading.close()


@pytest.mark.parametrize("made_again", [False, True])
def test_files_of_a_deleted_topic_are_let_go_of(store: Aged, made_again: bool) -> None:
    reading = store.reading()
    queues = ConsumeQueueFiles(store.io, store.paths.consume_queue, store.options.consume_queue_file_bytes, write=True)
    index = IndexFiles(store.io, store.paths.index, store.options.max_hash_slot_num, store.options.max_index_num)
    segments = LogSegments(store.io, store.paths.commit_log, SEGMENT, mapped_max=50)
    dispatch = Dispatch(store.io, store.options, store.table, segments, queues, index)
    number = store.table.find("T", 0)
    reading.pull("T", 0, 0, 25, 1 << 20)
    queues.read_units("T", 0, 0, 25, store.table.generation(number))
    before = reading_deletions(store)
    store.table.delete_queue(number)
    shutil.rmtree(store.paths.consume_queue / "T")
    if made_again:
        store.table.create_queue("T", 0)
    assert reading_deletions(store) != before
    assert deleted_in_use(store)
    reading.close_deleted(reading_deletions(store))
    dispatch.close_deleted(store.words[words_of.MIN_PHYSICAL_OFFSET])
    assert deleted_in_use(store) == []
    reading.close()
    dispatch.close()
    segments.close()


def test_a_deletion_is_seen_again_when_it_is_done(store: Aged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks while a queue is being deleted finds it there, and must look once more."""
    amid: list[object] = []
    store_state = queue_table.store_release

    def look(*asked: Any) -> None:
        amid.append(reading_deletions(store))
        store_state(*asked)

    monkeypatch.setattr(queue_table, "store_release", look)
    store.table.delete_queue(store.table.find("T", 0))
    assert len(amid) == 1
    assert reading_deletions(store) != amid[0]


def test_the_dispatcher_lets_go_too(store: Aged) -> None:
    io, options, paths = store.io, store.options, store.paths
    segments = LogSegments(io, paths.commit_log, SEGMENT, mapped_max=50)
    queues = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, write=True)
    index = IndexFiles(io, paths.index, options.max_hash_slot_num, options.max_index_num)
    dispatch = Dispatch(io, options, store.table, segments, queues, index)
    for number in range(25):
        segments.view(number * SEGMENT)
        queues.read_units("T", 0, number, 1, store.table.generation(0))
    store.pass_by()
    assert len(deleted_in_use(store)) > 20
    dispatch.close_deleted(store.words[words_of.MIN_PHYSICAL_OFFSET])
    assert deleted_in_use(store) == []
    # It goes on writing where the queue stands.
    assert queues.read_units("T", 0, 24, 1, store.table.generation(0))
    dispatch.close()
    segments.close()
