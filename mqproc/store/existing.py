"""Whether a store lies where somebody says that one does. Every tool asks here, so a wrong path has one answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mqproc.errors import StoreAccessError, StoreNotFoundError
from mqproc.io import Kind, StoreIO
from mqproc.paths import StorePaths, lost_link

# What a symlink leads to is looked at by who needs it.
_NO_FOLDER: Final = (Kind.FILE, Kind.OTHER)


def check_is_store(io: StoreIO, paths: StorePaths) -> None:
    """Raise StoreAccessError unless a store's folder lies there, StoreNotFoundError when nothing does."""
    try:
        entry = io.entry(Path(os.path.realpath(paths.root)))
        log, config, own = (io.entry(folder) for folder in (paths.commit_log, paths.config, paths.own))
    except OSError as error:  # Not ours to enter, or a symlink that leads to itself.
        raise StoreAccessError(f"{paths.root}: {error.strerror}") from None
    if entry is None:
        raise StoreNotFoundError(f"{paths.root}: {lost_link(paths.root) or 'no such folder'}")
    if entry.kind is not Kind.FOLDER:
        found = entry.kind.value if entry.kind is Kind.OTHER else f"a {entry.kind.value}"
        raise StoreAccessError(f"{paths.root}: {found}, not a store's folder")
    if log is None or log.kind in _NO_FOLDER:
        raise not_a_store(paths.root)
    for folder, found in ((paths.config, config), (paths.own, own)):
        if found is not None and found.kind in _NO_FOLDER:
            raise StoreAccessError(f"{folder}: not a folder")


def not_a_store(place: object) -> StoreAccessError:
    """What a folder without a log is told, on this machine or on remote storage."""
    return StoreAccessError(f"{place}: not a store: it has no folder commitlog")
