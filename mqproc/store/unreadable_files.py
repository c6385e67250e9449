"""Files of queues and index that the disk cannot read; they can be rebuilt from the log."""

from __future__ import annotations

import errno
from pathlib import Path

from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.files import files_of_queues
from mqproc.store.index.files import index_file_names
from mqproc.store.zero_tail import read_through


def unreadable_file(error: OSError, paths: StorePaths) -> Path | None:
    """The queue or index file that an I/O error refers to; None for any other error."""
    if error.errno != errno.EIO or isinstance(error, FailedSyncError) or error.filename is None:
        return None
    found = Path(error.filename).resolve()
    for folder in (paths.consume_queue, paths.index):
        if folder.resolve() in found.parents:
            return folder / found.relative_to(folder.resolve())
    return None


def unreadable_files(io: StoreIO, paths: StorePaths) -> set[Path]:
    """All queue and index files with unreadable sectors, found by reading everything written."""
    files = [folder / entry.name for folder, entry in files_of_queues(io, paths.consume_queue)]
    files += [paths.index / name for name in index_file_names(io, paths.index)]
    return {path for path in files if not _can_be_read(io, path)}


def _can_be_read(io: StoreIO, path: Path) -> bool:
    """False after an I/O error of the disk; other errors are left to the users of the file."""
    try:
        read_through(io, path)
    except OSError as error:
        return error.errno != errno.EIO
    return True
