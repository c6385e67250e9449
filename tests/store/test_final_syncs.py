"""The first failed sync ends all syncs of all roles, and is known after the group has gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mqproc.io.store_io import FailedSyncError
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.sync_guard import SyncGuard, remember_failed_sync
from tests.store.faulty_io import FaultyIO


class Store:
    """An empty store's folders, its words and one role's syncs."""

    def __init__(self, root: Path) -> None:
        self.io = FaultyIO()
        self.paths = StorePaths(root)
        self.paths.own.mkdir()
        self.file = root / "file"
        self.file.write_bytes(b"data")
        self.words = Words(bytearray(words_of.FILE_SIZE))
        self.syncs = SyncGuard(self.io, self.paths, self.words, words_of.CQ_FLUSHER, words_of.CQ_SYNC_ERRNO)

    def sync_everything(self) -> int:
        """Try each kind of sync; how many were refused."""
        fd = self.io.open(self.file, write=True)
        refused = 0
        for sync in (
            lambda: self.syncs.sync(fd),
            lambda: self.syncs.sync_file_system(fd),
            lambda: self.syncs.sync_folder(self.paths.root),
            lambda: self.syncs.rename(self.file, self.file),
            lambda: self.syncs.write_file_atomically(self.file, b"data"),
        ):
            try:
                sync()
            except FailedSyncError:
                refused += 1
        self.io.close(fd)
        return refused


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_everything_is_synced_while_nothing_has_failed(store: Store) -> None:
    assert store.sync_everything() == 0
    assert not store.syncs.has_failed()
    assert len(store.io.synced) == 6


@pytest.mark.parametrize("word", words_of.SYNC_ERRNO_WORDS)
def test_any_roles_failed_sync_ends_every_kind_of_sync(store: Store, word: int) -> None:
    store.words[word] = errno.EIO
    assert store.syncs.has_failed()
    assert store.sync_everything() == 5
    assert store.io.synced == []
    others = [store.words[index] for index in words_of.SYNC_ERRNO_WORDS if index != word]
    assert not any(others)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_sync_is_told_to_all_and_written_down(store: Store, number: int) -> None:
    store.io.failing = {"/file": number}
    word_before_file = []
    store.io.before_sync = lambda path: word_before_file.append(store.words[words_of.CQ_SYNC_ERRNO])
    fd = store.io.open(store.file, write=True)
    with pytest.raises(FailedSyncError, match=f"{os.strerror(number)}.*{store.file}") as caught:
        store.syncs.sync(fd)
    store.io.close(fd)
    assert caught.value.errno == number
    assert store.words[words_of.CQ_SYNC_ERRNO] == number
    assert word_before_file[1:] == [number, number]
    assert store.paths.read_only.read_text() == f"cq-flusher: {store.file}: {os.strerror(number)}\n"
    store.io.failing = {}
    assert store.sync_everything() == 5


def test_a_failed_folder_sync_is_final_but_a_missing_folder_is_not(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.syncs.sync_folder(store.paths.root / "deleted")
    store.io.failing = {f"{store.paths.own}/": errno.EMFILE}
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        store.syncs.sync_folder(store.paths.own)
    assert not store.syncs.has_failed()
    store.io.failing = {f"{store.paths.own}/": errno.EIO}
    with pytest.raises(FailedSyncError):
        store.syncs.sync_folder(store.paths.own)
    assert store.syncs.has_failed()


def test_a_rename_is_final_only_when_it_was_done_and_not_synced(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.syncs.rename(store.file, store.paths.root / "missing" / "file")
    assert not store.syncs.has_failed()
    store.io.failing = {f"{store.paths.root}/": errno.EIO}
    with pytest.raises(FailedSyncError):
        store.syncs.rename(store.file, store.paths.root / "new")
    assert store.words[words_of.CQ_SYNC_ERRNO] == errno.EIO


def test_a_file_whose_replacement_is_not_synced_ends_all_syncs(store: Store) -> None:
    store.io.failing = {"file.tmp": errno.EIO}
    with pytest.raises(FailedSyncError):
        store.syncs.write_file_atomically(store.file, b"other")
    assert store.words[words_of.CQ_SYNC_ERRNO] == errno.EIO
    assert store.file.read_bytes() == b"data"
    assert store.sync_everything() == 5


def test_a_file_that_there_is_no_room_for_ends_nothing(store: Store) -> None:
    store.io.refusing = {"file.tmp": errno.ENOSPC}
    with pytest.raises(OSError, match="No space left"):
        store.syncs.write_file_atomically(store.file, b"other")
    assert not store.syncs.has_failed()
    store.io.refusing = {}
    assert store.sync_everything() == 0


def test_what_was_written_down_first_stays(store: Store) -> None:
    assert remember_failed_sync(store.io, store.paths, "first")
    assert remember_failed_sync(store.io, store.paths, "second")
    assert store.paths.read_only.read_text() == "first\n"


def test_a_disk_that_fails_this_too_still_has_the_name(store: Store) -> None:
    store.io.failing = {"": errno.EIO}
    assert not remember_failed_sync(store.io, store.paths, "first")
    assert store.paths.read_only.exists()
    store.paths.read_only.unlink()
    store.io.refusing = {"read_only": errno.ENOSPC}
    assert not remember_failed_sync(store.io, store.paths, "first")
    assert not store.paths.read_only.exists()


def test_who_is_killed_before_the_file_of_a_failed_sync_is_removed_has_told_of_it(store: Store) -> None:
    told = []

    class Unlinking(FaultyIO):
        def unlink(self, path: Path) -> None:
            told.append(store.syncs.has_failed())
            super().unlink(path)

    io = Unlinking()
    io.failing = {"/file.tmp": errno.EIO}
    store.syncs = SyncGuard(io, store.paths, store.words, words_of.CQ_FLUSHER, words_of.CQ_SYNC_ERRNO)
    with pytest.raises(FailedSyncError):
        store.syncs.write_file_atomically(store.file, b"other")
    assert told[0]
    assert store.file.read_bytes() == b"data"


def test_of_two_roles_whose_syncs_fail_together_the_first_alone_writes_it_down(store: Store) -> None:
    """The disk may fail the sync of that file too: a second one would seem to go well."""

    class OtherMeanwhile(FaultyIO):
        """The other's sync, which was under way, fails when the first one has looked whether the file is there."""

        def exists(self, path: Path) -> bool:
            found = super().exists(path)
            if path == store.paths.read_only and not store.words[words_of.INDEX_SYNC_ERRNO]:
                with pytest.raises(FailedSyncError):
                    other._fail(FailedSyncError(errno.ENOSPC, "full"), "other")
            return found

    io = OtherMeanwhile()
    other = SyncGuard(io, store.paths, store.words, words_of.INDEX_FLUSHER, words_of.INDEX_SYNC_ERRNO)
    store.syncs = SyncGuard(io, store.paths, store.words, words_of.CQ_FLUSHER, words_of.CQ_SYNC_ERRNO)
    io.failing = {"/file": errno.EIO, "read_only": errno.EIO}
    fd = io.open(store.file, write=True)
    with pytest.raises(FailedSyncError):
        store.syncs.sync(fd)
    io.close(fd)
    assert io.tried("read_only") == ["read_only"]
    assert store.paths.read_only.read_text() == f"cq-flusher: {store.file}: {os.strerror(errno.EIO)}\n"
    told = [store.words[word] for word in (words_of.CQ_SYNC_ERRNO, words_of.INDEX_SYNC_ERRNO)]
    assert told == [errno.EIO, errno.ENOSPC]
