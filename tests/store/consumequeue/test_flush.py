"""Passes of the consumequeue flush: dirty files are derived from the queue table."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import queue_table as table_layout
from mqproc.store.consumequeue.files import ConsumeQueueFiles, ConsumeQueueFlush
from mqproc.store.consumequeue.table import QueueTable

FILE_BYTES = 20_000  # 1,000 units: files end inside a page
PAGE_UNITS = 4096 // 20 + 1


class RecordingIO(StoreIO):
    """Records synced paths, or fails syncs."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []
        self.failing = False

    def sync(self, fd: int) -> None:
        if self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        super().sync(fd)

    def sync_folder(self, folder: Path) -> None:
        self.synced.append(f"{folder}/")
        super().sync_folder(folder)

    def sync_file_system(self, fd: int) -> None:
        self.synced.append("*")
        super().sync_file_system(fd)


class Queues:
    """A queue table, its files, and a dispatcher that writes zeros."""

    def __init__(self, root: Path) -> None:
        self.io = RecordingIO()
        self.folder = root / "consumequeue"
        self.table = QueueTable.create(StoreIO(), root / "queues", 256)
        self.files = ConsumeQueueFiles(StoreIO(), self.folder, FILE_BYTES, write=True)

    def flusher(self) -> ConsumeQueueFlush:
        return ConsumeQueueFlush(self.io, self.io, self.folder, FILE_BYTES, self.table)

    def dispatch(self, queue_id: int, count: int) -> None:
        number = self.table.create_queue("T", queue_id)
        offset = self.table.max_offset(number)
        self.files.write_run("T", queue_id, offset, np.zeros(20 * count, np.uint8))
        self.table.store(number, table_layout.MAX_OFFSET, offset + count)

    def synced(self) -> list[str]:
        """Return and forget the synced paths, relative to the store; folders end with a slash."""
        root = str(self.folder.parent)
        found = [path.replace(root, ".").removeprefix("./") or "./" for path in self.io.synced]
        self.io.synced.clear()
        return found


@pytest.fixture
def queues(tmp_path: Path) -> Queues:
    return Queues(tmp_path)


def test_flush_one_dirty_page_waits_for_forced_pass(queues: Queues) -> None:
    flush = queues.flusher()
    queues.dispatch(0, PAGE_UNITS)
    done = flush.pass_(2)
    assert (done.synced_files, done.synced_queues, done.waiting_queues, done.complete) == (0, 0, 1, False)
    assert queues.synced() == []
    done = flush.pass_(0)
    assert (done.synced_files, done.synced_queues, done.waiting_queues, done.complete) == (1, 1, 0, True)
    assert flush.pass_(0).synced_files == 0


def test_flush_two_dirty_pages_are_synced(queues: Queues) -> None:
    flush = queues.flusher()
    queues.dispatch(0, 2 * PAGE_UNITS)
    queues.dispatch(1, 1)
    done = flush.pass_(2)
    assert (done.synced_files, done.synced_queues, done.waiting_queues) == (1, 1, 1)
    queues.dispatch(0, 1)
    assert flush.pass_(2).synced_files == 0
    queues.dispatch(0, 2 * PAGE_UNITS)
    assert flush.pass_(2).synced_files == 1


def test_flush_full_file_is_synced_regardless_of_pages(queues: Queues) -> None:
    flush = queues.flusher()
    queues.dispatch(0, 999)
    flush.pass_(0)
    queues.synced()
    queues.dispatch(0, 2)
    assert flush.pass_(2).synced_files == 2
    names = [path for path in queues.synced() if not path.endswith("/")]
    assert names == ["consumequeue/T/0/00000000000000000000", "consumequeue/T/0/00000000000000020000"]


def test_flush_folders_of_new_files_are_synced_after_files(queues: Queues) -> None:
    flush = queues.flusher()
    queues.dispatch(7, 1)
    flush.pass_(0)
    file = "consumequeue/T/7/00000000000000000000"
    folders = {"consumequeue/T/7/", "consumequeue/T/", "consumequeue/"}
    synced = queues.synced()
    assert synced[0] == file
    assert folders <= set(synced[1:])
    queues.dispatch(7, 1)
    flush.pass_(0)
    assert queues.synced() == [file]
    queues.dispatch(7, 1000)
    flush.pass_(0)
    assert "consumequeue/T/7/" in queues.synced()


def test_flush_more_than_64_files_syncs_the_file_system(queues: Queues) -> None:
    flush = queues.flusher()
    for queue_id in range(64):
        queues.dispatch(queue_id, 1)
    done = flush.pass_(0)
    assert (done.synced_files, done.whole_file_system) == (64, False)
    queues.synced()
    for queue_id in range(65):
        queues.dispatch(queue_id, 1)
    done = flush.pass_(0)
    assert (done.synced_queues, done.whole_file_system, done.complete) == (65, True, True)
    assert queues.synced() == ["*"]
    assert flush.pass_(0).synced_queues == 0


def test_flush_new_flusher_assumes_nothing_durable(queues: Queues) -> None:
    queues.dispatch(0, 5)
    flush = queues.flusher()
    queues.dispatch(1, 5)
    done = flush.pass_(2)
    assert done.whole_file_system
    assert queues.synced() == ["*"]
    assert flush.pass_(0).synced_queues == 1


def test_flush_high_first_offset_syncs_existing_files(queues: Queues) -> None:
    flush = queues.flusher()
    number = queues.table.create_queue("T", 0, next_offset=10_000_000, min_offset=10_000_000)
    queues.dispatch(0, 5)
    assert queues.table.max_offset(number) == 10_000_005
    done = flush.pass_(0)
    assert (done.synced_files, done.complete) == (1, True)


def test_flush_deleted_files_and_queues_are_skipped(queues: Queues) -> None:
    flush = queues.flusher()
    for queue_id in range(3):
        queues.dispatch(queue_id, 5)
    queues.files.path("T", 0, 0).unlink()
    queues.table.delete_queue(queues.table.find("T", 1))
    done = flush.pass_(0)
    assert done.complete
    assert [path for path in queues.synced() if not path.endswith("/")] == ["consumequeue/T/2/00000000000000000000"]


@pytest.mark.parametrize("dispatched", [3, 5])
def test_flush_recreated_queue_syncs_file_and_folders(queues: Queues, dispatched: int) -> None:
    """The new file has the name of an older file that the flusher has synced."""
    flush = queues.flusher()
    queues.dispatch(0, dispatched)
    flush.pass_(0)
    number = queues.table.find("T", 0)
    queues.table.store(number, table_layout.NEXT_OFFSET, 5)
    queues.table.delete_queue(number)
    queues.files.remove("T", 0)
    flush.pass_(0)
    queues.table.create_queue("T", 0)
    flush.pass_(0)
    queues.synced()
    queues.dispatch(0, 2)
    assert flush.pass_(0).complete
    file = "consumequeue/T/0/00000000000000000000"
    folders = {"consumequeue/T/0/", "consumequeue/T/", "consumequeue/"}
    synced = queues.synced()
    assert synced[0] == file
    assert folders <= set(synced[1:])
    queues.dispatch(0, 1)
    flush.pass_(0)
    assert queues.synced() == [file]


def test_flush_failed_sync_raises_and_keeps_queue_dirty(queues: Queues) -> None:
    flush = queues.flusher()
    queues.dispatch(0, 5)
    queues.io.failing = True
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        flush.pass_(0)
    queues.io.failing = False
    assert flush.pass_(0).synced_queues == 1


def test_flush_without_queues_syncs_nothing(queues: Queues) -> None:
    done = queues.flusher().pass_(0)
    assert (done.synced_files, done.complete) == (0, True)
    assert queues.synced() == []
