"""The flush cadence of ConsumeQueues and index, seen through StoreIO's calls.

One dirty page is not synced by the pass of each second but at the forced minute; two pages are; three thorough passes
at stop; a filled index file at once. The roles run here step by step with a clock that the test moves.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqproc.config import PAGE_BYTES, Options
from mqproc.control import Control
from mqproc.io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.index_file import ITEM_SIZE
from mqproc.paths import StorePaths
from mqproc.process.cq_flusher import CqFlusher
from mqproc.process.index_flusher import IndexFlusher
from mqproc.process.loop import Heart, RoleContext
from mqproc.shm.bell import EventBell
from mqproc.store.recovery import Recovery
from tests.shm.manual_clock import ManualClock


class TracingIO(StoreIO):
    """Writes down which files below the store were synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def sync(self, fd: int) -> None:
        self.synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        super().sync(fd)

    def sync_file_system(self, fd: int) -> None:
        self.synced.append("file system")
        super().sync_file_system(fd)

    def taken(self, folder: str) -> int:
        """How many files of a folder were synced since the last question."""
        count = sum(f"/{folder}/" in path or path == "file system" for path in self.synced)
        self.synced.clear()
        return count


class Rig:
    """A recovered store, its words, a clock by hand, and what a role is given."""

    def __init__(self, root: Path) -> None:
        self.io = TracingIO()
        self.clock = ManualClock()
        self.paths = StorePaths(root)
        self.io.make_folder(self.paths.own, 0o700)
        self.control = Control.create(self.io, self.paths, self.clock, os.getpid())
        self.options = Options(mapped_file_size_commit_log=1 << 20, max_hash_slot_num=100, max_index_num=2000)
        Recovery(self.io, self.paths, self.options, self.control.words, lambda line: None, clean=True).run()
        self.bells = {
            role: EventBell(self.control.cells, words_of.role_word(role, "sleeping")) for role in words_of.ROLES
        }

    def context(self, role: str) -> RoleContext:
        heart = Heart(self.control, role, self.clock)
        return RoleContext(role, self.paths, self.options, self.control, self.io, self.clock, self.bells, {}, 1, heart)

    def dispatch(self, messages: int) -> None:
        """Store and dispatch messages of one queue by the engine, as the writer and the dispatcher would."""
        from tests.process.dispatching import append_and_dispatch

        append_and_dispatch(self.io, self.paths, self.options, self.control.words, messages)

    def pass_seconds(self, seconds: float) -> None:
        self.clock.advance(int(seconds * 1000))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


UNITS_OF_TWO_PAGES = 2 * PAGE_BYTES // UNIT_SIZE + 1


def test_one_dirty_page_waits_for_the_forced_minute(rig: Rig) -> None:
    flusher = CqFlusher(rig.context(words_of.CQ_FLUSHER))
    rig.dispatch(UNITS_OF_TWO_PAGES)
    rig.pass_seconds(1)
    flusher.do_work()
    assert rig.io.taken("consumequeue") == 1
    rig.dispatch(10)
    for second in range(58):
        rig.pass_seconds(1)
        flusher.do_work()
        assert rig.io.taken("consumequeue") == 0, f"second {second}"
    rig.pass_seconds(2)
    flusher.do_work()
    assert rig.io.taken("consumequeue") == 1
    assert rig.control.load(words_of.CQ_FORCED_PASSES) == 1
    assert rig.control.load(words_of.CQ_SYNCED) == rig.control.load(words_of.DISPATCHED)


def test_two_dirty_pages_are_synced_by_the_next_second(rig: Rig) -> None:
    flusher = CqFlusher(rig.context(words_of.CQ_FLUSHER))
    for _ in range(3):
        rig.dispatch(UNITS_OF_TWO_PAGES)
        flusher.do_work()
        assert rig.io.taken("consumequeue") == 0
        rig.pass_seconds(1)
        flusher.do_work()
        assert rig.io.taken("consumequeue") == 1


def test_three_thorough_passes_at_stop(rig: Rig) -> None:
    flusher = CqFlusher(rig.context(words_of.CQ_FLUSHER))
    rig.dispatch(3)
    passes = 0
    done = False
    while not done:
        done = flusher.on_stop()
        passes += 1
    assert passes == 3
    assert rig.io.taken("consumequeue") == 1
    assert rig.control.load(words_of.CQ_FORCED_PASSES) == 3
    assert rig.control.load(words_of.CQ_SYNCED) == rig.control.load(words_of.DISPATCHED)


def test_the_index_goes_by_the_same_cadence(rig: Rig) -> None:
    flusher = IndexFlusher(rig.context(words_of.INDEX_FLUSHER))
    items_of_two_pages = 2 * PAGE_BYTES // ITEM_SIZE + 1
    rig.dispatch(items_of_two_pages)
    rig.pass_seconds(1)
    flusher.do_work()
    assert rig.io.taken("index") == 1
    rig.dispatch(3)
    rig.pass_seconds(1)
    flusher.do_work()
    assert rig.io.taken("index") == 0
    rig.pass_seconds(60)
    flusher.do_work()
    assert rig.io.taken("index") == 1


def test_a_filled_index_file_is_forced_at_once(rig: Rig) -> None:
    flusher = IndexFlusher(rig.context(words_of.INDEX_FLUSHER))
    rig.dispatch(2500)
    assert flusher.do_work() > 0
    assert rig.io.taken("index") == 2
    assert rig.control.load(words_of.INDEX_SYNCED) == rig.control.load(words_of.DISPATCHED)
