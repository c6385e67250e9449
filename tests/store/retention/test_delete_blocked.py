"""Retention that is held back by undurable data, a failed sync or a failing unlink."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from tests.support.store_builders import AGED_SEGMENT, DiskIO, check_minima, expired_store


@pytest.mark.parametrize(
    ("word", "name"),
    [
        (words_of.DISPATCHED, "dispatch"),
        (words_of.COMMITLOG_MARK, "commitlog mark"),
        (words_of.CQ_SYNCED, "consumequeue mark"),
        (words_of.INDEX_SYNCED, "index mark"),
    ],
)
def test_retention_lagging_position_holds_segments(tmp_path: Path, word: int, name: str) -> None:
    store = expired_store(tmp_path)
    end = store.words[word]
    store.words[word] = 5 * AGED_SEGMENT + 100
    store.run_passes()
    assert (store.segments()[0], store.minimum(), store.held_by()) == (5, 5, name)
    store.run_passes()
    assert store.segments()[0] == 5
    store.words[word] = end
    store.run_passes(3)
    assert (store.segments()[0], store.held_by()) == (15, "nothing")
    assert [figures["by"] for event, figures in store.reported if event.endswith("are held back")] == [name]


def test_retention_mark_at_segment_end_keeps_its_last_record(tmp_path: Path) -> None:
    store = expired_store(tmp_path)
    store.words[words_of.CQ_SYNCED] = 5 * AGED_SEGMENT
    store.run_passes()
    assert store.segments()[0] == 4


def test_retention_index_disabled_ignores_index_mark(tmp_path: Path) -> None:
    store = expired_store(tmp_path, message_index_enable=False)
    store.words[words_of.INDEX_SYNCED] = 0
    store.run_passes(3)
    assert store.segments()[0] == 15


def test_retention_after_failed_sync_deletes_nothing(tmp_path: Path) -> None:
    store = expired_store(tmp_path)
    store.words[words_of.CQ_SYNC_ERRNO] = 5
    store.run_passes(3)
    assert (store.segments()[0], store.held_by()) == (0, "failed sync")


def test_retention_own_failed_sync_is_final(tmp_path: Path) -> None:
    class FailingIO(DiskIO):
        def sync_folder(self, folder: Path) -> None:
            if folder.name == "commitlog" and self.unlinked:
                self._sync_with(self._fail, self.open(folder))
            super().sync_folder(folder)

        @staticmethod
        def _fail(fd: int) -> None:
            raise OSError(5, "Input/output error")

    store = expired_store(tmp_path, io=FailingIO())
    store.run_passes(4)
    assert store.segments()[0] == 1
    assert store.words[words_of.KEEPER_SYNC_ERRNO] == 5
    assert words_of.sync_errno(store.words) == 5
    assert "keeper" in store.paths.read_only.read_text()


def test_retention_failed_unlink_is_reported_and_retried(tmp_path: Path) -> None:
    class StubbornIO(DiskIO):
        stubborn = True

        def unlink(self, path: Path) -> None:
            if self.stubborn and path.parent.name == "commitlog":
                raise PermissionError(1, "Operation not permitted", str(path))
            super().unlink(path)

    io = StubbornIO()
    store = expired_store(tmp_path, io=io)
    store.run_passes(2)
    assert store.segments()[0] == 0
    assert store.words[words_of.RETENTION_ERRNO] == 1
    assert "retention waits" in [event for event, _ in store.reported]
    # The minimum is published; queues and index are unchanged.
    assert store.minimum() == 10
    assert store.queue_files()[0] == 0
    io.stubborn = False
    store.run_passes(2)
    assert store.segments()[0] == 15
    assert store.words[words_of.RETENTION_ERRNO] == 0
    check_minima(store)


def test_retention_failed_unlink_of_queue_file_is_retried(tmp_path: Path) -> None:
    """The retry does not depend on a change of the minimum."""

    class StubbornIO(DiskIO):
        stubborn = True

        def unlink(self, path: Path) -> None:
            if self.stubborn and "consumequeue" in path.parts:
                raise PermissionError(1, "Operation not permitted", str(path))
            super().unlink(path)

    io = StubbornIO()
    store = expired_store(tmp_path, io=io)
    keeper = store.retention()
    store.run(keeper, 30_000)
    assert (store.segments()[0], store.queue_files()[0]) == (15, 0)
    assert "retention waits" in [event for event, _ in store.reported]
    io.stubborn = False
    store.run(keeper, 30_000)
    assert store.queue_files()[0] == 2
    check_minima(store)
    keeper.close()
