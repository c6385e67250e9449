"""StoreIOs that record syncs, fail chosen calls, have no room, or have unreadable pages."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mqproc.io.store_io import FailedSyncError, StoreIO


class FaultyIO(StoreIO):
    """Record every sync and fail chosen calls.

    `synced` holds the paths of all attempted syncs; a folder ends with a slash, a file system with a star.
    `failing` maps a part of a path to the errno of its syncs, `refusing` to the errno of opening and allocating.
    `before_sync` is called with the path before each sync.
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
        """Return the names of synced paths that contain `part`, and forget all syncs."""
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
    """A disk that is full for ConsumeQueues only."""

    def allocate(self, fd: int, offset: int, size: int) -> None:
        if "/consumequeue/" in self.path_of(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, offset, size)


PAGE: Final = 4096


class BadSectors(StoreIO):
    """Fail reads of the pages in `lost`, also after a rename; `tried` counts these reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[tuple[int, int]] = set()
        self.tried = 0

    def lose(self, path: Path, page: int) -> None:
        """Make a page of a file unreadable."""
        self.lost.add((path.stat().st_ino, page))

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._fail_if_lost(fd, size, offset)
        return super().pread(fd, size, offset)

    def pread_into(self, fd: int, buffer: Any, offset: int) -> int:
        self._fail_if_lost(fd, len(buffer), offset)
        return super().pread_into(fd, buffer, offset)

    def _fail_if_lost(self, fd: int, size: int, offset: int) -> None:
        pages = range(offset // PAGE, (offset + size - 1) // PAGE + 1)
        if any(inode == os.fstat(fd).st_ino and page in pages for inode, page in self.lost):
            self.tried += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.path_of(fd))
