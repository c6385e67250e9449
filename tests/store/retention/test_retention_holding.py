"""What holds retention back: what is not durable, a failed sync, a disk that refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from tests.store.retention.retaining import SEGMENT, DiskIO, aged, check_minima


@pytest.mark.parametrize(
    ("word", "name"),
    [
        (words_of.DISPATCHED, "dispatch"),
        (words_of.COMMITLOG_MARK, "commitlog mark"),
        (words_of.CQ_SYNCED, "consumequeue mark"),
        (words_of.INDEX_SYNCED, "index mark"),
    ],
)
def test_what_is_behind_holds_segments_back(tmp_path: Path, word: int, name: str) -> None:
    store = aged(tmp_path)
    end = store.words[word]
    store.words[word] = 5 * SEGMENT + 100
    store.pass_by()
    assert (store.segments()[0], store.minimum(), store.held_by()) == (5, 5, name)
    store.pass_by()
    assert store.segments()[0] == 5
    store.words[word] = end
    store.pass_by(3)
    assert (store.segments()[0], store.held_by()) == (15, "nothing")
    assert [figures["by"] for event, figures in store.told if event.endswith("are held back")] == [name]


def test_a_mark_at_a_segments_end_keeps_the_bytes_that_it_is_checked_by(tmp_path: Path) -> None:
    store = aged(tmp_path)
    store.words[words_of.CQ_SYNCED] = 5 * SEGMENT
    store.pass_by()
    assert store.segments()[0] == 4


def test_without_an_index_its_mark_says_nothing(tmp_path: Path) -> None:
    store = aged(tmp_path, message_index_enable=False)
    store.words[words_of.INDEX_SYNCED] = 0
    store.pass_by(3)
    assert store.segments()[0] == 15


def test_after_a_failed_sync_nothing_is_deleted(tmp_path: Path) -> None:
    store = aged(tmp_path)
    store.words[words_of.CQ_SYNC_ERRNO] = 5
    store.pass_by(3)
    assert (store.segments()[0], store.held_by()) == (0, "failed sync")


def test_a_failed_sync_of_retentions_own_is_final(tmp_path: Path) -> None:
    class FailingIO(DiskIO):
        def sync_folder(self, folder: Path) -> None:
            if folder.name == "commitlog" and self.unlinked:
                self._sync_with(self._fail, self.open(folder))
            super().sync_folder(folder)

        @staticmethod
        def _fail(fd: int) -> None:
            raise OSError(5, "Input/output error")

    store = aged(tmp_path, io=FailingIO())
    store.pass_by(4)
    assert store.segments()[0] == 1
    assert store.words[words_of.KEEPER_SYNC_ERRNO] == 5
    assert words_of.sync_errno(store.words) == 5
    assert "keeper" in store.paths.read_only.read_text()


def test_an_unlink_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    class StubbornIO(DiskIO):
        stubborn = True

        def unlink(self, path: Path) -> None:
            if self.stubborn and path.parent.name == "commitlog":
                raise PermissionError(1, "Operation not permitted", str(path))
            super().unlink(path)

    io = StubbornIO()
    store = aged(tmp_path, io=io)
    store.pass_by(2)
    assert store.segments()[0] == 0
    assert store.words[words_of.RETENTION_ERRNO] == 1
    assert "retention waits" in [event for event, _ in store.told]
    # Readers were told already; nothing of queues and index has gone.
    assert store.minimum() == 10
    assert store.queue_files()[0] == 0
    io.stubborn = False
    store.pass_by(2)
    assert store.segments()[0] == 15
    assert store.words[words_of.RETENTION_ERRNO] == 0
    check_minima(store)


def test_a_queue_file_whose_unlink_fails_goes_when_it_can(tmp_path: Path) -> None:
    """Though no minimum moves any more."""

    class StubbornIO(DiskIO):
        stubborn = True

        def unlink(self, path: Path) -> None:
            if self.stubborn and "consumequeue" in path.parts:
                raise PermissionError(1, "Operation not permitted", str(path))
            super().unlink(path)

    io = StubbornIO()
    store = aged(tmp_path, io=io)
    keeper = store.retention()
    store.run(keeper, 30_000)
    assert (store.segments()[0], store.queue_files()[0]) == (15, 0)
    assert "retention waits" in [event for event, _ in store.told]
    io.stubborn = False
    store.run(keeper, 30_000)
    assert store.queue_files()[0] == 2
    check_minima(store)
    keeper.close()
