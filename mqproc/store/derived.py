"""Queues and index follow from the log: a file of theirs that the disk cannot read is made again."""

from __future__ import annotations

import errno
from pathlib import Path

from mqproc.io import FailedSyncError, StoreIO
from mqproc.paths import StorePaths
from mqproc.store.clearing import read_written
from mqproc.store.index_headers import index_file_names
from mqproc.store.queue_folders import files_of_queues


def unreadable_file(error: OSError, paths: StorePaths) -> Path | None:
    """The file of queues or index that an error says cannot be read; None for any other error."""
    if error.errno != errno.EIO or isinstance(error, FailedSyncError) or error.filename is None:
        return None
    found = Path(error.filename).resolve()
    for folder in (paths.consume_queue, paths.index):
        if folder.resolve() in found.parents:
            return folder / found.relative_to(folder.resolve())
    return None


def read_through(io: StoreIO, path: Path) -> None:
    """Read all that was ever written of a file: raises OSError where a part cannot be read, which ends who maps it."""
    fd = io.open(path)
    try:
        read_written(io, fd)
    finally:
        io.close(fd)


def unreadable_files(io: StoreIO, paths: StorePaths) -> set[Path]:
    """All files of queues and index that cannot be read: each is read as far as it was ever written."""
    files = [folder / entry.name for folder, entry in files_of_queues(io, paths.consume_queue)]
    files += [paths.index / name for name in index_file_names(io, paths.index)]
    return {path for path in files if not _can_be_read(io, path)}


def _can_be_read(io: StoreIO, path: Path) -> bool:
    """False where the disk fails; for any other error true, which is for those to tell who need the file."""
    try:
        read_through(io, path)
    except OSError as error:
        return error.errno != errno.EIO
    return True
