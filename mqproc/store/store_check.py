"""Check that a path is a store, with the same errors in all tools."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mqproc.errors import StoreAccessError, StoreNotFoundError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.paths import StorePaths, dangling_link

# Symlinks are accepted: opening them follows the link.
_NO_FOLDER: Final = (Kind.FILE, Kind.OTHER)


def check_is_store(io: StoreIO, paths: StorePaths) -> None:
    """Raise StoreAccessError unless the path is a store, StoreNotFoundError if it is missing."""
    try:
        entry = io.entry(Path(os.path.realpath(paths.root)))
        log, config, own = (io.entry(folder) for folder in (paths.commit_log, paths.config, paths.own))
    except OSError as error:  # No permission, or a symlink loop.
        raise StoreAccessError(f"{paths.root}: {error.strerror}") from None
    if entry is None:
        raise StoreNotFoundError(f"{paths.root}: {dangling_link(paths.root) or 'no such folder'}")
    if entry.kind is not Kind.FOLDER:
        found = entry.kind.value if entry.kind is Kind.OTHER else f"a {entry.kind.value}"
        raise StoreAccessError(f"{paths.root}: {found}, not a store's folder")
    if log is None or log.kind in _NO_FOLDER:
        raise not_a_store(paths.root)
    for folder, found in ((paths.config, config), (paths.own, own)):
        if found is not None and found.kind in _NO_FOLDER:
            raise StoreAccessError(f"{folder}: not a folder")


def not_a_store(place: object) -> StoreAccessError:
    """The error for a folder without a log, on this machine or on remote storage."""
    return StoreAccessError(f"{place}: not a store: it has no folder commitlog")
