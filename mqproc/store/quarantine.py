"""Quarantine (`mqproc/aside`): invalid files found in the place of store files are kept."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

from mqproc.io.store_io import FailedSyncError, StoreIO, read_through
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.files import files_of_queues
from mqproc.store.index.files import index_file_names


def quarantine_file(io: StoreIO, paths: StorePaths, path: Path) -> Path:
    """Move an invalid file of the store to `mqproc/aside/`; returns its new path."""
    target = free_quarantine_path(
        io, paths, f"{path.parent.name}.{path.name}" if path.parent != paths.root else path.name
    )
    io.rename(path, target)
    return target


def free_quarantine_path(io: StoreIO, paths: StorePaths, name: str) -> Path:
    """An unused path in `mqproc/aside/`: this name, with a number appended if necessary."""
    io.make_folder(paths.quarantine, mode=0o700)
    places = (paths.quarantine / (f"{name}.{number}" if number else name) for number in itertools.count())
    return next(place for place in places if io.entry(place) is None)


# Files of queues and index that the disk cannot read; they can be rebuilt from the log.


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
