"""The first failed sync ends all syncs of all roles, and is known after the group has gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.sync_guard import SINGLE_SYNCS_MAX, DirtyFiles, SyncGuard, SyncWatch, remember_failed_sync
from tests.support.faulty_io import FaultyIO
from tests.support.processes import open_below
from tests.support.store_builders import Engine


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


# --- test_active_segments ---
# The supervisor's descriptors: whatever a dead flusher may have seen fail is asked for once more, through them.


SEGMENT = 65536
# What must be synced after the death of each role, as the end of a path.
PLACES = {
    words_of.WRITER: ["00000000000000000000", "00000000000000065536"],
    words_of.COMMITLOG_FLUSHER: ["00000000000000000000", "00000000000000065536"],
    words_of.CQ_FLUSHER: ["consumequeue*"],
    words_of.INDEX_FLUSHER: ["index*"],
}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = Engine(tmp_path, io=FaultyIO())
    engine.io.make_folder(engine.paths.consume_queue)
    engine.make_segment(SEGMENT)
    return engine


def opened(engine: Engine) -> tuple[SyncWatch, FaultyIO]:
    io = engine.io
    assert isinstance(io, FaultyIO)
    active = SyncWatch()
    active.open(io, engine.paths, engine.options, engine.words)
    io.tried()
    return active, io


@pytest.mark.parametrize("role", PLACES)
def test_what_a_dead_role_may_have_had_open_is_synced(engine: Engine, role: str) -> None:
    active, io = opened(engine)
    assert active.sync(role) == 0
    assert io.tried() == PLACES[role]


@pytest.mark.parametrize("role", PLACES)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failure_is_told(engine: Engine, role: str, number: int) -> None:
    active, io = opened(engine)
    io.failing = {PLACES[role][0]: number}
    assert active.sync(role) == number


@pytest.mark.parametrize("role", PLACES)
def test_the_descriptors_were_open_before(engine: Engine, role: str) -> None:
    """One that is opened afterwards is not told of a failure that somebody else has seen."""
    active, io = opened(engine)
    io.refusing = {str(engine.paths.root): errno.EMFILE}
    assert active.sync(role) == 0
    assert io.tried() == PLACES[role]


def test_a_role_that_syncs_nothing_is_followed_by_nothing(engine: Engine) -> None:
    active, io = opened(engine)
    assert active.sync(words_of.DISPATCHER) == 0
    assert io.tried() == []


def test_descriptors_follow_the_log(engine: Engine) -> None:
    active, io = opened(engine)
    before = len(open_below(engine.paths.root))
    for start in range(2, 6):
        engine.make_segment(start * SEGMENT)
    engine.words[words_of.FLUSHER_SYNCED] = 4 * SEGMENT + 1
    active.follow()
    assert len(open_below(engine.paths.root)) == before
    io.tried()
    active.sync(words_of.COMMITLOG_FLUSHER)
    assert io.tried() == [f"{start * SEGMENT:020d}" for start in (4, 5)]


def test_a_segment_that_goes_while_it_is_looked_for_is_not_held(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flusher that stops takes back what it had made ready; that ended the group."""
    there = engine.io.exists

    def goes(path: Path) -> bool:
        found = there(path)
        if path.name == f"{SEGMENT:020d}":
            path.unlink()
        return found

    monkeypatch.setattr(engine.io, "exists", goes)
    active, io = opened(engine)
    assert active.sync(words_of.COMMITLOG_FLUSHER) == 0
    assert io.tried() == [f"{0:020d}"]


def test_nothing_is_held_before_a_store_is_recovered() -> None:
    active = SyncWatch()
    active.follow()
    assert [active.sync(role) for role in PLACES] == [0, 0, 0, 0]


# --- test_unsynced ---
# What recovery has changed is synced, and nothing else; the whole file system only for very many files.


class SyncIO(StoreIO):
    """Writes down what is synced."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self.synced: list[str] = []

    def _note(self, path: str | Path) -> None:
        self.synced.append(str(Path(path).relative_to(self._root)))

    def sync(self, fd: int) -> None:
        self._note(self.path_of(fd))
        super().sync(fd)

    def sync_folder(self, folder: Path) -> None:
        self._note(folder)
        super().sync_folder(folder)

    def sync_file_system(self, fd: int) -> None:
        self.synced.append("all")


@pytest.fixture
def io(tmp_path: Path) -> SyncIO:
    return SyncIO(tmp_path)


def files(tmp_path: Path, count: int) -> list[str]:
    names = [f"t/{number}/file" for number in range(count)]
    for name in names:
        path = tmp_path / "store" / "queues" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    return names


def unsynced(io: SyncIO, tmp_path: Path) -> DirtyFiles[str]:
    folder = tmp_path / "store" / "queues"
    return DirtyFiles(io, folder, folder.__truediv__)


def test_files_are_synced_then_the_folders_up_to_the_store(io: SyncIO, tmp_path: Path) -> None:
    first, second, _third = files(tmp_path, 3)
    changed = unsynced(io, tmp_path)
    for name in (first, second, first):
        changed.note(name)
    changed.sync()
    below = [f"store/queues/{name}" for name in ("t/0/file", "t/1/file", "t/1", "t/0", "t")]
    assert io.synced == [*below, "store/queues", "store"]
    changed.sync()
    assert len(io.synced) == 7


def test_of_what_was_removed_the_folders_are_synced_that_are_there(io: SyncIO, tmp_path: Path) -> None:
    (name,) = files(tmp_path, 1)
    changed = unsynced(io, tmp_path)
    changed.note(name)
    (tmp_path / "store" / "queues" / name).unlink()
    (tmp_path / "store" / "queues" / "t" / "0").rmdir()
    changed.sync()
    assert io.synced == ["store/queues/t", "store/queues", "store"]


@pytest.mark.parametrize(("count", "all_at_once"), [(SINGLE_SYNCS_MAX, False), (SINGLE_SYNCS_MAX + 1, True)])
def test_very_many_files_are_synced_with_their_file_system(
    count: int, all_at_once: bool, io: SyncIO, tmp_path: Path
) -> None:
    changed = unsynced(io, tmp_path)
    for name in files(tmp_path, count):
        changed.note(name)
    changed.sync()
    assert (io.synced == ["all"]) == all_at_once
    assert all_at_once or len(io.synced) == 2 * count + 3


def test_a_failed_sync_is_the_callers(tmp_path: Path) -> None:
    class Failing(SyncIO):
        def sync(self, fd: int) -> None:
            raise FailedSyncError(5, "Input/output error", self.path_of(fd))

    (name,) = files(tmp_path, 1)
    changed = unsynced(Failing(tmp_path), tmp_path)
    changed.note(name)
    with pytest.raises(FailedSyncError, match="t/0/file"):
        changed.sync()


def test_nothing_changed_nothing_synced(io: SyncIO, tmp_path: Path) -> None:
    unsynced(io, tmp_path).sync()
    assert io.synced == []
