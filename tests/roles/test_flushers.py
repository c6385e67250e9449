"""The flush cadence of ConsumeQueues and index, seen through StoreIO's calls.

One dirty page is not synced by the pass of each second but at the forced minute; two pages are; three thorough passes
at stop; a filled index file at once. The roles run here step by step with a clock that the test moves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout import index_file
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.index_file import ITEM_SIZE
from mqproc.paths import index_name, segment_name
from mqproc.roles import flushers as flushers_module
from mqproc.roles.flushers import CommitLogFlusher, IndexPages, QueuePages, cq_flusher, drop_range, index_flusher
from mqproc.store.commitlog import flush as flush_module
from mqproc.store.consumequeue.table import QueueTable
from mqproc.util.units import LARGE_PAGE_BYTES, PAGE_BYTES
from tests.roles.rigs import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


UNITS_OF_TWO_PAGES = 2 * PAGE_BYTES // UNIT_SIZE + 1


def test_flush_one_dirty_page_waits_for_the_forced_interval(rig: Rig) -> None:
    flusher = cq_flusher(rig.context(words_of.CQ_FLUSHER))
    rig.dispatch(UNITS_OF_TWO_PAGES)
    rig.pass_seconds(1)
    flusher.do_work()
    assert rig.taken("consumequeue") == 1
    rig.dispatch(10)
    for second in range(58):
        rig.pass_seconds(1)
        flusher.do_work()
        assert rig.taken("consumequeue") == 0, f"second {second}"
    rig.pass_seconds(2)
    flusher.do_work()
    assert rig.taken("consumequeue") == 1
    assert rig.control.load(words_of.CQ_FORCED_PASSES) == 1
    assert rig.control.load(words_of.CQ_SYNCED) == rig.control.load(words_of.DISPATCHED)


def test_flush_two_dirty_pages_are_synced_within_a_second(rig: Rig) -> None:
    flusher = cq_flusher(rig.context(words_of.CQ_FLUSHER))
    for _ in range(3):
        rig.dispatch(UNITS_OF_TWO_PAGES)
        flusher.do_work()
        assert rig.taken("consumequeue") == 0
        rig.pass_seconds(1)
        flusher.do_work()
        assert rig.taken("consumequeue") == 1


def test_flush_at_stop_makes_three_thorough_passes(rig: Rig) -> None:
    flusher = cq_flusher(rig.context(words_of.CQ_FLUSHER))
    rig.dispatch(3)
    passes = 0
    done = False
    while not done:
        done = flusher.on_stop()
        passes += 1
    assert passes == 3
    assert rig.taken("consumequeue") == 1
    assert rig.control.load(words_of.CQ_FORCED_PASSES) == 3
    assert rig.control.load(words_of.CQ_SYNCED) == rig.control.load(words_of.DISPATCHED)


def test_index_flush_uses_the_same_intervals(rig: Rig) -> None:
    flusher = index_flusher(rig.context(words_of.INDEX_FLUSHER))
    items_of_two_pages = 2 * PAGE_BYTES // ITEM_SIZE + 1
    rig.dispatch(items_of_two_pages)
    rig.pass_seconds(1)
    flusher.do_work()
    assert rig.taken("index") == 1
    rig.dispatch(3)
    rig.pass_seconds(1)
    flusher.do_work()
    assert rig.taken("index") == 0
    rig.pass_seconds(60)
    flusher.do_work()
    assert rig.taken("index") == 1


def test_index_flush_full_file_is_forced_at_once(rig: Rig) -> None:
    flusher = index_flusher(rig.context(words_of.INDEX_FLUSHER))
    rig.dispatch(2500)
    assert flusher.do_work() > 0
    assert rig.taken("index") == 2
    assert rig.control.load(words_of.INDEX_SYNCED) == rig.control.load(words_of.DISPATCHED)


def test_log_flush_interval_can_change_while_running(rig: Rig) -> None:
    flusher = CommitLogFlusher(rig.context(words_of.COMMITLOG_FLUSHER))
    passes = words_of.COMMITLOG_PASSES
    flusher.do_work()
    rig.pass_seconds(0.2)
    flusher.do_work()
    assert rig.control.load(passes) == 1
    flusher.reload(replace(rig.options, flush_interval_commit_log=100))
    flusher.do_work()
    rig.pass_seconds(0.2)
    flusher.do_work()
    assert rig.control.load(passes) == 3


def test_log_flush_busy_log_starts_writeback_between_passes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushers_module, "BUSY_BYTES", 1)
    monkeypatch.setattr(flush_module, "START_BYTES", 4096)
    started: list[int] = []
    monkeypatch.setattr(rig.io, "start_writeback", lambda fd, offset, size: started.append(size))
    flusher = CommitLogFlusher(rig.context(words_of.COMMITLOG_FLUSHER))
    words = rig.control.words

    def write() -> None:
        """More of the log, of which nothing is durable yet."""
        synced = words[words_of.FLUSHER_SYNCED]
        rig.dispatch(400)
        words[words_of.FLUSHER_SYNCED] = synced

    write()
    flusher.do_work()
    assert words[words_of.FLUSHER_SYNCED] == words[words_of.WRITTEN]
    write()
    flusher.do_work()
    assert len(started) == 1
    assert words[words_of.FLUSHER_SYNCED] < words[words_of.WRITTEN]
    rig.pass_seconds(1)
    flusher.do_work()
    assert words[words_of.FLUSHER_SYNCED] == words[words_of.WRITTEN]
    rig.pass_seconds(1)
    flusher.do_work()  # Nothing was written, so it is busy no more.
    write()
    flusher.do_work()
    assert len(started) == 1


# The page cache
# Pages of ConsumeQueue and index files are dropped from the page cache after dispatch.


BEHIND = 1000
FILE_BYTES = 40 * PAGE_BYTES
UNITS_PER_FILE = FILE_BYTES // UNIT_SIZE
SLOTS = 100


class DroppingIO(StoreIO):
    """Records dropped ranges by file name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        self.seen.append((self.path_of(fd).rsplit("/", 1)[-1], offset, size))
        super().drop_cache(fd, offset, size)


@pytest.fixture
def io() -> DroppingIO:
    return DroppingIO()


def test_drop_range_drops_whole_pages_only(tmp_path: Path, io: DroppingIO) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * PAGE_BYTES))
    assert drop_range(io, path, 1, 3 * PAGE_BYTES - 1) == PAGE_BYTES
    assert drop_range(io, path, 1, PAGE_BYTES) == 0
    assert io.seen == [("file", PAGE_BYTES, PAGE_BYTES)]


def test_drop_range_missing_file_is_skipped(tmp_path: Path, io: DroppingIO) -> None:
    assert drop_range(io, tmp_path / "gone", 0, 10 * PAGE_BYTES) == 0


class Queue:
    """A queue with three files, and its pages."""

    def __init__(self, root: Path, io: DroppingIO, behind: int = BEHIND) -> None:
        table = QueueTable.create(io, root / "queues", 8)
        table.create_queue("T", 0)
        folder = root / "consumequeue" / "T" / "0"
        folder.mkdir(parents=True)
        for start in range(3):
            (folder / segment_name(start * FILE_BYTES)).write_bytes(bytes(FILE_BYTES))
        self.pages = QueuePages(io, root / "consumequeue", FILE_BYTES, table, behind)

    def drop(self, dispatched: int, synced: int) -> int:
        return self.pages.drop(dispatched, np.array([synced], np.int64))


def test_queue_pages_are_dropped_far_after_dispatch(tmp_path: Path, io: DroppingIO) -> None:
    queue = Queue(tmp_path, io)
    units = 30 * PAGE_BYTES // UNIT_SIZE
    assert queue.drop(0, 0) == 0
    assert queue.drop(BEHIND - 1, units) == 0
    assert queue.drop(BEHIND, units) == 0, "these units were not dispatched yet at that distance"
    assert queue.drop(2 * BEHIND, units + 1) == 30 * PAGE_BYTES
    assert queue.drop(9 * BEHIND, units + 1) == 0, "each page is dropped once"
    assert io.seen == [(segment_name(0), 0, 30 * PAGE_BYTES)]


def test_queue_pages_of_several_files_are_dropped(tmp_path: Path, io: DroppingIO) -> None:
    queue = Queue(tmp_path, io)
    stop = 2 * UNITS_PER_FILE + 10 * PAGE_BYTES // UNIT_SIZE
    queue.drop(0, 100)
    queue.drop(BEHIND, stop)
    queue.drop(2 * BEHIND, stop)
    assert [name for name, _, _ in io.seen] == [segment_name(start * FILE_BYTES) for start in range(3)]
    first, second, third = ((offset, offset + size) for _, offset, size in io.seen)
    assert first == (PAGE_BYTES, FILE_BYTES), "earlier units are kept"
    assert second[0] < PAGE_BYTES
    assert third[1] <= 10 * PAGE_BYTES


def test_queue_pages_of_few_units_are_kept(tmp_path: Path, io: DroppingIO) -> None:
    queue = Queue(tmp_path, io)
    queue.drop(0, 0)
    queue.drop(BEHIND, 500)
    assert queue.drop(2 * BEHIND, 500) == 0


def test_queue_pages_include_new_queues(tmp_path: Path, io: DroppingIO) -> None:
    queue = Queue(tmp_path, io)
    queue.pages.drop(0, np.zeros(0, np.int64))
    units = 30 * PAGE_BYTES // UNIT_SIZE
    queue.drop(BEHIND, units)
    assert queue.drop(2 * BEHIND, units) > 0


def test_queue_pages_disabled_keeps_all(tmp_path: Path, io: DroppingIO) -> None:
    queue = Queue(tmp_path, io, behind=0)
    for dispatched in range(0, 10**9, 10**8):
        assert queue.drop(dispatched, UNITS_PER_FILE) == 0


def test_index_pages_of_items_are_dropped_but_not_slots(tmp_path: Path, io: DroppingIO) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    times = [1_700_000_000_000, 1_700_000_000_500]
    items = 10_000
    for time_ms in times:
        (folder / index_name(time_ms)).write_bytes(bytes(index_file.file_size(SLOTS, items)))
    (folder / "notes.txt").write_text("mine")
    pages = IndexPages(io, folder, SLOTS, BEHIND)
    assert pages.drop(0, times[0], 1) == 0
    assert pages.drop(BEHIND, times[1], 5000) == 0
    assert pages.drop(2 * BEHIND, times[1], 6000) > 0
    (old, old_at, old_size), (new, new_at, new_size) = io.seen
    assert (old, new) == (index_name(times[0]), index_name(times[1]))
    assert old_at >= index_file.items_start(SLOTS)
    assert old_at + old_size >= index_file.file_size(SLOTS, items)
    assert new_at >= index_file.items_start(SLOTS)
    assert new_at + new_size <= index_file.item_offset(SLOTS, 5000)


def test_index_pages_partial_large_page_is_dropped_later(tmp_path: Path, io: DroppingIO) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    slots, items = 1_000_000, 1_000_000
    with (folder / index_name(1000)).open("wb") as file:
        file.truncate(index_file.file_size(slots, items))
    pages = IndexPages(io, folder, slots, BEHIND)
    first, second, third = 150_000, 450_000, 500_000
    for step, item in enumerate((1, first, second, third, third)):
        pages.drop(step * BEHIND, 1000, item)
    ranges = [(offset, offset + size) for _, offset, size in io.seen]
    begin = index_file.items_start(slots) // PAGE_BYTES * PAGE_BYTES + PAGE_BYTES
    whole = [index_file.item_offset(slots, item) for item in (first, second)]
    assert ranges[0][0] == begin, "the slots are kept"
    assert [offset for offset, _ in ranges[1:]] == [end - end % LARGE_PAGE_BYTES for end in whole]
