"""StoreIOs that note every sync, fail calls as a test tells them, or have no room."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from mqproc.io.store_io import FailedSyncError, StoreIO


class FaultyIO(StoreIO):
    """`synced` holds the paths of all syncs that were tried, folders with a slash behind, file systems with a star.

    `failing` and `refusing` map a part of a path to the errno that a sync, or an open or allocation, fails with.
    `before_sync` is called with the path first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []
        self.failing: dict[str, int] = {}
        self.refusing: dict[str, int] = {}
        self.before_sync: Callable[[str], None] = lambda path: None

    def sync(self, fd: int) -> None:
        self._note(self.path_of(fd))
        super().sync(fd)

    def sync_folder(self, folder: Path) -> None:
        self._note(f"{folder}/")
        super().sync_folder(folder)

    def sync_file_system(self, fd: int) -> None:
        self._note(f"{self.path_of(fd)}*")
        super().sync_file_system(fd)

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        self._fail(str(path), self.refusing)
        return super().open(path, write=write, create=create, mode=mode)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._fail(self.path_of(fd), self.refusing)
        super().allocate(fd, offset, size)

    def tried(self, part: str = "") -> list[str]:
        """Paths with `part` that were synced since the last question, without the folders above the last one."""
        found = [path for path in self.synced if part in path]
        self.synced.clear()
        return [Path(path).name + "/" * path.endswith("/") for path in found]

    def _note(self, path: str) -> None:
        self.synced.append(path)
        self.before_sync(path)
        self._fail(path, self.failing, FailedSyncError)

    def _fail(self, path: str, faults: dict[str, int], error: type[OSError] = OSError) -> None:
        for part, number in faults.items():
            if part in path:
                raise error(number, os.strerror(number))


class NoRoomForQueues(StoreIO):
    """A full disk to ConsumeQueues, and to nothing else."""

    def allocate(self, fd: int, offset: int, size: int) -> None:
        if "/consumequeue/" in self.path_of(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, offset, size)
