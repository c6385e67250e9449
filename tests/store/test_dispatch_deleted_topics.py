"""Dispatch while topics are deleted and made again: between steps, in the middle of one, with a dispatcher that dies.

What must come out is what recovery makes of the same log and the same topics from nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.files import ConsumeQueueFiles, remove_tree
from mqproc.store.dispatch import Dispatch
from mqproc.store.index.files import IndexFiles
from tests.store.test_deleted_topics_recovery import QUEUE_FILE_BYTES, Store

CALLS_MAX = 60


class Died(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class InterruptedIO(StoreIO):
    """Lets another process do something, then perhaps kills this one, before the nth storage call of dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.meanwhile: Callable[[], None] = lambda: None
        self.dies = False
        self.interrupted = False

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.interrupted = True
            self.meanwhile()
            if self.dies:
                raise Died

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        self._count()
        return super().open(path, write=write, create=create, mode=mode)

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._count()
        super().pwrite(fd, data, offset)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._count()
        super().allocate(fd, offset, size)

    def set_size(self, fd: int, size: int) -> None:
        self._count()
        super().set_size(fd, size)

    def _make_one_folder(self, folder: Path, mode: int) -> None:
        self._count()
        super()._make_one_folder(folder, mode)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def remove_folder(self, folder: Path) -> None:
        self._count()
        super().remove_folder(folder)

    def crash_point(self, name: str) -> None:
        if name.startswith("dispatch."):
            self._count()


class Live(Store):
    """A writer and a dispatcher at work."""

    def __init__(self, root: Path, *, alone: bool = False) -> None:
        """With `alone` each record is dispatched by itself."""
        super().__init__(root)
        self.io = InterruptedIO()
        self.position = 0
        self.alone = alone
        self.cells = np.zeros(words_of.FILE_SIZE // words_of.WORD_SIZE, np.int64)
        self.start_dispatcher()

    def start_dispatcher(self) -> None:
        """A successor: of its predecessor it knows the position."""
        options = self.engine.options
        files = ConsumeQueueFiles(self.io, self.paths.consume_queue, QUEUE_FILE_BYTES, write=True)
        index = IndexFiles(StoreIO(), self.paths.index, options.max_hash_slot_num, options.max_index_num)
        self.dispatch = Dispatch(self.io, options, self.engine.table, self.engine.segments, files, index)

    def dispatch_up_to(self, stop: int) -> None:
        while self.position < stop:
            end = self.position + int.from_bytes(self.engine.log_bytes(self.position, self.position + 4))
            try:
                if self.alone and self.dispatch.step_single(self.position, end, self.cells):
                    self.position = end
                    continue
                step = self.dispatch.step(self.position, end if self.alone else stop)
            except Died:
                self.start_dispatcher()
                continue
            assert not step.stuck
            self.position = step.position

    def delete_with_files(self, topic: str) -> None:
        self.delete(topic)
        remove_tree(StoreIO(), self.paths.consume_queue / topic)

    def rebuilt(self) -> dict[str, bytes]:
        """The ConsumeQueue files that recovery makes of the log and the topics."""
        other = Store(self.paths.root.with_name("rebuilt"))
        shutil.rmtree(other.paths.root)
        other.paths = StorePaths(other.paths.root)
        self.topics.save(1)
        shutil.copytree(self.paths.commit_log, other.paths.commit_log)
        shutil.copytree(self.paths.config, other.paths.config)
        other.engine.words = self.engine.words
        other.recover(clean=False)
        found = other.files()
        shutil.rmtree(other.paths.root)
        return found


@pytest.fixture(params=["together", "alone"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Live:
    return Live(tmp_path / "store", alone=request.param == "alone")


def test_records_that_wait_for_dispatch_when_their_topic_is_deleted_get_no_units(live: Live) -> None:
    live.append("T", 10)
    live.append("V", 4)
    live.dispatch_up_to(live.append("T", 40)[4])
    assert (live.paths.consume_queue / "T").exists()
    live.delete_with_files("T")
    live.dispatch_up_to(live.engine.written)
    assert {name.split("/")[0] for name in live.files()} == {"V"}
    live.append("T", 6)
    live.dispatch_up_to(live.engine.written)
    assert live.files() == live.rebuilt()
    number = live.engine.table.find("T", 0)
    assert (live.engine.table.min_offset(number), live.engine.table.max_offset(number)) == (25, 28)


def test_records_of_both_lives_in_one_step_are_told_apart(live: Live) -> None:
    live.append("T", 50)
    live.delete_with_files("T")
    live.append("T", 30)
    live.delete_with_files("T")
    live.append("T", 10)
    live.dispatch_up_to(live.engine.written)
    number = live.engine.table.find("T", 1)
    assert (live.engine.table.min_offset(number), live.engine.table.max_offset(number)) == (40, 45)
    assert live.files() == live.rebuilt()


def test_an_open_file_of_a_deleted_queue_is_not_written_to(live: Live) -> None:
    """The queue has its number back, the descriptor that is kept under it has not."""
    live.append("T", 10)
    live.dispatch_up_to(live.engine.written)
    live.delete_with_files("T")
    live.append("T", 10)
    live.dispatch_up_to(live.engine.written)
    assert live.files() == live.rebuilt()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("made_again", [False, True])
@pytest.mark.parametrize("dispatched_before", [False, True])
def test_a_deletion_in_the_middle_of_a_step_leaves_nothing_of_the_queue(
    tmp_path: Path, dies: bool, made_again: bool, dispatched_before: bool, alone: bool
) -> None:
    """At every storage call of a step the writer deletes the topic, removes its files, perhaps makes it again."""
    count = 3 if alone else 50
    for nth in range(1, CALLS_MAX):
        live = Live(tmp_path / str(nth) / "store", alone=alone)
        if dispatched_before:
            live.append("T", 6)
            live.dispatch_up_to(live.engine.written)
        live.append("T", count)
        live.append("V", count)

        def meanwhile(live: Live = live) -> None:
            live.delete_with_files("T")
            if made_again:
                live.append("T", 12)

        live.io.left, live.io.meanwhile, live.io.dies = nth, meanwhile, dies
        live.dispatch_up_to(live.engine.written)
        if not live.io.interrupted:
            return
        live.dispatch_up_to(live.engine.written)
        left = {name for name in live.files() if name.startswith("T/")}
        if not made_again:
            # A dispatcher that dies may leave what it wrote last: the next start removes it.
            assert not left or dies
            live.append("T", 4)
            live.dispatch_up_to(live.engine.written)
        assert live.files() == live.rebuilt(), nth
    pytest.fail(f"a step has {CALLS_MAX} storage calls or more")


def test_a_dispatcher_that_dies_at_a_new_queues_first_units_leaves_the_same_files(tmp_path: Path) -> None:
    for nth in range(1, CALLS_MAX):
        live = Live(tmp_path / str(nth) / "store")
        live.append("T", 50)
        live.dispatch_up_to(live.engine.written)
        live.delete("T")  # its files stay
        live.append("T", 50)
        live.io.left, live.io.dies = nth, True
        live.dispatch_up_to(live.engine.written)
        assert live.files() == live.rebuilt(), nth
        if not live.io.interrupted:
            return
    pytest.fail(f"a step has {CALLS_MAX} storage calls or more")
