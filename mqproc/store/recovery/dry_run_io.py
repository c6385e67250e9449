"""Storage calls that change nothing: what is written stays in this process, and is there for whoever reads after it.

A file that is changed is mapped privately: its pages are the file's own until they are stored to. A new one lies in a
temporary file without a name. Names that are made, moved or removed are kept in a table in front of the real ones.
So recovery can do its real work on a store of any size, and afterwards `changes` tells what it would have done.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import numpy as np

from mqproc.io import Entry, Kind, StoreIO

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

_CHUNK: Final = 1 << 20
_NOTHING: Final = b""


@dataclass(frozen=True, slots=True)
class Change:
    """What would become of a file: made, changed, removed or moved. `size` and `was` are lengths before and after.

    Bytes that differ lie in [first, stop); `differing` is how many they are.
    """

    path: Path
    what: str
    was: int
    size: int
    first: int = 0
    stop: int = 0
    differing: int = 0
    target: Path | None = None


class _Shadow:
    """One file as it is for this process."""

    def __init__(self, origin: Path | None, mapping: mmap.mmap | None, size: int) -> None:
        self.origin = origin
        self.mapping = mapping
        self.size = size
        self.changed = origin is None
        self.temporary: BinaryIO | None = None

    def read(self, offset: int, size: int) -> bytes:
        if self.mapping is None or offset >= self.size:
            return _NOTHING
        return self.mapping[offset : min(offset + size, self.size)]

    def close(self) -> None:
        if self.temporary is not None:
            self.temporary.close()


class DryRunIO(StoreIO):
    """A StoreIO below one folder. Close it to let go of what it holds."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self._shadows: dict[Path, _Shadow] = {}
        self._folders: set[Path] = set()
        self._gone: set[Path] = set()
        self._moved: list[tuple[Path, Path]] = []
        self._fds: dict[int, Path] = {}

    def close_all(self) -> None:
        """Forget everything."""
        for shadow in self._shadows.values():
            shadow.close()
        self._shadows.clear()

    # What would change

    def changes(self) -> list[Change]:
        """Every file that would be another one, by name."""
        found = [change for path, shadow in self._shadows.items() if (change := self._change_of(path, shadow))]
        moved = {source for source, _target in self._moved}
        found += [
            Change(path, "removed", super(DryRunIO, self).size_of(path), 0)
            for path in self._gone
            if path not in moved and path not in self._shadows and path.is_file()
        ]
        return sorted(found, key=lambda change: change.path)

    def _change_of(self, path: Path, shadow: _Shadow) -> Change | None:
        if shadow.origin is None:
            was = super().size_of(path) if path.is_file() else 0
            if not path.is_file():
                return Change(path, "made", 0, shadow.size)
            return self._difference(path, path, shadow, was)
        if shadow.origin != path:
            was = super().size_of(shadow.origin)
            return Change(shadow.origin, "moved", was, shadow.size, target=path)
        was = super().size_of(path)
        return self._difference(path, path, shadow, was) if shadow.changed else None

    def _difference(self, path: Path, origin: Path, shadow: _Shadow, was: int) -> Change | None:
        first, stop, differing = -1, 0, 0
        fd = super().open(origin)
        try:
            for at in range(0, max(was, shadow.size), _CHUNK):
                before, after = super().pread(fd, _CHUNK, at), shadow.read(at, _CHUNK)
                if before == after:
                    continue
                places = _differing(before, after)
                first = at + places[0] if first < 0 else first
                stop = at + places[1]
                differing += places[2]
        finally:
            super().close(fd)
        if first < 0 and was == shadow.size:
            return None
        return Change(path, "changed", was, shadow.size, max(first, 0), stop, differing)

    # Files by name

    def _is_gone(self, path: Path) -> bool:
        return path in self._gone or any(parent in self._gone for parent in path.parents)

    def _real(self, path: Path) -> bool:
        """Whether the real file or folder of this name counts."""
        return not self._is_gone(path) and path not in self._shadows

    def exists(self, path: Path) -> bool:
        return path in self._shadows or path in self._folders or (self._real(path) and super().exists(path))

    def size_of(self, path: Path) -> int:
        shadow = self._shadows.get(path)
        if shadow is not None:
            return shadow.size
        self._need(path)
        return super().size_of(path)

    def allocated_of(self, path: Path) -> int:
        return self.size_of(path) if path in self._shadows else super().allocated_of(path)

    def names(self, folder: Path) -> list[str]:
        return [entry.name for entry in self.entries(folder)]

    def entries(self, folder: Path) -> list[Entry]:
        real = super().entries(folder) if not self._is_gone(folder) else []
        found = {entry.name: entry for entry in real if self._real(folder / entry.name)}
        for path in [*self._shadows, *self._folders]:
            if path.parent == folder and (entry := self.entry(path)) is not None:
                found[path.name] = entry
        return [found[name] for name in sorted(found)]

    def entry(self, path: Path) -> Entry | None:
        shadow = self._shadows.get(path)
        if shadow is not None:
            return Entry(path.name, Kind.FILE, shadow.size, os.geteuid())
        if path in self._folders:
            return Entry(path.name, Kind.FOLDER, 0, os.geteuid())
        return super().entry(path) if not self._is_gone(path) else None

    def make_folder(self, folder: Path, mode: int = 0o755, *, sync: bool = True) -> None:
        while not self.exists(folder):
            self._folders.add(folder)
            folder = folder.parent

    def read_file(self, path: Path) -> bytes:
        shadow = self._shadows.get(path)
        if shadow is not None:
            return shadow.read(0, shadow.size)
        self._need(path)
        return super().read_file(path)

    def write_file_atomically(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        shadow = self._new(path)
        self._resize(shadow, len(data))
        self._store(shadow, data, 0)

    def rename(self, source: Path, target: Path) -> None:
        if self._is_folder(source):
            self._folders.add(target)
        else:
            shadow = self._shadow(source)
            self._forget(target)
            self._shadows[target] = self._shadows.pop(source, shadow)
            self._gone.discard(target)
        if super().exists(source):
            self._gone.add(source)
            self._moved.append((source, target))

    def _is_folder(self, path: Path) -> bool:
        entry = self.entry(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return entry.kind is not Kind.FILE

    def unlink(self, path: Path) -> None:
        self._forget(path)
        if super().exists(path):
            self._gone.add(path)

    def make_link(self, path: Path, target: str) -> None:
        return

    def remove_folder(self, folder: Path) -> None:
        for path in [path for path in self._shadows if folder in path.parents]:
            self._shadows.pop(path).close()
        self._folders = {path for path in self._folders if path != folder and folder not in path.parents}
        if super().exists(folder):
            self._gone.add(folder)

    def sync_folder(self, folder: Path) -> None:
        return

    # Descriptors

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        if path not in self._shadows and not (self._real(path) and super().exists(path)):
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            self._need_folder(path.parent)
            self._new(path)
        inside = path == self._root or self._root in path.parents
        real = path if path not in self._shadows and inside else Path(os.devnull)
        fd = super().open(real)
        self._fds[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self._fds.pop(fd, None)
        super().close(fd)

    def size(self, fd: int) -> int:
        shadow = self._shadow_of(fd)
        return super().size(fd) if shadow is None else shadow.size

    def is_out_of_reach(self, fd: int) -> bool:
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
        view = memoryview(data).cast("B")
        shadow = self._shadow(self._fds[fd])
        if offset + len(view) > shadow.size:
            self._resize(shadow, offset + len(view))
        self._store(shadow, view, offset)

    def zero(self, fd: int, offset: int, size: int) -> None:
        shadow = self._shadow(self._fds[fd])
        end = min(offset + size, shadow.size)
        for at in range(offset, end, _CHUNK):
            wanted = min(_CHUNK, end - at)
            # Pages that are zeros already need no copy.
            if any(shadow.read(at, wanted)):
                self._store(shadow, bytes(wanted), at)

    def next_data(self, fd: int, offset: int) -> int | None:
        shadow = self._shadow_of(fd)
        if shadow is None:
            return super().next_data(fd, offset)
        return offset if offset < shadow.size else None

    def next_hole(self, fd: int, offset: int) -> int:
        shadow = self._shadow_of(fd)
        return super().next_hole(fd, offset) if shadow is None else shadow.size

    def allocate(self, fd: int, offset: int, size: int) -> None:
        shadow = self._shadow_of(fd)
        now = super().size(fd) if shadow is None else shadow.size
        if offset + size > now:
            self._resize(self._shadow(self._fds[fd]), offset + size)

    def set_size(self, fd: int, size: int) -> None:
        self._resize(self._shadow(self._fds[fd]), size)

    def sync(self, fd: int) -> None:
        return

    def sync_file_system(self, fd: int) -> None:
        return

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        return

    # Maps

    def map(self, fd: int, size: int, *, write: bool = False) -> mmap.mmap:
        path = self._fds[fd]
        shadow = self._shadow(path)
        shadow.changed |= write
        if shadow.mapping is None or size > shadow.size:
            raise ValueError("mmap length is greater than file size")
        return shadow.mapping

    def unmap_pages(self, mapping: mmap.mmap, offset: int, size: int) -> None:
        # Stored pages would be lost, and which those are nobody knows.
        return

    # Shadows

    def _need(self, path: Path) -> None:
        if self._is_gone(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _need_folder(self, folder: Path) -> None:
        if not self.exists(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))

    def _shadow_of(self, fd: int) -> _Shadow | None:
        path = self._fds.get(fd)
        return None if path is None else self._shadows.get(path)

    def _shadow(self, path: Path) -> _Shadow:
        """The file as it is for this process; from now on it is what counts."""
        found = self._shadows.get(path)
        if found is not None:
            return found
        self._need(path)
        fd = super().open(path)
        try:
            size = super().size(fd)
            shadow = _Shadow(path, self.map_privately(fd, size) if size else None, size)
        finally:
            super().close(fd)
        self._shadows[path] = shadow
        return shadow

    def _new(self, path: Path) -> _Shadow:
        self._forget(path)
        shadow = _Shadow(None, None, 0)
        self._shadows[path] = shadow
        self._gone.discard(path)
        return shadow

    def _forget(self, path: Path) -> None:
        shadow = self._shadows.pop(path, None)
        if shadow is not None:
            shadow.close()

    def _store(self, shadow: _Shadow, data: Buffer, offset: int) -> None:
        view = memoryview(data).cast("B")
        if len(view):
            assert shadow.mapping is not None
            shadow.mapping[offset : offset + len(view)] = bytes(view)
        shadow.changed = True

    def _resize(self, shadow: _Shadow, size: int) -> None:
        """Give a file another length. One that grows moves to a temporary file; maps of before still show it."""
        shadow.changed = True
        if size <= shadow.size:
            shadow.size = size
            return
        if shadow.temporary is None:
            shadow.temporary = tempfile.TemporaryFile()  # noqa: SIM115
            for at, data in _filled(shadow):
                super().pwrite(shadow.temporary.fileno(), data, at)
        fd = shadow.temporary.fileno()
        if shadow.mapping is not None and shadow.size < super().size(fd):
            super().zero(fd, shadow.size, super().size(fd) - shadow.size)
        super().set_size(fd, size)
        shadow.mapping = super().map(fd, size, write=True)
        shadow.size = size


def _filled(shadow: _Shadow) -> Iterator[tuple[int, bytes]]:
    """The parts of a file that are not zeros."""
    for at in range(0, shadow.size, _CHUNK):
        data = shadow.read(at, _CHUNK)
        if any(data):
            yield at, data


def _differing(before: bytes, after: bytes) -> tuple[int, int, int]:
    """(first, behind the last, how many) places at which two pieces differ; a shorter one goes on with zeros."""
    size = max(len(before), len(after))
    pieces = [np.frombuffer(each.ljust(size, b"\0"), np.uint8) for each in (before, after)]
    places = np.flatnonzero(pieces[0] != pieces[1])
    if not len(places):
        return min(len(before), len(after)), size, 0
    return int(places[0]), int(places[-1]) + 1, len(places)
