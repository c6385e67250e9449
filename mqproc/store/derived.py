"""Queues and index follow from the log: a file of theirs that the disk cannot read is made again."""

from __future__ import annotations

import errno
from pathlib import Path

from mqproc.io import FailedSyncError, StoreIO
from mqproc.paths import StorePaths
from mqproc.store.clearing import read_written
from mqproc.store.index_headers import index_file_names


def unreadable_file(error: OSError, paths: StorePaths) -> Path | None:
    """The file of queues or index that an error says cannot be read; None for any other error."""
    if error.errno != errno.EIO or isinstance(error, FailedSyncError) or error.filename is None:
        return None
    found = Path(error.filename).resolve()
    for folder in (paths.consume_queue, paths.index):
        if folder.resolve() in found.parents:
            return folder / found.relative_to(folder.resolve())
    return None


def read_index_file(io: StoreIO, path: Path) -> None:
    """Raise OSError when a part of a file cannot be read: that ends who maps it."""
    fd = io.open(path)
    try:
        read_written(io, fd)
    finally:
        io.close(fd)


def unreadable_index_file(io: StoreIO, paths: StorePaths) -> Path | None:
    """The first file of the index that cannot be read, None when all can."""
    for name in index_file_names(io, paths.index):
        try:
            read_index_file(io, paths.index / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            if (found := unreadable_file(error, paths)) is None:
                raise
            return found
    return None
