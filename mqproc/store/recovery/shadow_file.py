"""Overlay of a file in a dry run: written pages, and the real file's elsewhere.

Written pages of all files share one temporary file, so that tens of thousands of files need no descriptor each. A
mapped file needs one: it is mapped privately, or copied to a temporary file of its own if its length differs.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from mqproc.errors import StoreAccessError
from mqproc.io.store_io import StoreIO

_PAGE: Final = 4096
_CHUNK: Final = 1 << 20
_IN_THE_MAP: Final = -1


class Arena:
    """Temporary file for the written pages of all files."""

    def __init__(self, io: StoreIO) -> None:
        self._io = io
        self._file: BinaryIO | None = None
        self._end = 0

    def append(self, pages: bytes) -> int:
        """Append whole pages; return their position. Raises StoreAccessError if there is no space."""
        place = self._end
        self.write(place, pages)
        self._end += len(pages)
        return place

    def write(self, place: int, data: bytes) -> None:
        """Overwrite pages appended before."""
        with _temporary_space():
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
            self._io.pwrite(self._file.fileno(), data, place)

    def read(self, place: int, size: int) -> bytes:
        assert self._file is not None
        return self._io.pread(self._file.fileno(), size, place)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Map(mmap.mmap):
    """A shared map: `close` does nothing, so that one user cannot close it for the others."""

    def close(self) -> None:
        return


class ShadowFile:
    """Overlay of one file. `origin`: the real file; `changed`: whether it was written."""

    def __init__(self, io: StoreIO, arena: Arena, origin: Path | None) -> None:
        self._io = io
        self._arena = arena
        self.origin = origin
        self.changed = origin is None
        self.size = 0 if origin is None else io.size_of(origin)
        # Length of the real file that is still visible. Written pages are in the arena, or in the map.
        self._visible = self.size
        self._pages: dict[int, int] = {}
        self._mapping: mmap.mmap | None = None
        self._is_mapped_for_writing = False
        self._copy: BinaryIO | None = None

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()

    # Bytes

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer at the file's end."""
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        if self._mapping is not None:
            return self._mapping[offset : offset + size]
        found = self._original(offset, size)
        for page in range(offset // _PAGE, (offset + size - 1) // _PAGE + 1) if self._pages else ():
            if (place := self._pages.get(page)) is not None:
                start, stop = max(offset, page * _PAGE), min(offset + size, (page + 1) * _PAGE)
                found[start - offset : stop - offset] = self._arena.read(place + start % _PAGE, stop - start)
        return bytes(found)

    def _original(self, offset: int, size: int) -> bytearray:
        shown = min(size, self._visible - offset)
        if self.origin is None or shown <= 0:
            return bytearray(size)
        fd = self._io.open(self.origin)
        try:
            return bytearray(self._io.pread(fd, shown, offset).ljust(size, b"\0"))
        finally:
            self._io.close(fd)

    def next_data(self, offset: int) -> int | None:
        """Position of the next byte at or after `offset` that may be nonzero; None without one."""
        if self._copy is not None:
            return self._io.next_data(self._copy.fileno(), offset) if offset < self.size else None
        if self._is_mapped_for_writing:
            return offset if offset < self.size else None
        found = [max(offset, page * _PAGE) for page in self._pages if (page + 1) * _PAGE > offset]
        original = self._ask_original(offset, self._io.next_data) if offset < self._visible else None
        if original is not None and original < self._visible:
            found.append(original)
        return min((place for place in found if place < self.size), default=None)

    def next_hole(self, offset: int) -> int:
        """End of the possibly nonzero bytes from `offset` on; may be too early."""
        page, end = offset // _PAGE, self.size
        if self._copy is not None:
            end = self._io.next_hole(self._copy.fileno(), offset)
        elif self._is_mapped_for_writing:
            end = self.size
        elif page in self._pages:
            while page in self._pages:
                page += 1
            end = page * _PAGE
        elif offset < self._visible:
            end = min(self._ask_original(offset, self._io.next_hole) or self._visible, self._visible)
        return min(end, self.size)

    def drop_cache(self, offset: int, size: int) -> None:
        """Drop the real file's clean pages from the page cache, so that its holes are known again."""

        def drop(fd: int, start: int) -> None:
            self._io.drop_cache(fd, start, size)

        if self.origin is not None:
            self._ask_original(offset, drop)

    def _ask_original(self, offset: int, ask: Callable[[int, int], int | None]) -> int | None:
        assert self.origin is not None
        fd = self._io.open(self.origin)
        try:
            return ask(fd, offset)
        finally:
            self._io.close(fd)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes, extending the file if needed. Raises StoreAccessError if there is no space."""
        self.changed = True
        if offset + len(data) > self.size:
            self.resize(offset + len(data))
        if not data:
            return
        if self._copy is not None:
            # A store into its map would kill the process if the disk is full.
            with _temporary_space():
                self._io.pwrite(self._copy.fileno(), data, offset)
        elif self._mapping is not None:
            self._mapping[offset : offset + len(data)] = data
            self._pages |= dict.fromkeys(range(offset // _PAGE, (offset + len(data) - 1) // _PAGE + 1), _IN_THE_MAP)
        else:
            self._write_pages(offset, data)

    def _write_pages(self, offset: int, data: bytes) -> None:
        first, last = offset // _PAGE, (offset + len(data) - 1) // _PAGE
        before = self.read(first * _PAGE, offset % _PAGE)
        behind = self.read(offset + len(data), (last + 1) * _PAGE - offset - len(data))
        whole = (before + data + behind).ljust((last + 1 - first) * _PAGE, b"\0")
        if self._pages.keys().isdisjoint(range(first, last + 1)):
            place = self._arena.append(whole)
            self._pages |= {page: place + (page - first) * _PAGE for page in range(first, last + 1)}
            return
        for page in range(first, last + 1):
            part = whole[(page - first) * _PAGE :][:_PAGE]
            if page in self._pages:
                self._arena.write(self._pages[page], part)
            else:
                self._pages[page] = self._arena.append(part)

    # Length

    def resize(self, size: int) -> None:
        """Change the length; new bytes are zeros. Existing maps keep their content."""
        self.changed = True
        if self._mapping is not None or self._copy is not None:
            if size > self.size:
                self._grow(size)
        elif size < self.size:
            self._visible = min(self._visible, size)
            kept = -(-size // _PAGE)
            self._pages = {page: place for page, place in self._pages.items() if page < kept}
            if (place := self._pages.get(size // _PAGE)) is not None:
                self._arena.write(place + size % _PAGE, bytes(_PAGE - size % _PAGE))
        self.size = size

    def _grow(self, size: int) -> None:
        fd = self._own_file()
        if self.size < self._io.size(fd):
            self._io.zero(fd, self.size, self._io.size(fd) - self.size)
        self._io.set_size(fd, size)
        self._mapping = _Map(fd, size)

    def allocate(self, offset: int, size: int) -> None:
        """Allocate space for later stores into a map. Raises StoreAccessError without it."""
        if offset + size > self.size:
            self.resize(offset + size)
        if self._copy is not None:
            with _temporary_space():
                self._io.allocate(self._copy.fileno(), offset, size)

    # Maps

    def map(self, size: int, *, write: bool) -> mmap.mmap:
        """Map the file from its start; writes and stores into the map are visible to each other."""
        if not 0 < size <= self.size:
            raise ValueError("mmap length is greater than file size")
        self.changed |= write
        self._is_mapped_for_writing |= write
        if self._mapping is None and not self._pages and self.origin is not None and size == self._visible == self.size:
            fd = self._io.open(self.origin)
            try:
                if not self._io.holes_allocate_on_read(fd):
                    self._mapping = _Map(fd, size, access=mmap.ACCESS_COPY)
            finally:
                self._io.close(fd)
        if self._mapping is None or len(self._mapping) != size:
            fd = self._own_file()
            return self._mapping if self._mapping is not None and len(self._mapping) == size else _Map(fd, size)
        return self._mapping

    def _own_file(self) -> int:
        """Temporary file with the whole content; existing maps are no longer shared."""
        if self._copy is None:
            with _temporary_space():
                own = tempfile.TemporaryFile()  # noqa: SIM115
                for at in range(0, self.size, _CHUNK):
                    data = self.read(at, _CHUNK)
                    if data.count(0) < len(data):
                        self._io.pwrite(own.fileno(), data, at)
                self._io.set_size(own.fileno(), self.size)
            self._copy = own
            self._pages.clear()
            self._mapping = _Map(own.fileno(), self.size) if self.size else None
        return self._copy.fileno()


@contextlib.contextmanager
def _temporary_space() -> Iterator[None]:
    """Convert a full temporary disk to an error that recovery does not take for a full store."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = tempfile.gettempdir()
        text = f"{folder}: {error.strerror}: the plan stores changed data there; set TMPDIR to another folder"
        raise StoreAccessError(text) from error
