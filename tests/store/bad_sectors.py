"""A StoreIO whose disk cannot read some pages."""

from __future__ import annotations

import errno
import os
from typing import Final

from mqproc.io import StoreIO

PAGE: Final = 4096


class BadSectors(StoreIO):
    """Reads that touch a page of `lost`, which has (name in a path, page), fail; `tried` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[tuple[str, int]] = set()
        self.tried = 0

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        path = self.path_of(fd)
        pages = range(offset // PAGE, (offset + size - 1) // PAGE + 1)
        if any(name in path and page in pages for name, page in self.lost):
            self.tried += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().pread(fd, size, offset)
