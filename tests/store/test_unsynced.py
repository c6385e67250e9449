"""What recovery has changed is synced, and nothing else; the whole file system only for very many files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.store.sync_guard import SINGLE_SYNCS_MAX, DirtyFiles


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
