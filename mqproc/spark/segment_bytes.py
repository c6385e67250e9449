"""Bytes of a CommitLog segment: mapped from a folder or fetched from remote storage."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError, CorruptStoreError, MqprocError, StoreAccessError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.paths import segment_name

# Fetched in addition: most records that begin before a range's end also end within this.
AHEAD_BYTES: Final = 1 << 20


class SegmentBytes(abc.ABC):
    """One segment. Positions are bytes from its start; `size` is the file's length."""

    size: int
    _view: NDArray[np.uint8] = np.zeros(0, np.uint8)

    @abc.abstractmethod
    def part(self, start: int, stop: int) -> tuple[NDArray[np.uint8], int]:
        """(uint8 of at least [start, min(stop, size)), position of its byte 0) until the next call.

        Raises FileNotFoundError when the file is gone, StoreAccessError for other errors of remote storage.
        """

    def release_pages(self, start: int, stop: int) -> None:  # noqa: B027
        """Release memory of [start, stop), which is not needed soon."""

    def close(self) -> None:
        """Close the file. Parts that are still referenced stay valid."""
        self._view = np.zeros(0, np.uint8)


class MappedSegment(SegmentBytes):
    """A segment in a folder of this machine, mapped as a whole."""

    def __init__(self, io: StoreIO, path: Path, segment_size: int) -> None:
        """Raises FileNotFoundError when the segment does not exist."""
        self._io = io
        with io.opened(path) as fd:
            self.size = min(io.size(fd), segment_size)
            self._map: mmap.mmap | None = io.map_without_filling_holes(fd, self.size) if self.size else None
        if self._map is not None:
            self._view = as_kernel_array(self._map)

    def part(self, start: int, stop: int) -> tuple[NDArray[np.uint8], int]:
        return self._view, 0

    def release_pages(self, start: int, stop: int) -> None:
        if self._map is not None and stop > start:
            self._io.release_pages(self._map, start, stop - start)

    def close(self) -> None:
        super().close()
        self._map = None


class FetchedSegment(SegmentBytes):
    """A segment on remote storage, with one part at a time in memory."""

    def __init__(self, files: Any, path: str, size: int) -> None:
        """`files` is fsspec's file system, `size` the file's length."""
        self._files = files
        self._path = path
        self.size = size
        self._start = 0

    def part(self, start: int, stop: int) -> tuple[NDArray[np.uint8], int]:
        stop, end = min(stop, self.size), self._start + len(self._view)
        if start < self._start or stop > end:
            stop = min(stop + AHEAD_BYTES, self.size)
            # The overlap with the next part is kept: fetching it again costs a request, and a rewind in an archive.
            kept = self._view[start - self._start :] if self._start <= start < end else self._view[:0]
            fetched = self._fetch(start + len(kept), stop)
            self._start, self._view = start, np.concatenate((kept, fetched)) if len(kept) else fetched
        return self._view, self._start

    def _fetch(self, start: int, stop: int) -> NDArray[np.uint8]:
        place = f"{self._path}: bytes [{start:,}, {stop:,})"
        with storage_errors(place, FileNotFoundError):
            data = self._bytes(start, stop)
        if len(data) != stop - start:
            raise CorruptStoreError(f"{place}: only {len(data):,} bytes came")
        return as_kernel_array(data)

    def _bytes(self, start: int, stop: int) -> bytes:
        return bytes(self._files.cat_file(self._path, start=start, end=stop))


class ArchivedSegment(FetchedSegment):
    """A segment in an archive: sequential reads decompress onwards, others from its start."""

    _file: Any = None

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
    """Open the segment at log position `start` of the store at `uri`, a folder or a URL.

    `size` is the file's length as far as it is known. Raises FileNotFoundError.
    """
    if "://" not in uri:
        return MappedSegment(StoreIO(), Path(uri) / "commitlog" / segment_name(start), segment_size)
    files, root = open_file_system(uri)
    kind = ArchivedSegment if is_archive(files) else FetchedSegment
    return kind(files, join_path(root, f"commitlog/{segment_name(start)}"), min(size, segment_size))


def open_file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL and the path in it. Credentials come from the environment.

    Raises BadRequestError for an unknown scheme and an incomplete URL, StoreAccessError when the scheme's package is
    missing or storage cannot be reached.
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
        # File systems inside another one, and those that need more than a URL.
        raise BadRequestError(f"{url}: incomplete for fsspec: {error}") from None
    except (ImportError, OSError) as error:
        raise StoreAccessError(f"{url}: {_first_line(error)}") from None
    return files, str(root).rstrip("/") or str(root)


def is_archive(files: Any) -> bool:
    """Whether reading a file of this fsspec file system decompresses it from its start."""
    from fsspec.archive import AbstractArchiveFileSystem

    return isinstance(files, AbstractArchiveFileSystem)


def join_path(root: str, name: str) -> str:
    """The path of a name in a folder; the folder may be a root, which is "" in an archive."""
    return f"{root.rstrip('/')}/{name}" if root else name


@contextmanager
def storage_errors(place: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn errors of storage packages, except those of `passed`, into StoreAccessError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (MqprocError, *passed)):
            raise
        raise StoreAccessError(f"{place}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """The first line of an error, as some libraries list every location they tried."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
