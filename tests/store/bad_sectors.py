"""A StoreIO whose disk cannot read some pages."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Final

from mqproc.io.store_io import StoreIO

PAGE: Final = 4096


class BadSectors(StoreIO):
    """Reads that touch a page of `lost` fail, under whatever name the file has by then; `tried` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[tuple[int, int]] = set()
        self.tried = 0

    def lose(self, path: Path, page: int) -> None:
        """From now on a page of a file cannot be read."""
        self.lost.add((path.stat().st_ino, page))

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._look(fd, size, offset)
        return super().pread(fd, size, offset)

    def pread_into(self, fd: int, buffer: Any, offset: int) -> int:
        self._look(fd, len(buffer), offset)
        return super().pread_into(fd, buffer, offset)

    def _look(self, fd: int, size: int, offset: int) -> None:
        pages = range(offset // PAGE, (offset + size - 1) // PAGE + 1)
        if any(inode == os.fstat(fd).st_ino and page in pages for inode, page in self.lost):
            self.tried += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.path_of(fd))
