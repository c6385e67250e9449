"""Dispatch while topics are deleted and recreated, also during a step.

The files must equal those that recovery rebuilds from the same log and topics.
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
from tests.support.store_builders import SMALL_QUEUE_FILE_BYTES, RecoveredStore

CALLS_MAX = 60


class Died(BaseException):
    """Simulates SIGKILL."""


class InterruptedIO(StoreIO):
    """Calls `meanwhile`, then raises Died if `dies`, before the nth storage call of dispatch."""

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


class LiveDispatch(RecoveredStore):
    """A writer and a dispatcher."""

    def __init__(self, root: Path, *, single: bool = False) -> None:
        """With `single` each record is dispatched separately."""
        super().__init__(root)
        self.io = InterruptedIO()
        self.position = 0
        self.single = single
        self.cells = np.zeros(words_of.FILE_SIZE // words_of.WORD_SIZE, np.int64)
        self.start_dispatcher()

    def start_dispatcher(self) -> None:
        """Start a dispatcher that continues at the stored position."""
        options = self.engine.options
        files = ConsumeQueueFiles(self.io, self.paths.consume_queue, SMALL_QUEUE_FILE_BYTES, write=True)
        index = IndexFiles(StoreIO(), self.paths.index, options.max_hash_slot_num, options.max_index_num)
        self.dispatch = Dispatch(self.io, options, self.engine.table, self.engine.segments, files, index)

    def dispatch_up_to(self, stop: int) -> None:
        while self.position < stop:
            end = self.position + int.from_bytes(self.engine.log_bytes(self.position, self.position + 4))
            try:
                if self.single and self.dispatch.step_single(self.position, end, self.cells):
                    self.position = end
                    continue
                step = self.dispatch.step(self.position, end if self.single else stop)
            except Died:
                self.start_dispatcher()
                continue
            assert not step.stuck
            self.position = step.position

    def delete_with_files(self, topic: str) -> None:
        self.delete(topic)
        remove_tree(StoreIO(), self.paths.consume_queue / topic)

    def rebuilt(self) -> dict[str, bytes]:
        """Return the ConsumeQueue files that recovery builds from the log and topics."""
        other = RecoveredStore(self.paths.root.with_name("rebuilt"))
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


@pytest.fixture(params=["batch", "single"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> LiveDispatch:
    return LiveDispatch(tmp_path / "store", single=request.param == "single")


def test_dispatch_pending_records_of_deleted_topic_get_no_units(live: LiveDispatch) -> None:
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


def test_dispatch_step_over_recreation_separates_records(live: LiveDispatch) -> None:
    live.append("T", 50)
    live.delete_with_files("T")
    live.append("T", 30)
    live.delete_with_files("T")
    live.append("T", 10)
    live.dispatch_up_to(live.engine.written)
    number = live.engine.table.find("T", 1)
    assert (live.engine.table.min_offset(number), live.engine.table.max_offset(number)) == (40, 45)
    assert live.files() == live.rebuilt()


def test_dispatch_does_not_write_to_file_of_deleted_queue(live: LiveDispatch) -> None:
    """The recreated queue has the same number, but another file."""
    live.append("T", 10)
    live.dispatch_up_to(live.engine.written)
    live.delete_with_files("T")
    live.append("T", 10)
    live.dispatch_up_to(live.engine.written)
    assert live.files() == live.rebuilt()


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("recreated", [False, True])
@pytest.mark.parametrize("dispatched_before", [False, True])
def test_dispatch_deletion_during_a_step_leaves_no_units(
    tmp_path: Path, dies: bool, recreated: bool, dispatched_before: bool, single: bool
) -> None:
    """The writer deletes and perhaps recreates the topic at each storage call of a step."""
    count = 3 if single else 50
    for nth in range(1, CALLS_MAX):
        live = LiveDispatch(tmp_path / str(nth) / "store", single=single)
        if dispatched_before:
            live.append("T", 6)
            live.dispatch_up_to(live.engine.written)
        live.append("T", count)
        live.append("V", count)

        def meanwhile(live: LiveDispatch = live) -> None:
            live.delete_with_files("T")
            if recreated:
                live.append("T", 12)

        live.io.left, live.io.meanwhile, live.io.dies = nth, meanwhile, dies
        live.dispatch_up_to(live.engine.written)
        if not live.io.interrupted:
            return
        live.dispatch_up_to(live.engine.written)
        left = {name for name in live.files() if name.startswith("T/")}
        if not recreated:
            # A killed dispatcher may leave its last writes; the next start removes them.
            assert not left or dies
            live.append("T", 4)
            live.dispatch_up_to(live.engine.written)
        assert live.files() == live.rebuilt(), nth
    pytest.fail(f"a step has {CALLS_MAX} storage calls or more")


def test_dispatch_killed_at_first_units_gives_the_same_files(tmp_path: Path) -> None:
    for nth in range(1, CALLS_MAX):
        live = LiveDispatch(tmp_path / str(nth) / "store")
        live.append("T", 50)
        live.dispatch_up_to(live.engine.written)
        live.delete("T")  # its files are kept
        live.append("T", 50)
        live.io.left, live.io.dies = nth, True
        live.dispatch_up_to(live.engine.written)
        assert live.files() == live.rebuilt(), nth
        if not live.io.interrupted:
            return
    pytest.fail(f"a step has {CALLS_MAX} storage calls or more")
