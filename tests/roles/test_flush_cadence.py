"""The flush cadence of ConsumeQueues and index, seen through StoreIO's calls.

One dirty page is not synced by the pass of each second but at the forced minute; two pages are; three thorough passes
at stop; a filled index file at once. The roles run here step by step with a clock that the test moves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.index_file import ITEM_SIZE
from mqproc.roles import flushers as commitlog_flusher
from mqproc.roles.flushers import CommitLogFlusher, cq_flusher, index_flusher
from mqproc.store.commitlog import flush as log_flush
from mqproc.util.units import PAGE_BYTES
from tests.roles.flusher_rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


UNITS_OF_TWO_PAGES = 2 * PAGE_BYTES // UNIT_SIZE + 1


def test_one_dirty_page_waits_for_the_forced_minute(rig: Rig) -> None:
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


def test_two_dirty_pages_are_synced_by_the_next_second(rig: Rig) -> None:
    flusher = cq_flusher(rig.context(words_of.CQ_FLUSHER))
    for _ in range(3):
        rig.dispatch(UNITS_OF_TWO_PAGES)
        flusher.do_work()
        assert rig.taken("consumequeue") == 0
        rig.pass_seconds(1)
        flusher.do_work()
        assert rig.taken("consumequeue") == 1


def test_three_thorough_passes_at_stop(rig: Rig) -> None:
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


def test_the_index_goes_by_the_same_cadence(rig: Rig) -> None:
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


def test_a_filled_index_file_is_forced_at_once(rig: Rig) -> None:
    flusher = index_flusher(rig.context(words_of.INDEX_FLUSHER))
    rig.dispatch(2500)
    assert flusher.do_work() > 0
    assert rig.taken("index") == 2
    assert rig.control.load(words_of.INDEX_SYNCED) == rig.control.load(words_of.DISPATCHED)


def test_the_logs_interval_may_change_while_running(rig: Rig) -> None:
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


def test_a_busy_log_is_given_to_the_disk_between_two_passes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitlog_flusher, "BUSY_BYTES", 1)
    monkeypatch.setattr(log_flush, "START_BYTES", 4096)
    started: list[int] = []
    monkeypatch.setattr(rig.io, "start_writing", lambda fd, offset, size: started.append(size))
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
