"""The bytes of a CommitLog segment, wherever it lies: mapped from a folder, or fetched from remote storage in parts."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError, CorruptStoreError, MqprocError, StoreAccessError
from mqproc.io import StoreIO
from mqproc.kernels.views import as_kernel_array
from mqproc.paths import segment_name

# Fetched at once beyond what was asked for: most records that begin before a range's end also end there.
AHEAD_BYTES: Final = 1 << 20


class SegmentBytes(Protocol):
    """One segment. Positions are bytes from its begin; `size` is the file's length, at most a segment's."""

    size: int

    def part(self, start: int, stop: int) -> tuple[NDArray[np.uint8], int]:
        """uint8 of at least [start, min(stop, size)), and the position of its byte 0. Valid until the next call.

        Raises FileNotFoundError when it is gone, StoreAccessError for what else remote storage says.
        """
        ...

    def let_go(self, start: int, stop: int) -> None:
        """Nobody looks at [start, stop) soon."""
        ...

    def close(self) -> None:
        """Let go of everything. Parts that somebody still has stay valid."""
        ...


class MappedSegment:
    """A segment in a folder of this machine, mapped as a whole."""

    def __init__(self, io: StoreIO, path: Path, segment_size: int) -> None:
        """Raises FileNotFoundError when there is none."""
        self._io = io
        fd = io.open(path)
        try:
            self.size = min(io.size(fd), segment_size)
            self._map: mmap.mmap | None = io.map_as_it_is(fd, self.size) if self.size else None
        finally:
            io.close(fd)
        self._view = as_kernel_array(self._map) if self._map is not None else np.zeros(0, np.uint8)

    def part(self, start: int, stop: int) -> tuple[NDArray[np.uint8], int]:
        return self._view, 0

    def let_go(self, start: int, stop: int) -> None:
        if self._map is not None and stop > start:
            self._io.unmap_pages(self._map, start, stop - start)

    def close(self) -> None:
        self._view = np.zeros(0, np.uint8)
        self._map = None


class FetchedSegment:
    """A segment on remote storage, of which one part at a time is in memory."""

    def __init__(self, files: Any, path: str, size: int) -> None:
        """`files` is fsspec's file system, `size` the object's length."""
        self._files = files
        self._path = path
        self.size = size
        self._start = 0
        self._view = np.zeros(0, np.uint8)

    def part(self, start: int, stop: int) -> tuple[NDArray[np.uint8], int]:
        stop, end = min(stop, self.size), self._start + len(self._view)
        if start < self._start or stop > end:
            stop = min(stop + AHEAD_BYTES, self.size)
            # What the next part has in common with this one is not fetched again, or in an archive not gone back to.
            kept = self._view[start - self._start :] if self._start <= start < end else self._view[:0]
            fetched = self._fetch(start + len(kept), stop)
            self._start, self._view = start, np.concatenate((kept, fetched)) if len(kept) else fetched
        return self._view, self._start

    def let_go(self, start: int, stop: int) -> None:
        """Parts are small; the next one replaces this one."""

    def close(self) -> None:
        self._view = np.zeros(0, np.uint8)

    def _fetch(self, start: int, stop: int) -> NDArray[np.uint8]:
        place = f"{self._path}: bytes [{start:,}, {stop:,})"
        with telling(place, FileNotFoundError):
            data = self._bytes(start, stop)
        if len(data) != stop - start:
            raise CorruptStoreError(f"{place}: only {len(data):,} bytes came")
        return as_kernel_array(data)

    def _bytes(self, start: int, stop: int) -> bytes:
        return bytes(self._files.cat_file(self._path, start=start, end=stop))


class ArchivedSegment(FetchedSegment):
    """A segment in an archive, which stays open: what comes next is unpacked from there on, all else from its begin."""

    def __init__(self, files: Any, path: str, size: int) -> None:
        super().__init__(files, path, size)
        self._file: Any = None

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()

    def _bytes(self, start: int, stop: int) -> bytes:
        if self._file is None:
            self._file = self._files.open(self._path, "rb")
        self._file.seek(start)
        return bytes(self._file.read(stop - start))


def open_segment(uri: str, start: int, segment_size: int, size: int) -> SegmentBytes:
    """The segment of the store at `uri`, a folder's path or a URL, that begins at log position `start`.

    `size` is the file's length as far as it is known. Raises FileNotFoundError.
    """
    if "://" not in uri:
        return MappedSegment(StoreIO(), Path(uri) / "commitlog" / segment_name(start), segment_size)
    files, root = remote(uri)
    kind = ArchivedSegment if is_archive(files) else FetchedSegment
    return kind(files, within(root, f"commitlog/{segment_name(start)}"), min(size, segment_size))


def remote(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL and the path in it. Credentials come from the environment, as fsspec's do.

    Raises BadRequestError for a scheme that fsspec does not know and for a URL that does not say enough,
    StoreAccessError for a scheme whose package is missing and for storage that cannot be reached.
    """
    try:
        import fsspec
    except ImportError:
        raise StoreAccessError(f"{url}: remote stores need fsspec: pip install 'mqproc[spark]'") from None
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ValueError as error:
        raise BadRequestError(f"{url}: {error}") from None
    except (AttributeError, TypeError) as error:
        # Of what lies within another file system, and of such as take more than a URL.
        raise BadRequestError(f"{url}: says too little for fsspec: {error}") from None
    except (ImportError, OSError) as error:
        raise StoreAccessError(f"{url}: {_said(error)}") from None
    return files, str(root).rstrip("/") or str(root)


def is_archive(files: Any) -> bool:
    """Whether each file of a file system of fsspec's has to be unpacked from its begin."""
    from fsspec.archive import AbstractArchiveFileSystem

    return isinstance(files, AbstractArchiveFileSystem)


def within(root: str, name: str) -> str:
    """The path of a name in a folder of a file system, which may be its root; an archive's own is called nothing."""
    return f"{root.rstrip('/')}/{name}" if root else name


@contextmanager
def telling(place: str, *passed: type[Exception]) -> Iterator[None]:
    """Raises StoreAccessError for what remote storage says: each of its packages has errors of its own.

    Errors of ours go through, and such as are `passed`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (MqprocError, *passed)):
            raise
        raise StoreAccessError(f"{place}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """The first line of an error: libraries that are looked for in many places tell of each."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
