"""Passes of the index flush: only synced data counts as durable."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mqproc.ipc.control_words import Words
from mqproc.layout import control as words_of
from mqproc.layout import index_file as layout
from mqproc.paths import index_name
from mqproc.store.index.files import ITEMS_PER_PAGE, IndexFlush, IndexState, committed_state
from tests.support.fakes import FaultyIO

FIRST_MS = 1_700_000_000_000


class Index:
    """A folder of index files that consist of a header; file n ends at FIRST_MS + 1000 n + 999."""

    def __init__(self, root: Path) -> None:
        self.io = FaultyIO()
        self.folder = root / "index"
        self.folder.mkdir()

    def make(self, number: int) -> str:
        header = bytearray(layout.HEADER_SIZE)
        end_ms = self.time_ms(number) + 999
        header[layout.END_TIMESTAMP : layout.END_TIMESTAMP + 8] = end_ms.to_bytes(8, "big")
        name = index_name(self.time_ms(number))
        (self.folder / name).write_bytes(header)
        return name

    def time_ms(self, number: int) -> int:
        return FIRST_MS + 1000 * number

    def flusher(self) -> IndexFlush:
        return IndexFlush(self.io, self.io, self.folder)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


def test_flush_first_pass_syncs_all_files(index: Index) -> None:
    """Recovery or a killed predecessor may have written any of them."""
    names = [index.make(number) for number in range(5)]
    done = index.flusher().pass_(IndexState(index.time_ms(4), 10), 2)
    assert (done.synced_files, done.complete) == (5, True)
    assert done.full_end_ms == index.time_ms(3) + 999
    assert index.io.tried() == [*names, "index/", f"{index.folder.parent.name}/"]


def test_flush_many_files_syncs_the_file_system(index: Index) -> None:
    for number in range(65):
        index.make(number)
    flush = index.flusher()
    assert flush.pass_(IndexState(index.time_ms(64), 10), 2).complete
    assert index.io.synced == [f"{index.folder}*"]
    index.io.tried()
    assert flush.pass_(IndexState(index.time_ms(64), 10), 0).synced_files == 0
    assert index.io.tried() == []


def test_flush_file_newer_than_state_waits(index: Index) -> None:
    names = [index.make(number) for number in range(3)]
    flush = index.flusher()
    flush.pass_(IndexState(index.time_ms(1), 10), 0)
    assert names[2] not in index.io.tried()
    done = flush.pass_(IndexState(index.time_ms(2), 1), 2)
    assert (done.synced_files, done.complete) == (2, True)
    assert index.io.tried()[:2] == names[1:]


def test_flush_few_new_items_wait_for_forced_pass(index: Index) -> None:
    index.make(0)
    flush = index.flusher()
    flush.pass_(IndexState(index.time_ms(0), 10), 2)
    more = IndexState(index.time_ms(0), 10 + ITEMS_PER_PAGE)
    assert not flush.pass_(more, 2).complete
    done = flush.pass_(more, 0)
    assert (done.synced_files, done.complete) == (1, True)


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_flush_file_deleted_during_pass_is_skipped(index: Index, deleted: int) -> None:
    names = [index.make(number) for number in range(3)]
    found = index.io.entries(index.folder)
    index.io.entries = lambda folder: found  # type: ignore[method-assign]
    (index.folder / names[deleted]).unlink()
    done = index.flusher().pass_(IndexState(index.time_ms(2), 10), 0)
    assert done.complete
    assert done.full_end_ms == (0 if deleted == 1 else index.time_ms(1) + 999)


@pytest.mark.parametrize("place", ["index/2", "index/"])
def test_flush_failed_sync_keeps_files_dirty(index: Index, place: str) -> None:
    name = index.make(0)
    flush = index.flusher()
    index.io.failing = {place: errno.EIO}
    with pytest.raises(OSError, match="Input/output"):
        flush.pass_(IndexState(index.time_ms(0), 10), 0)
    index.io.failing = {}
    index.io.tried()
    assert flush.pass_(IndexState(index.time_ms(0), 10), 0).synced_files == 1
    assert index.io.tried()[0] == name


class CommittingWords(Words):
    """Words to which a dispatcher commits two steps after a number of loads."""

    def __init__(self, after_loads: int) -> None:
        super().__init__(bytearray(words_of.FILE_SIZE))
        self.commit(1, 500)
        self.loads_left = after_loads

    def __getitem__(self, index: int) -> int:
        value = super().__getitem__(index)
        self.loads_left -= 1
        if self.loads_left == 0:
            self.commit(2, 7)
            self.commit(3, 9)
        return value

    def commit(self, file_ms: int, items: int) -> None:
        """Store the words in the dispatcher's order."""
        sequence = super().__getitem__(words_of.COMMIT_SEQUENCE) + 1
        self[words_of.COMMIT_INDEX_MS[sequence & 1]] = file_ms
        self[words_of.COMMIT_INDEX_ITEMS[sequence & 1]] = items
        self[words_of.COMMIT_SEQUENCE] = sequence
        self[words_of.INDEX_FILE_MS] = file_ms
        self[words_of.INDEX_ITEMS] = items


@pytest.mark.parametrize("after_loads", range(1, 12))
def test_committed_state_is_from_one_step(after_loads: int) -> None:
    assert committed_state(CommittingWords(after_loads)) in (IndexState(1, 500), IndexState(3, 9))


def test_committed_state_always_changing_returns_none() -> None:
    class ChangingWords(CommittingWords):
        def __getitem__(self, index: int) -> int:
            value = super().__getitem__(index)
            self.loads_left = 1
            return value

    assert committed_state(ChangingWords(1)) is None
