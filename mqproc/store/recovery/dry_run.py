"""Dry run of storage calls: changes stay in this process and are visible to later reads.

Written bytes overlay the real bytes (`shadow_file`); created, moved and removed names overlay the real names. So
recovery can run unchanged on a store of any size, and `changes` then lists the effects. Written bytes take space in the
folder for temporary files.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Self

import numpy as np

from mqproc.errors import StoreAccessError
from mqproc.io.store_io import FailedSyncError, FolderEntry, Kind, StoreIO
from mqproc.paths import owner_of_files

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

# Overlay of a file in a dry run: written pages, and the real file's elsewhere.
#
# Written pages of all files share one temporary file, so that tens of thousands of files need no descriptor each. A
# mapped file needs one: it is mapped privately, or copied to a temporary file of its own if its length differs.


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
        with self._io.opened(self.origin) as fd:
            return bytearray(self._io.pread(fd, shown, offset).ljust(size, b"\0"))

    def next_data(self, offset: int) -> int | None:
        """Position of the next byte at or after `offset` that may be nonzero; None without one."""
        if self._copy is not None:
            return self._io.next_data(self._copy.fileno(), offset) if offset < self.size else None
        if self._is_mapped_for_writing:
            return offset if offset < self.size else None
        found = [max(offset, page * _PAGE) for page in self._pages if (page + 1) * _PAGE > offset]
        if self.origin is not None and offset < self._visible:
            with self._io.opened(self.origin) as fd:
                original = self._io.next_data(fd, offset)
            if original is not None and original < self._visible:
                found.append(original)
        return min((place for place in found if place < self.size), default=None)

    def next_hole(self, offset: int) -> int:
        """End of the possibly nonzero bytes from `offset` on; may be too early."""
        page, end = offset // _PAGE, self.size
        if self._copy is not None:
            end = self._io.next_hole(self._copy.fileno(), offset)
        elif page in self._pages and not self._is_mapped_for_writing:
            while page in self._pages:
                page += 1
            end = page * _PAGE
        elif self.origin is not None and offset < self._visible and not self._is_mapped_for_writing:
            with self._io.opened(self.origin) as fd:
                end = min(self._io.next_hole(fd, offset), self._visible)
        return min(end, self.size)

    def drop_cache(self, offset: int, size: int) -> None:
        """Drop the real file's clean pages from the page cache, so that its holes are known again."""
        if self.origin is not None:
            with self._io.opened(self.origin) as fd:
                self._io.drop_cache(fd, offset, size)

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
        after = self.read(offset + len(data), (last + 1) * _PAGE - offset - len(data))
        whole = (before + data + after).ljust((last + 1 - first) * _PAGE, b"\0")
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
            with self._io.opened(self.origin) as fd:
                if not self._io.holes_allocate_on_read(fd):
                    self._mapping = _Map(fd, size, access=mmap.ACCESS_COPY)
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


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a file: made, changed, removed or moved, with lengths before and after.

    Bytes differ within [first, stop), `differing` of them. A moved folder is one change; of a removed one every file
    is.
    """

    path: Path
    what: str
    was: int
    size: int
    first: int = 0
    stop: int = 0
    differing: int = 0
    target: Path | None = None
    in_place: bool = False
    """Whether the file's own bytes are overwritten, at least temporarily; else only its name gets another file."""


class DryRunIO(StoreIO):
    """A StoreIO for one folder, to be used as a context manager."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._storage = StoreIO()
        self._arena = Arena(self._storage)
        self._shadows: dict[Path, ShadowFile] = {}
        self._folders: set[Path] = set()
        self._inside: dict[Path, set[Path]] = {}
        """Overlaid names by folder."""
        self._gone: set[Path] = set()
        self._gone_folders: set[Path] = set()
        self._moved_folders: list[tuple[Path, Path]] = []
        self._stored: set[Path] = set()
        self._fds: dict[int, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Discard all changes."""
        for shadow in self._shadows.values():
            shadow.close()
        self._shadows.clear()
        self._arena.close()

    # Changes

    def changes(self) -> list[Change]:
        """All changed files, sorted by name."""
        found = [change for path, shadow in self._shadows.items() for change in self._changes_of(path, shadow)]
        found += [Change(source, "moved", 0, 0, target=target) for source, target in self._moved_folders]
        known = {change.path for change in found} | self._shadows.keys()
        gone = self._gone - {source for source, _target in self._moved_folders}
        # A file may have been removed before its folder.
        files = {file for path in gone for file in (path.rglob("*") if path.is_dir() else [path])}
        found += [self._removal(file) for file in files - known if file.is_file()]
        return sorted(found, key=lambda change: change.path)

    def _removal(self, path: Path) -> Change:
        return Change(path, "removed", super().size_of(path), 0, in_place=path in self._stored)

    def _changes_of(self, path: Path, shadow: ShadowFile) -> Iterator[Change]:
        origin = shadow.origin
        if origin is not None and origin != path:
            was = super().size_of(origin)
            yield Change(origin, "moved", was, shadow.size, target=path, in_place=origin in self._stored)
        if not path.is_file():
            if origin is None:
                yield Change(path, "made", 0, shadow.size)
        elif shadow.changed or origin != path:
            yield from self._difference(path, shadow)

    def _difference(self, path: Path, shadow: ShadowFile) -> Iterator[Change]:
        was, first, stop, differing = super().size_of(path), -1, 0, 0
        with self._storage.opened(path) as fd:
            for at in self._pieces(fd, was, shadow.size):
                before, after = self._before(fd, at), shadow.read(at, _CHUNK)
                if before != after:
                    places = _diff(before, after)
                    first = at + places[0] if first < 0 else first
                    stop = at + places[1]
                    differing += places[2]
        if was > shadow.size:
            first, stop = shadow.size if first < 0 else first, was
        if first >= 0:
            yield Change(path, "changed", was, shadow.size, first, stop, differing, in_place=path in self._stored)

    def _before(self, fd: int, at: int) -> bytes:
        """A piece of the real file; empty if the disk cannot read it."""
        try:
            return super().pread(fd, _CHUNK, at)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return b""

    def _pieces(self, fd: int, was: int, size: int) -> Iterator[int]:
        """Offsets of pieces to compare; of a truncated part only those that were ever written."""
        yield from range(0, size, _CHUNK)
        at = -(-size // _CHUNK) * _CHUNK
        while at < was and (data := super().next_data(fd, at)) is not None:
            at = max(at, data - data % _CHUNK)
            yield at
            at += _CHUNK

    # Files by name

    def _is_gone(self, path: Path) -> bool:
        return path in self._gone or (
            bool(self._gone_folders) and any(parent in self._gone_folders for parent in path.parents)
        )

    def _is_real(self, path: Path) -> bool:
        """Whether the real file or folder of this name is visible."""
        return not self._is_gone(path) and path not in self._shadows

    def exists(self, path: Path) -> bool:
        return path in self._shadows or path in self._folders or (self._is_real(path) and super().exists(path))

    def size_of(self, path: Path) -> int:
        shadow = self._shadows.get(path)
        if shadow is not None:
            return shadow.size
        self._require(path)
        return super().size_of(path)

    def allocated_of(self, path: Path) -> int:
        return self.size_of(path) if path in self._shadows else super().allocated_of(path)

    def names(self, folder: Path) -> list[str]:
        return [entry.name for entry in self.entries(folder)]

    def entries(self, folder: Path) -> list[FolderEntry]:
        real = super().entries(folder) if not self._is_gone(folder) else []
        found = {entry.name: entry for entry in real if folder / entry.name not in self._gone}
        for path in self._inside.get(folder, ()):
            if (entry := self.entry(path)) is not None:
                found[path.name] = entry
        return [found[name] for name in sorted(found)]

    def entry(self, path: Path) -> FolderEntry | None:
        shadow = self._shadows.get(path)
        if shadow is not None:
            return FolderEntry(path.name, Kind.FILE, shadow.size, owner_of_files(self._root))
        if path in self._folders:
            return FolderEntry(path.name, Kind.FOLDER, 0, owner_of_files(self._root))
        return super().entry(path) if not self._is_gone(path) else None

    def make_folder(self, folder: Path, mode: int = 0o755, *, sync: bool = True) -> None:
        while not self.exists(folder):
            self._add_folder(folder)
            folder = folder.parent

    def read_file(self, path: Path) -> bytes:
        shadow = self._shadows.get(path)
        if shadow is not None:
            return shadow.read(0, shadow.size)
        self._require(path)
        return super().read_file(path)

    def write_file_atomically(
        self, path: Path, data: bytes, mode: int = 0o644, failed: Callable[[FailedSyncError], object] | None = None
    ) -> None:
        self._new(path).write(0, data)

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None:
        if (entry := self.entry(source)) is None:
            raise _not_found(source)
        if entry.kind is not Kind.FILE:
            self._folders.discard(source)
            self._add_folder(target)
            self._moved_folders.append((source, target))
        else:
            shadow = self._shadow(source)
            self._forget(target)
            self._add(target, shadow)
            del self._shadows[source]
            self._gone.discard(target)
        if super().exists(source):
            self._hide(source)

    def unlink(self, path: Path) -> None:
        self._forget(path)
        if super().exists(path):
            self._hide(path)

    def keep_link(self, path: Path, target: Path) -> None:
        if self.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        self.write_file_atomically(target, self.read_file(path))

    def make_link(self, path: Path, target: str) -> None:
        return

    def remove_folder(self, folder: Path) -> None:
        for path in [path for path in self._shadows if folder in path.parents]:
            self._shadows.pop(path).close()
        self._folders = {path for path in self._folders if path != folder and folder not in path.parents}
        if super().exists(folder):
            self._hide(folder)

    def sync_folder(self, folder: Path) -> None:
        return

    def disk_usage(self, folder: Path) -> tuple[int, int]:
        """Usage of the store's file system: the folder may exist only in the overlay."""
        return super().disk_usage(self._root)

    # Descriptors

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        if not self.exists(path):
            if not create:
                raise _not_found(path)
            if not self.exists(path.parent):
                raise _not_found(path.parent)
            self._new(path)
        inside = path == self._root or self._root in path.parents
        is_real = inside and self._is_real(path) and super().exists(path)
        fd = super().open(path if is_real else Path(os.devnull))
        self._fds[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self._fds.pop(fd, None)
        super().close(fd)

    def size(self, fd: int) -> int:
        shadow = self._shadow_of(fd)
        return super().size(fd) if shadow is None else shadow.size

    def is_unreachable(self, fd: int) -> bool:
        return False

    def path_of(self, fd: int) -> str:
        return str(self._fds[fd]) if fd in self._fds else super().path_of(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        shadow = self._shadow_of(fd)
        return super().pread(fd, size, offset) if shadow is None else shadow.read(offset, size)

    def pread_into(self, fd: int, buffer: Buffer, offset: int) -> int:
        shadow = self._shadow_of(fd)
        if shadow is None:
            return super().pread_into(fd, buffer, offset)
        view = memoryview(buffer).cast("B")
        data = shadow.read(offset, len(view))
        view[: len(data)] = data
        return len(data)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> None:
        self._writable_shadow(fd).write(offset, bytes(data))

    def zero(self, fd: int, offset: int, size: int) -> None:
        shadow = self._shadow(self._fds[fd])
        end = min(offset + size, shadow.size)
        for at in range(offset, end, _CHUNK):
            length = min(_CHUNK, end - at)
            # Pages of zeros need no copy.
            if any(shadow.read(at, length)):
                self._writable_shadow(fd).write(at, bytes(length))

    def next_data(self, fd: int, offset: int) -> int | None:
        shadow = self._shadow_of(fd)
        return super().next_data(fd, offset) if shadow is None else shadow.next_data(offset)

    def next_hole(self, fd: int, offset: int) -> int:
        shadow = self._shadow_of(fd)
        return super().next_hole(fd, offset) if shadow is None else shadow.next_hole(offset)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        if self._shadow_of(fd) is not None or offset + size > self.size(fd):
            self._writable_shadow(fd).allocate(offset, size)

    def set_size(self, fd: int, size: int) -> None:
        self._writable_shadow(fd).resize(size)

    def _sync_with(self, call: Callable[[int], None], fd: int) -> None:
        return

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        return

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        shadow = self._shadow_of(fd)
        if shadow is None:
            super().drop_cache(fd, offset, size)
        else:
            shadow.drop_cache(offset, size)

    # Maps

    def map(self, fd: int, size: int, *, write: bool = False) -> mmap.mmap:
        shadow = self._writable_shadow(fd) if write else self._shadow(self._fds[fd])
        return shadow.map(size, write=write)

    def map_without_filling_holes(self, fd: int, size: int) -> mmap.mmap:
        return self.map(fd, size)

    def release_pages(self, mapping: mmap.mmap, offset: int, size: int) -> None:
        # Written pages would be lost, and it is unknown which.
        return

    # Shadows

    def _require(self, path: Path) -> None:
        if self._is_gone(path):
            raise _not_found(path)

    def _shadow_of(self, fd: int) -> ShadowFile | None:
        path = self._fds.get(fd)
        return None if path is None else self._shadows.get(path)

    def _shadow(self, path: Path) -> ShadowFile:
        """The overlay of a file, created on first use."""
        if path not in self._shadows:
            self._require(path)
            self._add(path, ShadowFile(self._storage, self._arena, path))
        return self._shadows[path]

    def _writable_shadow(self, fd: int) -> ShadowFile:
        """The overlay of a file that is about to be written."""
        shadow = self._shadow(self._fds[fd])
        if shadow.origin is not None:
            self._stored.add(shadow.origin)
        return shadow

    def _new(self, path: Path) -> ShadowFile:
        self._forget(path)
        shadow = ShadowFile(self._storage, self._arena, None)
        self._add(path, shadow)
        self._gone.discard(path)
        return shadow

    def _add(self, path: Path, shadow: ShadowFile) -> None:
        self._shadows[path] = shadow
        self._inside.setdefault(path.parent, set()).add(path)

    def _add_folder(self, folder: Path) -> None:
        self._folders.add(folder)
        self._inside.setdefault(folder.parent, set()).add(folder)

    def _hide(self, path: Path) -> None:
        """Hide a real name and everything below it."""
        self._gone.add(path)
        if path.is_dir():
            self._gone_folders.add(path)

    def _forget(self, path: Path) -> None:
        shadow = self._shadows.pop(path, None)
        if shadow is not None:
            shadow.close()


def _not_found(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _diff(before: bytes, after: bytes) -> tuple[int, int, int]:
    """(first, end, number) of differing bytes; the shorter piece is padded with zeros."""
    size = max(len(before), len(after))
    pieces = [np.frombuffer(each.ljust(size, b"\0"), np.uint8) for each in (before, after)]
    places = np.flatnonzero(pieces[0] != pieces[1])
    if not len(places):
        return min(len(before), len(after)), size, 0
    return int(places[0]), int(places[-1]) + 1, len(places)
