"""SyncGuard, SyncWatch and DirtyFiles: no role syncs after a failed sync."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.sync_guard import SINGLE_SYNCS_MAX, DirtyFiles, SyncGuard, SyncWatch, remember_failed_sync
from tests.support.fakes import FaultyIO
from tests.support.processes import open_below
from tests.support.store_builders import Engine


class Store:
    """The folders and words of an empty store, and one role's guard."""

    def __init__(self, root: Path) -> None:
        self.io = FaultyIO()
        self.paths = StorePaths(root)
        self.paths.own.mkdir()
        self.file = root / "file"
        self.file.write_bytes(b"data")
        self.words = Words(bytearray(words_of.FILE_SIZE))
        self.syncs = SyncGuard(self.io, self.paths, self.words, words_of.CQ_FLUSHER, words_of.CQ_SYNC_ERRNO)

    def sync_everything(self) -> int:
        """Try each kind of sync; return how many were refused."""
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


def test_sync_guard_syncs_everything_before_a_failure(store: Store) -> None:
    assert store.sync_everything() == 0
    assert not store.syncs.has_failed()
    assert len(store.io.synced) == 6


@pytest.mark.parametrize("word", words_of.SYNC_ERRNO_WORDS)
def test_sync_guard_failure_of_any_role_refuses_all_syncs(store: Store, word: int) -> None:
    store.words[word] = errno.EIO
    assert store.syncs.has_failed()
    assert store.sync_everything() == 5
    assert store.io.synced == []
    others = [store.words[index] for index in words_of.SYNC_ERRNO_WORDS if index != word]
    assert not any(others)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_sync_guard_failed_sync_is_published_and_recorded(store: Store, number: int) -> None:
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


def test_sync_guard_failed_folder_sync_is_final(store: Store) -> None:
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


def test_sync_guard_rename_without_sync_is_final(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.syncs.rename(store.file, store.paths.root / "missing" / "file")
    assert not store.syncs.has_failed()
    store.io.failing = {f"{store.paths.root}/": errno.EIO}
    with pytest.raises(FailedSyncError):
        store.syncs.rename(store.file, store.paths.root / "new")
    assert store.words[words_of.CQ_SYNC_ERRNO] == errno.EIO


def test_sync_guard_unsynced_replacement_is_final(store: Store) -> None:
    store.io.failing = {"file.tmp": errno.EIO}
    with pytest.raises(FailedSyncError):
        store.syncs.write_file_atomically(store.file, b"other")
    assert store.words[words_of.CQ_SYNC_ERRNO] == errno.EIO
    assert store.file.read_bytes() == b"data"
    assert store.sync_everything() == 5


def test_sync_guard_full_disk_is_not_final(store: Store) -> None:
    store.io.refusing = {"file.tmp": errno.ENOSPC}
    with pytest.raises(OSError, match="No space left"):
        store.syncs.write_file_atomically(store.file, b"other")
    assert not store.syncs.has_failed()
    store.io.refusing = {}
    assert store.sync_everything() == 0


def test_remember_failed_sync_keeps_the_first(store: Store) -> None:
    assert remember_failed_sync(store.io, store.paths, "first")
    assert remember_failed_sync(store.io, store.paths, "second")
    assert store.paths.read_only.read_text() == "first\n"


def test_remember_failed_sync_failing_itself_keeps_the_file(store: Store) -> None:
    store.io.failing = {"": errno.EIO}
    assert not remember_failed_sync(store.io, store.paths, "first")
    assert store.paths.read_only.exists()
    store.paths.read_only.unlink()
    store.io.refusing = {"read_only": errno.ENOSPC}
    assert not remember_failed_sync(store.io, store.paths, "first")
    assert not store.paths.read_only.exists()


def test_sync_guard_failure_is_published_before_unlink(store: Store) -> None:
    failed_at_unlink = []

    class UnlinkingIO(FaultyIO):
        def unlink(self, path: Path) -> None:
            failed_at_unlink.append(store.syncs.has_failed())
            super().unlink(path)

    io = UnlinkingIO()
    io.failing = {"/file.tmp": errno.EIO}
    store.syncs = SyncGuard(io, store.paths, store.words, words_of.CQ_FLUSHER, words_of.CQ_SYNC_ERRNO)
    with pytest.raises(FailedSyncError):
        store.syncs.write_file_atomically(store.file, b"other")
    assert failed_at_unlink[0]
    assert store.file.read_bytes() == b"data"


def test_sync_guard_concurrent_failures_record_the_first(store: Store) -> None:
    """The sync of the file may fail too; a second attempt would seem to succeed."""
    other_started, first_checked = threading.Event(), threading.Event()

    class RacingIO(FaultyIO):
        """The other role's sync fails right after the first role has checked for the file."""

        def exists(self, path: Path) -> bool:
            found = super().exists(path)
            if path == store.paths.read_only and threading.current_thread() is not other:
                first_checked.set()
                other.join()
            return found

    def wait_for_check(path: str) -> None:
        if path.endswith("/other"):
            other_started.set()
            first_checked.wait(60)

    def fail_in_other_role() -> None:
        guard = SyncGuard(io, store.paths, store.words, words_of.INDEX_FLUSHER, words_of.INDEX_SYNC_ERRNO)
        with contextlib.suppress(FailedSyncError):
            guard.sync(other_fd)

    io = RacingIO()
    io.failing = {"/file": errno.EIO, "/other": errno.ENOSPC, "read_only": errno.EIO}
    io.before_sync = wait_for_check
    store.syncs = SyncGuard(io, store.paths, store.words, words_of.CQ_FLUSHER, words_of.CQ_SYNC_ERRNO)
    fd = io.open(store.file, write=True)
    other_fd = io.open(store.file.with_name("other"), write=True, create=True)
    other = threading.Thread(target=fail_in_other_role)
    other.start()
    assert other_started.wait(60)
    with pytest.raises(FailedSyncError):
        store.syncs.sync(fd)
    io.close(fd)
    io.close(other_fd)
    assert io.tried("read_only") == ["read_only"]
    assert store.paths.read_only.read_text() == f"cq-flusher: {store.file}: {os.strerror(errno.EIO)}\n"
    published = [store.words[word] for word in (words_of.CQ_SYNC_ERRNO, words_of.INDEX_SYNC_ERRNO)]
    assert published == [errno.EIO, errno.ENOSPC]


# SyncWatch

SEGMENT = 65536
# Path suffixes of the files that must be synced after the death of each role.
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
    watch = SyncWatch()
    watch.open(io, engine.paths, engine.options, engine.words)
    io.tried()
    return watch, io


@pytest.mark.parametrize("role", PLACES)
def test_sync_watch_syncs_files_of_a_dead_role(engine: Engine, role: str) -> None:
    watch, io = opened(engine)
    assert watch.sync(role) == 0
    assert io.tried() == PLACES[role]


@pytest.mark.parametrize("role", PLACES)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_sync_watch_returns_errno_of_failed_sync(engine: Engine, role: str, number: int) -> None:
    watch, io = opened(engine)
    io.failing = {PLACES[role][0]: number}
    assert watch.sync(role) == number


@pytest.mark.parametrize("role", PLACES)
def test_sync_watch_uses_descriptors_opened_earlier(engine: Engine, role: str) -> None:
    """A later descriptor does not receive an error already reported to another one."""
    watch, io = opened(engine)
    io.refusing = {str(engine.paths.root): errno.EMFILE}
    assert watch.sync(role) == 0
    assert io.tried() == PLACES[role]


def test_sync_watch_role_without_syncs_syncs_nothing(engine: Engine) -> None:
    watch, io = opened(engine)
    assert watch.sync(words_of.DISPATCHER) == 0
    assert io.tried() == []


def test_sync_watch_descriptors_follow_the_log(engine: Engine) -> None:
    watch, io = opened(engine)
    before = len(open_below(engine.paths.root))
    for start in range(2, 6):
        engine.make_segment(start * SEGMENT)
    engine.words[words_of.FLUSHER_SYNCED] = 4 * SEGMENT + 1
    watch.follow()
    assert len(open_below(engine.paths.root)) == before
    io.tried()
    watch.sync(words_of.COMMITLOG_FLUSHER)
    assert io.tried() == [f"{start * SEGMENT:020d}" for start in (4, 5)]


def test_sync_watch_segment_removed_meanwhile_is_skipped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopping flusher removes the segments that it created ahead."""
    exists = engine.io.exists

    def removed_after(path: Path) -> bool:
        found = exists(path)
        if path.name == f"{SEGMENT:020d}":
            path.unlink()
        return found

    monkeypatch.setattr(engine.io, "exists", removed_after)
    watch, io = opened(engine)
    assert watch.sync(words_of.COMMITLOG_FLUSHER) == 0
    assert io.tried() == [f"{0:020d}"]


def test_sync_watch_before_recovery_syncs_nothing() -> None:
    watch = SyncWatch()
    watch.follow()
    assert [watch.sync(role) for role in PLACES] == [0, 0, 0, 0]


# DirtyFiles


class SyncIO(StoreIO):
    """Records syncs."""

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


def dirty_files(io: SyncIO, tmp_path: Path) -> DirtyFiles[str]:
    folder = tmp_path / "store" / "queues"
    return DirtyFiles(io, folder, folder.__truediv__)


def test_dirty_files_syncs_files_then_folders(io: SyncIO, tmp_path: Path) -> None:
    first, second, _third = files(tmp_path, 3)
    changed = dirty_files(io, tmp_path)
    for name in (first, second, first):
        changed.note(name)
    changed.sync()
    below = [f"store/queues/{name}" for name in ("t/0/file", "t/1/file", "t/1", "t/0", "t")]
    assert io.synced == [*below, "store/queues", "store"]
    changed.sync()
    assert len(io.synced) == 7


def test_dirty_files_removed_file_syncs_existing_folders(io: SyncIO, tmp_path: Path) -> None:
    (name,) = files(tmp_path, 1)
    changed = dirty_files(io, tmp_path)
    changed.note(name)
    (tmp_path / "store" / "queues" / name).unlink()
    (tmp_path / "store" / "queues" / "t" / "0").rmdir()
    changed.sync()
    assert io.synced == ["store/queues/t", "store/queues", "store"]


@pytest.mark.parametrize(("count", "all_at_once"), [(SINGLE_SYNCS_MAX, False), (SINGLE_SYNCS_MAX + 1, True)])
def test_dirty_files_many_files_sync_the_file_system(count: int, all_at_once: bool, io: SyncIO, tmp_path: Path) -> None:
    changed = dirty_files(io, tmp_path)
    for name in files(tmp_path, count):
        changed.note(name)
    changed.sync()
    assert (io.synced == ["all"]) == all_at_once
    assert all_at_once or len(io.synced) == 2 * count + 3


def test_dirty_files_failed_sync_raises(tmp_path: Path) -> None:
    class Failing(SyncIO):
        def sync(self, fd: int) -> None:
            raise FailedSyncError(5, "Input/output error", self.path_of(fd))

    (name,) = files(tmp_path, 1)
    changed = dirty_files(Failing(tmp_path), tmp_path)
    changed.note(name)
    with pytest.raises(FailedSyncError, match="t/0/file"):
        changed.sync()


def test_dirty_files_without_changes_syncs_nothing(io: SyncIO, tmp_path: Path) -> None:
    dirty_files(io, tmp_path).sync()
    assert io.synced == []
