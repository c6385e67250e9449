"""Readers during retention: they finish or get the new minimum, and release deleted files."""

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
from mqproc.store.read import by_time
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import QueueBounds, Queues, WordsView
from mqproc.types import PullStatus
from tests.support.processes import open_below
from tests.support.store_builders import AGED_SEGMENT, OLD, YOUNG, AgedStore


class InterruptedQueues:
    """Queues that call `action` once, right after the first call of `bounds`."""

    def __init__(self, queues: Queues, action: Callable[[], None]) -> None:
        self._queues = queues
        self._action: Callable[[], None] | None = action

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        found = self._queues.bounds(topic, queue_id)
        action, self._action = self._action, None
        if action is not None:
            action()
        return found

    def ids(self, topic: str) -> list[int]:
        return self._queues.ids(topic)

    def topics(self) -> list[str]:
        return self._queues.topics()


@pytest.fixture
def store(tmp_path: Path) -> AgedStore:
    """Build a queue of 21 old and 4 young records; three of its files expire."""
    store = AgedStore(tmp_path, delete_file_batch_max=100)
    store.fill(21, OLD)
    store.fill(4, YOUNG)
    return store


def interrupted_reads(store: AgedStore, action: Callable[[], None]) -> StoreQueries:
    view = WordsView(store.words, store.table, sync_flush=False)
    queues = InterruptedQueues(view.queues, action)
    view_while = SimpleNamespace(
        queues=queues,
        visible=view.visible,
        newest_index_ms=view.newest_index_ms,
        time_ordered_from=view.time_ordered_from,
    )
    return StoreQueries(store.io, store.paths, store.options, view_while)


def deleted_in_use(store: AgedStore) -> list[str]:
    """Return the deleted files of the store that this process has open or mapped."""
    root = str(store.paths.root)
    maps = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if root in line]
    found = [*open_below(store.paths.root), *(name for name in maps if name.startswith(root))]
    return [name for name in found if name.strip().endswith("(deleted)")]


@pytest.mark.parametrize("offset", [0, 5, 14, 20])
def test_pull_overtaken_by_retention_returns_new_minimum(store: AgedStore, offset: int) -> None:
    reading = interrupted_reads(store, store.run_passes)
    pulled = reading.pull("T", 0, offset, 10, 1 << 20)
    assert (pulled.status, pulled.next_offset, pulled.min_offset) == (PullStatus.OFFSET_TOO_SMALL, 21, 21)
    assert reading.pull("T", 0, pulled.next_offset, 10, 1 << 20).count == 4
    reading.close()


def test_pull_of_kept_messages_is_unaffected_by_retention(store: AgedStore) -> None:
    reading = interrupted_reads(store, store.run_passes)
    pulled = reading.pull("T", 0, 21, 10, 1 << 20)
    assert (pulled.status, pulled.count) == (PullStatus.FOUND, 4)
    reading.close()


def test_reader_with_deleted_segment_mapped_can_finish(store: AgedStore) -> None:
    reading = store.open_queries()
    before = reading.pull("T", 0, 0, 3, 1 << 20)
    view = reading.segments.view(0)
    store.run_passes()
    reading.close_deleted(current_deletions(store))
    # The file is deleted, but its mapping remains readable.
    assert not store.engine.segments.path(0).exists()
    assert np.array_equal(view[: len(before.records) // 3], before.records[: len(before.records) // 3])
    del view
    assert deleted_in_use(store) == []
    reading.close()


def current_deletions(store: AgedStore) -> object:
    return WordsView(store.words, store.table, sync_flush=False).deletions()


@pytest.mark.parametrize("upper", [False, True])
def test_search_by_time_overtaken_by_retention_is_repeated(store: AgedStore, upper: bool) -> None:
    reading = interrupted_reads(store, store.run_passes)
    assert finish(reading.offset_at("T", 0, 0, upper=upper)) == 21
    reading.close()


def test_count_overtaken_by_retention_continues_at_new_minimum(
    store: AgedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_time, "SLICE_UNITS", 2)
    reading = store.open_queries()
    counting = reading.count("T", born_time=True)
    for _ in range(3):
        next(counting)
    reading.files.close()
    store.run_passes()
    # Six were counted before the deletion, and the remaining four after it.
    assert finish(counting) == 6 + 4
    reading.close()


@pytest.mark.parametrize("slice_units", [2, 65_536])
def test_range_overtaken_by_retention_returns_the_rest(
    store: AgedStore, monkeypatch: pytest.MonkeyPatch, slice_units: int
) -> None:
    monkeypatch.setattr(by_time, "SLICE_UNITS", slice_units)
    reading = interrupted_reads(store, store.run_passes)
    count, cursor, complete = 0, (), False
    while not complete:
        slices = reading.range("T", 0, 1 << 60, born_time=True, cursor=cursor, max_messages=100, max_bytes=1 << 20)
        batch = finish(slices)
        count, cursor, complete = count + batch.count, batch.cursor, batch.complete
    assert count == 4
    reading.close()


def test_reader_close_deleted_releases_deleted_files(store: AgedStore) -> None:
    reading = store.open_queries()
    reading.pull("T", 0, 0, 25, 1 << 20)
    finish(reading.by_key("T", "nothing", max_messages=10, max_bytes=1 << 20))
    store.run_passes()
    assert len(deleted_in_use(store)) > 20
    reading.close_deleted(current_deletions(store))
    assert deleted_in_use(store) == []
    assert reading.pull("T", 0, 21, 25, 1 << 20).count == 4
    reading.close()


@pytest.mark.parametrize("made_again", [False, True])
def test_close_deleted_releases_files_of_deleted_topic(store: AgedStore, made_again: bool) -> None:
    reading = store.open_queries()
    queues = ConsumeQueueFiles(store.io, store.paths.consume_queue, store.options.consume_queue_file_bytes, write=True)
    index = IndexFiles(store.io, store.paths.index, store.options.max_hash_slot_num, store.options.max_index_num)
    segments = LogSegments(store.io, store.paths.commit_log, AGED_SEGMENT, mapped_max=50)
    dispatch = Dispatch(store.io, store.options, store.table, segments, queues, index)
    number = store.table.find("T", 0)
    reading.pull("T", 0, 0, 25, 1 << 20)
    queues.read_units("T", 0, 0, 25, store.table.generation(number))
    before = current_deletions(store)
    store.table.delete_queue(number)
    shutil.rmtree(store.paths.consume_queue / "T")
    if made_again:
        store.table.create_queue("T", 0)
    assert current_deletions(store) != before
    assert deleted_in_use(store)
    reading.close_deleted(current_deletions(store))
    dispatch.close_deleted(store.words[words_of.MIN_PHYSICAL_OFFSET])
    assert deleted_in_use(store) == []
    reading.close()
    dispatch.close()
    segments.close()


def test_deletions_change_again_when_a_deletion_completes(store: AgedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that inspects a queue during its deletion still sees it, and must look again."""
    during: list[object] = []
    store_state = queue_table.store_release

    def observe(*arguments: Any) -> None:
        during.append(current_deletions(store))
        store_state(*arguments)

    monkeypatch.setattr(queue_table, "store_release", observe)
    store.table.delete_queue(store.table.find("T", 0))
    assert len(during) == 1
    assert current_deletions(store) != during[0]


def test_dispatch_close_deleted_releases_deleted_files(store: AgedStore) -> None:
    io, options, paths = store.io, store.options, store.paths
    segments = LogSegments(io, paths.commit_log, AGED_SEGMENT, mapped_max=50)
    queues = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, write=True)
    index = IndexFiles(io, paths.index, options.max_hash_slot_num, options.max_index_num)
    dispatch = Dispatch(io, options, store.table, segments, queues, index)
    for number in range(25):
        segments.view(number * AGED_SEGMENT)
        queues.read_units("T", 0, number, 1, store.table.generation(0))
    store.run_passes()
    assert len(deleted_in_use(store)) > 20
    dispatch.close_deleted(store.words[words_of.MIN_PHYSICAL_OFFSET])
    assert deleted_in_use(store) == []
    # The last file of the queue remains usable.
    assert queues.read_units("T", 0, 24, 1, store.table.generation(0))
    dispatch.close()
    segments.close()
